"""Settings of kvp-evolve and the checks that need no model. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvp.budgets import Budget, parse_budget, parse_budgets
from kvp.cli import split_list
from kvp.errors import UsageError

RUN_ONLY = ("out", "device", "rows", "memory_gib", "bootstrap", "curves", "level", "budgets")
"""Settings that do not decide what a search finds, or that it does not read."""

_LEAST = {
    "prompts": 1,
    "holdout": 0,
    "length": 1,
    "group": 1,
    "generations": 1,
    "continuation": 1,
    "rows": 1,
    "bootstrap": 1,
    "max_new_tokens": 1,
    "sinks": 0,
    "recents": 0,
    "seed": 0,
    "lambda_": 0,
    "gamma": 0,
    "memory_gib": 0,
}


@dataclass(frozen=True, kw_only=True)
class EvolveConfig:
    """Settings of one search, or of one choice from curves."""

    out: str
    """Folder for budgets.json: new, empty, or one of the same search to resume."""
    model: str = "nano"
    """`nano` (bundled), a local folder or a hub id."""
    revision: str | None = None
    """Hub revision of the model."""
    scorer: str = "snapkv"
    """Method that ranks the tokens: `name`, `name:preset`, `name(option=value)`, or `kvp` with
    --policies. With --curves its label in the results, such as `kvp/seed0`."""
    policies: str = ""
    """Policy directory for `kvp`."""
    tasks: str = "ruler"
    """RULER task names, `ruler` for all of them, or other tasks of kvp-eval."""
    budget: str = "12.5%"
    """Tokens per KV head on average, protected ones included; `%` is of the tokens in the cache."""
    protocol: Literal["query_aware", "query_agnostic"] = "query_aware"
    """Whether compression sees the question."""
    protection: Literal["on", "off"] = "on"
    """Keep first and last tokens always, or not."""
    sinks: int = 4
    """First tokens that protection keeps."""
    recents: int = 16
    """Most recent tokens that protection keeps."""
    prompts: int = 30
    """Prompts of the search, spread evenly over the tasks; the same ones for every candidate."""
    holdout: int = 60
    """Further prompts on which the result is compared with uniform budgets (0: no comparison)."""
    length: int = 512
    """Most prompt tokens, chat template and answer prefix included."""
    split: Literal["validation", "train"] = "validation"
    """Split that all prompts come from; the test split stays untouched. (With --curves no prompt is
    read: what the curves were measured on decides, and kvp-eval prefers a store's test traces.)"""
    essays: str | None = None
    """Text file or folder for the essay haystack instead of the built-in prose."""
    chat: str | None = None
    """JSONL of dialogues for the chat task instead of the built-in ones."""
    text: str | None = None
    """Text file, folder or JSONL for the task `text`."""
    continuation: int = 128
    """Tokens of running text whose likelihood the task `text` measures."""
    max_new_tokens: int | None = None
    """Most tokens to generate, instead of each task's own number."""
    group: int = 8
    """Consecutive layers searched together, bottom to top; the last group may be smaller."""
    generations: int = 10
    """CMA-ES generations per group."""
    sigma: float = 0.3
    """Initial step size in the unit cube of the search."""
    reach: float = 16.0
    """Ratio of the largest to the smallest budget that the unit interval stands for."""
    constraint: Literal["project", "soft"] = "project"
    """Rescale every candidate to the budget, or only reward staying below it (as published)."""
    lambda_: float = 0.3
    """Weight of the cache score in the fitness (also spelled --lambda)."""
    gamma: float = 0.2
    """How little the cache score rewards budgets below the target."""
    seed: int = 0
    """Seed of prompts, search, random methods and resampling."""
    device: str = "cpu"
    """Torch device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Model dtype."""
    rows: int = 256
    """Most cache rows that are decoded as one batch."""
    memory_gib: float = 8.0
    """Prefilled prompts kept between generations, in GiB; others are prefilled again."""
    bootstrap: int = 2000
    """Resamples behind the interval of the held-out comparison."""
    curves: str | None = None
    """Results folder of kvp-eval with cost curves: choose from those, without a model."""
    level: Literal["layer", "head"] = "layer"
    """With --curves: a count per layer, or per KV head."""
    budgets: str = "3%,6%,9%,12.5%,19%,25%,37.5%,50%,75%"
    """With --curves: mean budgets to choose for."""

    def __post_init__(self) -> None:
        """Raise ValueError or UsageError, naming the flag, on settings that cannot work."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name.strip('_')} must be at least {least}, got {value}")
        if self.sigma <= 0:
            raise ValueError(f"--sigma must be positive, got {self.sigma}")
        if self.reach <= 1:
            raise ValueError(f"--reach must be more than 1, got {self.reach}")
        for flag in ("tasks", "scorer"):
            if not split_list(getattr(self, flag)):
                raise ValueError(f"--{flag} is empty")
        if self.level == "head" and self.curves is None:
            raise ValueError("--level head needs --curves: the search is over layers")
        for flag, parse in (("budget", parse_budget), ("budgets", parse_budgets)):
            try:
                parse(getattr(self, flag))
            except UsageError as error:
                raise UsageError(f"--{flag}: {error}") from None

    @property
    def target(self) -> Budget:
        """Budget of the search."""
        return parse_budget(self.budget)

    @property
    def task_list(self) -> tuple[str, ...]:
        """Task names in order, without repeats."""
        return split_list(self.tasks)

    def identity(self) -> dict[str, Any]:
        """The settings every run of one search must share."""
        settings = {name: value for name, value in asdict(self).items() if name not in RUN_ONLY}
        return {name.strip("_"): value for name, value in settings.items()}
