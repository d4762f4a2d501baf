"""Settings of `kvp evolve`; no torch here."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from eval.config import EvalConfig, SharedConfig, check_flag, make_eval_config
from eval.results.record_names import QUERY_AWARE, Protocol
from kvp import names as known_names
from kvp.bounds import NotNegative, Positive
from kvp.budgets import Budget, parse_budget
from kvp.errors import UsageError
from kvp.names import LEARNED
from kvp.program.settings import MemoryConfig, RunConfig
from kvp.specification import split_list


@dataclass(frozen=True, kw_only=True)
class EvolveConfig(SharedConfig, MemoryConfig, RunConfig):
    """Search."""

    out: str
    """What is written. A folder for budgets.json: new, empty, or of the same search, to resume."""
    scorer: str = "snapkv"
    """What ranks the tokens: `name`, `name:preset`, `name(option=value)` or `kvp` (--policies)."""
    budget: str = "12.5%"
    """Tokens kept per KV head on average, protected ones included; `%` is of the cached tokens."""
    protocol: Protocol = QUERY_AWARE
    """Whether compression sees the question."""
    protection: Literal["on", "off"] = "on"
    split: Literal["validation", "train"] = "validation"
    """Which split of keys, values and haystack text (or rows) prompts come from."""
    memory_gb: float = 8.0
    search_prompts: Positive = 30
    """Prompts of the search, spread evenly over the tasks; the same ones for every candidate."""
    holdout: NotNegative = 60
    """Further prompts on which the result is compared with uniform budgets (0: no comparison)."""
    group: Positive = 8
    """Consecutive layers searched together, bottom to top; the last group may be smaller."""
    generations: Positive = 10
    """CMA-ES generations per group."""
    constraint: Literal["project", "soft"] = "project"
    """Rescale every candidate to the budget, or only reward staying below it (as published)."""

    IDENTITY: ClassVar[tuple[str, ...]] = (
        *SharedConfig.IDENTITY, "tasks", "policies", "protection", "scorer", "budget",
        "protocol", "search_prompts", "holdout", "group", "generations", "constraint",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not split_list(self.scorer):
            raise UsageError("--scorer is empty")
        check_flag("budget", parse_budget, self.budget)

    def check_names(self) -> None:
        """Raise KvpError on an unknown scorer, and as kvp eval does."""
        known_names.check_methods([self.scorer], "scorer", (LEARNED,))
        self.eval_config.check_names()

    @property
    def target(self) -> Budget:
        """Budget of the search."""
        return parse_budget(self.budget)

    @property
    def eval_config(self) -> EvalConfig:
        """The settings of model and scorer, as kvp eval takes them."""
        return make_eval_config(self, methods=self.scorer)
