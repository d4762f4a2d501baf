"""Settings of `kvp-train`; no torch here, so that `--help` answers at once.

Settings that default to null come from the preset (`train.recipe`), which documents them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from train.head_range import parse_heads
from train.objectives import READ_BY
from train.online.settings import Answers, DtypeName, OnlineSettings
from train.recipe import (
    PRESETS,
    CalibrationName,
    KeyFrame,
    OptimizerName,
    PresetName,
    Recipe,
    RewardName,
    SharingName,
    SortLossName,
)

NetworkForm = Literal["auto", "loop", "stacked"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train one ranker per KV head, from a trace store or a model, and write a policy directory."""

    out: str
    """Policy directory to write; an unfinished run of the same settings is continued."""
    source: Literal["traces", "model"] = "traces"
    """Where traces come from: a store, or a model that runs meanwhile and leaves none on disk."""
    traces: str | None = None
    """Trace store written by kvp-collect; required with --source traces."""
    preset: PresetName = "fourier"
    """Recipe the settings below start from."""
    seed: int = 0
    """Decides initial weights, contexts and permutations."""
    device: str = "cpu"
    """cpu, cuda or cuda:INDEX."""
    devices: int = 1
    """Processes that share the contexts of every step, one per GPU or, on a CPU, sharing its cores;
    the result differs by rounding only."""
    heads: str | None = None
    """Train only these KV heads, START:STOP counted layer by layer; kvp-merge joins the parts. On
    a CPU each part computes the losses, not the rankers, of all heads."""
    init_from: str | None = None
    """Policy directory whose rankers training starts from, instead of random weights."""
    dry_run: bool = False
    """Say what would be trained and how long it would take, and write nothing."""
    resume: bool = True
    """Continue an unfinished run of the same settings; false refuses any non-empty --out."""
    allow_incomplete: bool = False
    """Train on a store whose collection has not finished."""
    memory_gb: float = 4.0
    """RAM of each process for traces and labels, GB in all; what does not fit is read and computed
    again."""
    activation_gb: float = 8.0
    """Memory for activations of the rankers, GB; heads that do not fit together are computed
    twice, in groups (a third more time, the same result). What an objective needs is not in it."""
    network: NetworkForm = "auto"
    """How the networks of all heads are computed: loop (one after the other), stacked (one product
    per layer), or auto: loop on a CPU, stacked on a GPU (docs/results/speed.md). The results differ
    by rounding."""
    validate_every: int = 100
    """Steps between validations; each head exports its best averaged weights."""
    validation_contexts: int = 64
    """Held-out contexts per validation."""
    calibration: CalibrationName = "contribution"
    """What scores are calibrated to on validation contexts (docs/method.md), so that heads can
    compete; kvp-calibrate changes it later."""
    calibration_contexts: int = 128
    """Held-out contexts the calibration is fitted on."""
    checkpoint_every: int = 50
    """Steps between checkpoints, the most a killed run loses."""
    log_every: int = 10
    """Steps between scalars in TensorBoard."""

    objective: str | None = None
    """rloo (sampled rankings, baselines within a context), rloo_batch (baselines over the step),
    exact (the expected reward in closed form), listwise (cross-entropy on shares), regress (squared
    error of the log label), or a differentiable sort: soft_rank, soft_sort, neural_sort."""
    label: str | None = None
    """Importance of a token: future_attention (the sum over all future queries),
    max_future_attention (the largest of any future query; not from a store of importance), kvzip
    or kvzip_plus where kvp-collect stored it with --labels, or package.module:NAME."""
    steps: int | None = None
    """Optimiser steps."""
    contexts: int | None = None
    """Contexts (sequence, cut) per step."""
    points_per_sequence: int | None = None
    """Contexts cut from one sequence when its turn comes; more of them read the store less."""
    sequences: int | None = None
    """Training sequences used, the first of the store; 0 = all."""
    permutations: int | None = None
    """Permutations sampled per context and head (rloo, rloo_batch)."""
    pairs: int | None = None
    """Opponents that every token is compared with (exact); 0 = all."""
    sort_loss: SortLossName | None = None
    """ranks (squared error of softened ranks) or cost (softened cost), for differentiable sorts."""
    temperature: float | None = None
    """Strength of a differentiable sort's softening, for scores with standard deviation 1."""
    reward: RewardName | None = None
    """skill, ratio or mass (rloo, rloo_batch, exact)."""
    budget_weights: str | None = None
    """Budgets that count in the reward: all, log (each by 1/b) or LOW:HIGH, e.g. 6%:50% or 64:512
    (rloo, rloo_batch, soft_sort, neural_sort)."""
    exclude_protected: bool | None = None
    """Leave the always kept tokens out of the ranking and the reward."""
    hidden: int | None = None
    """Width of the ranker's hidden layers."""
    blocks: int | None = None
    """Hidden layers of the ranker, 1 or 2."""
    inputs: str | None = None
    """What the ranker sees of a token: some of key,value,position,distance."""
    key_frame: KeyFrame | None = None
    """stored (keys as the model rotated them) or end (turned on, so that the end of the cache is
    position 0, as the queries that follow see them)."""
    sharing: SharingName | None = None
    """heads (a network per head) or model (one network with an embedding per head)."""
    max_positions: int | None = None
    """Rows of the position table (paper architecture)."""
    optimizer: OptimizerName | None = None
    """adamw, or muon (its steps for the weight matrices, AdamW's for the rest)."""
    lr: float | None = None
    """Peak learning rate."""
    final_lr: float | None = None
    """Learning rate at the last step."""
    warmup_steps: int | None = None
    """Linear warm-up steps."""
    weight_decay: float | None = None
    """Weight decay, times the learning rate."""
    gradient_clip: float | None = None
    """Maximum gradient norm of each head."""
    advantage_clip: float | None = None
    """Bound of normalised advantages, standard deviations."""
    ema: float | None = None
    """Decay of the averaged weights."""
    compress_prompt: float | None = None
    """Weight of cuts one token before the prompt's end."""
    compress_context: float | None = None
    """Weight of cuts at the context's end."""
    compress_uniform: float | None = None
    """Weight of cuts anywhere."""
    min_prefix: int | None = None
    """Shortest cut, tokens."""
    uniform_points: int | None = None
    """Uniform cuts per sequence; 0 = every position."""
    future_max: int | None = None
    """Future tokens that count; 0 = all. In a store of importance the window ends at the next cut
    of its grid."""

    model: str | None = None
    """`nano` (bundled; the default), a local folder or a hub id. This and all that follows is for
    --source model alone."""
    revision: str | None = None
    """Hub revision of the model."""
    dtype: DtypeName | None = None
    """Dtype of the model and of the traces in RAM (float32)."""
    data: str | None = None
    """`ruler` (the default), `chat`, a file ending in `.jsonl` or a hub data set, as for
    kvp-collect."""
    tasks: str | None = None
    """RULER tasks, comma separated, taken in turn; `ruler`, the default, for all that fit."""
    length: int | None = None
    """Most prompt tokens, chat template included (512); the continuation comes on top."""
    essays: str | None = None
    """Text file or folder of `.txt` files for the essay haystack, instead of generated prose."""
    answers: Answers | None = None
    """What follows the prompt: the model's own greedy answer (model, the default), or the data's
    (reference)."""
    max_new_tokens: int | None = None
    """Most tokens of a continuation (128); RULER tasks stop at their own number."""
    validation_sequences: int | None = None
    """Sequences of the validation split, held all the time (40)."""
    buffer: int | None = None
    """Training sequences held in RAM at a time (64)."""
    epochs_per_sequence: int | None = None
    """Visits of a training sequence until a new one takes its place (8)."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        contexts = ("validation_contexts", "calibration_contexts")
        for name in (*contexts, "validate_every", "checkpoint_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        for name in ("memory_gb", "activation_gb"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} must be positive, got {getattr(self, name)}")
        self._check_parts(self.recipe())
        self._check_source()

    def _check_parts(self, recipe: Recipe) -> None:
        if not 1 <= self.devices <= recipe.contexts:
            raise ValueError(
                f"--devices must lie in 1..{recipe.contexts}, the --contexts that they share, "
                f"got {self.devices}"
            )
        if self.heads is not None:
            parse_heads(self.heads)
            if recipe.sharing == "model":
                raise ValueError("--heads needs --sharing heads: one network cannot be split")

    def _check_source(self) -> None:
        given = [name for name in _STREAM if getattr(self, name) is not None]
        if self.source == "traces":
            if given:
                raise ValueError(f"--{given[0]} needs --source model")
            if self.traces is None:
                raise ValueError("--traces is missing: name a trace store, or use --source model")
            return
        if self.traces is not None:
            raise ValueError("--traces cannot be used with --source model")
        if self.allow_incomplete:
            raise ValueError("--allow_incomplete needs --source traces")
        if self.devices > 1:
            raise ValueError("--devices needs --source traces: one process runs the model")
        self.stream()

    def stream(self) -> OnlineSettings:
        """What --source model was given, and the defaults of the rest."""
        given = {name: getattr(self, name) for name in _STREAM}
        return OnlineSettings(**{name: value for name, value in given.items() if value is not None})

    @property
    def stacked(self) -> bool | None:
        """`network` as `HeadRankers.forward` takes it, None for auto."""
        return None if self.network == "auto" else self.network == "stacked"

    def recipe(self) -> Recipe:
        """The preset with every setting that was given."""
        names = [field.name for field in fields(Recipe) if field.name != "architecture"]
        given = {name: getattr(self, name) for name in names}
        changes = {name: value for name, value in given.items() if value is not None}
        return replace(PRESETS[self.preset], **changes)

    def unread(self) -> list[str]:
        """Settings that were given and that the objective does not read."""
        objective = self.recipe().objective
        return [
            name
            for name, readers in READ_BY.items()
            if getattr(self, name) is not None and objective not in readers
        ]

    def identity(self) -> dict[str, Any]:
        """Settings that decide the weights: two runs may share --out only if these agree."""
        return {
            "preset": self.preset,
            "seed": self.seed,
            "heads": self.heads,
            "validate_every": self.validate_every,
            "validation_contexts": self.validation_contexts,
            **self.recipe().to_dict(),
        }


_STREAM = tuple(field.name for field in fields(OnlineSettings))
"""Settings of --source model."""
