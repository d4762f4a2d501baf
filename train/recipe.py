"""The two training recipes as code; docs/method.md compares them.

`fourier` is all defaults of `Recipe` (docs/results/smollm2_details.md). `paper` follows the KVP
paper (section 3, Algorithm 1, appendix A.2) and, where the paper is silent, the facts known about
its released code; that page lists the differences that remain.

No torch here: `kvp train --help` reads these defaults.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge

from kvp.bounds import NotNegative, Positive, Weight
from kvp.errors import UsageError
from kvp.plugins import Registry
from kvp.program.settings import Group
from kvp.specification import split_list
from kvp.training_names import INPUTS, PAPER_INPUTS, TOKEN_INPUTS

LABELS = Registry(
    flag="--label",
    builtin={
        "future_attention": "train.data.labels:FUTURE_ATTENTION",
        "max_future_attention": "train.data.labels:MAX_FUTURE_ATTENTION",
        "max_reply_attention": "train.data.labels:MAX_REPLY_ATTENTION",
        "reply_and_kvzip": "train.data.labels:REPLY_AND_KVZIP",
        "kvzip": "train.data.labels:KVZIP",
        "kvzip_plus": "train.data.labels:KVZIP_PLUS",
    },
)
"""Definitions of importance, the number that rankers learn to order tokens by, as
`train.data.labels.Label`."""
OBJECTIVES = Registry(
    flag="--objective",
    builtin={
        "rloo": "train.learning.losses:rloo_objective",
        "rloo_batch": "train.learning.losses:rloo_batch_objective",
        "exact": "train.learning.losses:exact_objective",
        "listwise": "train.learning.losses:listwise_objective",
        "regress": "train.learning.losses:regress_objective",
        "soft_rank": "train.learning.differentiable_sorts:soft_rank_objective",
    },
)
"""Losses of rankers, of the type `train.learning.losses.Objective`."""

PresetName = Literal["fourier", "paper"]


@dataclass(frozen=True, kw_only=True)
class RankerSettings(Group):
    """Ranker."""

    hidden: Positive = 64
    """Width of the ranker's hidden layers."""
    inputs: str = ",".join(INPUTS)
    """Inputs of the ranker per token, comma separated, some of key, value, position, distance and
    recent (what the last 32 queries attend to). The network of paper reads key, value and position,
    which cannot be chosen."""
    neighbours: NotNegative = 31
    """Tokens on either side of a token that add to its score; 0 scores every token by itself."""
    key_frame: Literal["stored", "end"] = "end"
    """stored (keys as the model rotated them) or end (rotated on, so that the end of the cache is
    position 0, as the queries that follow see them)."""
    reach: NotNegative = 256
    """Tokens from either end of a context within which a token's place is seen; all that are
    farther from both ends look alike, so that a context may be longer than any of the training. 0:
    every place is seen, as in paper."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Group):
    """Objective."""

    objective: str = "listwise"
    """Loss: listwise (cross-entropy on shares), rloo (sampled rankings, baselines of a context),
    rloo_batch (baselines of the step), exact (expected reward in closed form), regress (squared
    error of the log label), soft_rank (a differentiable sort), or package.module:function."""
    label: str = "max_reply_attention"
    """Importance of a token: future_attention (the sum over all future queries),
    max_future_attention (the largest of any future query), max_reply_attention (the same, queries
    that write no reply counted a fifth), kvzip or kvzip_plus where kvp collect stored it with
    --labels, reply_and_kvzip (half of each), or package.module:NAME."""
    permutations: Positive = 32
    """Permutations sampled per context and head (rloo, at least 2; rloo_batch)."""
    sort_loss: Literal["ranks", "cost"] = "cost"
    """ranks (squared error of softened ranks) or cost (softened cost), for soft_rank."""
    temperature: float = 0.1
    """Strength of soft_rank's softening, for scores with standard deviation 1."""
    reward: Literal["skill", "ratio"] = "skill"
    """How the all-budgets cost of a permutation is normalised (`kvp.reward`): skill or ratio
    (rloo, rloo_batch, exact)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(Group):
    """Optimizer."""

    steps: Positive = 600
    """Optimizer steps."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """adamw, or muon (its steps for the weight matrices, AdamW's for the rest)."""
    lr: float = 1e-2
    """Highest learning rate, reached after the warm-up."""


@dataclass(frozen=True, kw_only=True)
class ContextSettings(Group):
    """Contexts."""

    contexts: Positive = 4
    """Contexts (sequence, compression point) per step."""
    compress_prompt: Weight = 0.4
    """Weight of compression points one token before the end of the prompt (query_aware)."""
    compress_context: Weight = 0.4
    """Weight of compression points at the end of the context (query_agnostic)."""
    compress_uniform: Weight = 0.2
    """Weight of compression points anywhere in the sequence."""
    sequences: NotNegative = 0
    """Training sequences used, the first of the store; 0 = all."""
    min_prefix: Annotated[int, Ge(2)] = 64
    """Shortest prefix that is compressed, tokens."""
    future_max: NotNegative = 512
    """Future tokens whose attention counts; 0 = all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compress_prompt + self.compress_context + self.compress_uniform <= 0:
            raise UsageError(
                "--compress_prompt, --compress_context and --compress_uniform cannot all be 0"
            )


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(ObjectiveSettings, RankerSettings, OptimizerSettings, ContextSettings):
    """The settings of a recipe that have flags."""


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeSettings):
    """All that decides the weights, given training data and seed; its own fields have no flags."""

    architecture: Literal["fourier", "paper"] = "fourier"
    """Ranker (`policies.ranker`): fourier (positions as features), paper (a table of them)."""
    uniform_points: int = 16
    """Evenly spaced compression points per sequence for compress_uniform; 0 = every position."""
    final_lr: float = 1e-6
    """Learning rate at the last step of the cosine, at most `lr`."""
    warmup_steps: int = 100
    """Linear warm-up from a hundredth of lr, steps; at most a fifth of all steps."""
    weight_decay: float = 1e-3
    """Decoupled weight decay, times the learning rate."""
    gradient_clip: float = 5.0
    """Maximum gradient norm of each head."""
    advantage_clip: float = 3.0
    """Bound of normalised advantages, standard deviations (rloo, rloo_batch)."""
    ema: float = 0.99
    """Decay of the averaged weights, which are validated and exported; starts after warm-up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        OBJECTIVES.check(self.objective)
        LABELS.check(self.label)
        for name in ("lr", "temperature"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name} must be positive, got {getattr(self, name)}")
        if self.objective == "rloo" and self.permutations < 2:
            raise UsageError("--permutations must be at least 2 (leave-one-out)")
        if self.objective == "rloo_batch" and self.contexts * self.permutations < 2:
            raise UsageError("--contexts times --permutations must be at least 2 (leave-one-out)")
        inputs = self.input_list
        if not inputs or set(inputs) - set(INPUTS):
            raise UsageError(f"--inputs must be some of {','.join(INPUTS)}, got {self.inputs!r}")
        if self.architecture == "paper":
            chosen = {
                "inputs": inputs not in (PAPER_INPUTS, TOKEN_INPUTS),
                "key_frame": self.key_frame != "stored",
                "neighbours": self.neighbours > 0,
                "reach": self.reach > 0,
            }
            if wrong := [name for name, differs in chosen.items() if differs]:
                raise UsageError(f"--{wrong[0]} cannot be chosen for the paper's architecture")

    @property
    def input_list(self) -> tuple[str, ...]:
        """Names of the inputs, in the order of `INPUTS`; unknown ones last."""
        named = split_list(self.inputs)
        return tuple(sorted(named, key=[*INPUTS, *named].index))

    @property
    def warmup(self) -> int:
        """Warm-up steps really taken: short runs spend at most a fifth of their steps on it."""
        return min(self.warmup_steps, self.steps // 5)


FOURIER = Recipe()
"""The default recipe."""

PAPER = replace(
    FOURIER,
    architecture="paper", hidden=256, inputs=",".join(PAPER_INPUTS), key_frame="stored", reach=0,
    neighbours=0, objective="rloo", label="future_attention", permutations=8, sort_loss="ranks",
    reward="ratio", optimizer="adamw", lr=5e-5, advantage_clip=2.0, steps=4_000, contexts=16,
    compress_prompt=0.0, compress_context=0.0, compress_uniform=1.0,
    min_prefix=16, uniform_points=0, future_max=0,
)  # fmt: skip
"""The recipe of the KVP paper, as differences from the default."""

PRESETS: dict[PresetName, Recipe] = {"fourier": FOURIER, "paper": PAPER}
