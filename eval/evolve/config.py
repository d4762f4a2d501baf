"""Settings of kvp evolve and the checks that need no model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from eval.config import MeasureConfig, PromptConfig
from kvp.budgets import Budget, parse_budget
from kvp.config_groups import MemoryConfig, ModelConfig, ProtectionConfig, RunConfig, split_list
from kvp.errors import UsageError
from kvp.known_names import check_methods

RUN_ONLY = (
    "out", "device", "decode_batch", "memory_gb", "bootstrap",
)  # fmt: skip
"""Settings that do not decide what a search finds, or that it does not read."""


@dataclass(frozen=True, kw_only=True)
class EvolveConfig(
    PromptConfig, MeasureConfig, ModelConfig, ProtectionConfig, MemoryConfig, RunConfig
):
    """Search."""

    out: str
    """What is written. A folder for budgets.json: new, empty, or one of the same search to
    resume."""
    scorer: str = "snapkv"
    """Method that ranks the tokens: `name`, `name:preset`, `name(option=value)`, or `kvp` with
    --policies."""
    budget: str = "12.5%"
    """Tokens kept per KV head on average, protected ones included; `%` is of the tokens in the
    cache."""
    protocol: Literal["query_aware", "query_agnostic"] = "query_aware"
    """Whether compression sees the question."""
    protection: Literal["on", "off"] = "on"
    split: Literal["validation", "train"] = "validation"
    """Which split of keys, values and haystack text (or rows) prompts come from."""
    memory_gb: float = 8.0
    search_prompts: int = 30
    """Prompts of the search, spread evenly over the tasks; the same ones for every candidate."""
    holdout: int = 60
    """Further prompts on which the result is compared with uniform budgets (0: no comparison)."""
    group: int = 8
    """Consecutive layers searched together, bottom to top; the last group may be smaller."""
    generations: int = 10
    """CMA-ES generations per group."""
    sigma: float = 0.3
    """Initial step size in the unit cube of the search."""
    constraint: Literal["project", "soft"] = "project"
    """Rescale every candidate to the budget, or only reward staying below it (as published)."""
    lambda_: float = 0.3
    """Weight of the cache score in the fitness (also spelled --lambda)."""
    gamma: float = 0.2
    """Slope of the cache score below the target; 0: smaller budgets score like the target."""

    VISIBLE: ClassVar[tuple[str, ...]] = (
        "out", "scorer", "policies", "budget", "protocol", "protection", "tasks", "length",
        "data", "model", "dtype", "device", "split", "search_prompts", "holdout", "group",
        "generations", "seed",
    )  # fmt: skip
    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "search_prompts": 1,
        "holdout": 0,
        "group": 1,
        "generations": 1,
        "lambda_": 0,
        "gamma": 0,
    }
    MAXIMUMS: ClassVar[Mapping[str, float]] = {"search_prompts": 1_000_000, "holdout": 1_000_000}

    def __post_init__(self) -> None:
        """Raise ValueError or UsageError, naming the flag, on settings that cannot work."""
        super().__post_init__()
        if not self.sigma > 0:
            raise ValueError(f"--sigma must be positive, got {self.sigma}")
        if not split_list(self.scorer):
            raise ValueError("--scorer is empty")
        try:
            parse_budget(self.budget)
        except UsageError as error:
            raise UsageError(f"--budget: {error}") from None

    def check_names(self) -> None:
        """Raise UsageError on an unknown task or scorer."""
        super().check_names()
        check_methods([self.scorer], "scorer")

    @property
    def target(self) -> Budget:
        """Budget of the search."""
        return parse_budget(self.budget)

    def identity(self) -> dict[str, Any]:
        """The settings every run of one search must share."""
        return {name: value for name, value in asdict(self).items() if name not in RUN_ONLY}
