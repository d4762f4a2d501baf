"""Settings of kvp tune and the checks that need no model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from eval.config import EvalConfig, MeasureConfig, PromptConfig
from kvp.config_groups import DryRunConfig, ModelConfig, ProtectionConfig, RunConfig
from kvp.known_names import check_allocators, check_methods


@dataclass(frozen=True, kw_only=True)
class TuneConfig(
    PromptConfig, MeasureConfig, ModelConfig, ProtectionConfig, RunConfig, DryRunConfig
):
    """Tuning."""

    out: str
    """What is written. A results folder with settings.json and settings.csv: new, empty, or one of
    the same configuration to resume or extend."""
    methods: str = "random,streaming_llm,knorm,keydiff,lagkv,snapkv,tova,h2o"
    """Methods, comma separated. What is written with a name is fixed
    (`snapkv(kernel=7)+ada`), everything else is searched."""
    allocators: str = "uniform,pyramid,ada,global"
    """Allocators, comma separated, for every method that names none."""
    settings_per_method: int = 48
    """Settings that are tried for each method and protocol, published presets among them. A search
    whose best number is then at an end of what was tried goes on beyond it."""
    budgets: str = "6%,12.5%,25%,50%"
    """Tokens kept per KV head on average, comma separated, protected ones included; `%` is of the
    tokens in the cache."""
    protocols: str = "query_aware,query_agnostic"
    """Whether compression sees the question."""
    prompts: int = 20
    """Prompts per task."""
    split: Literal["validation", "train"] = "validation"
    """Which split of keys, values and haystack text (or rows) prompts come from."""

    VISIBLE: ClassVar[tuple[str, ...]] = (
        "out", "methods", "policies", "allocators", "settings_per_method", "budgets",
        "protocols", "protection", "model", "dtype", "device", "tasks", "length", "data",
        "metric", "max_new_tokens", "prompts", "split", "seed", "dry_run",
    )  # fmt: skip
    MINIMUMS: ClassVar[Mapping[str, float]] = {"settings_per_method": 2, "prompts": 1}
    MAXIMUMS: ClassVar[Mapping[str, float]] = {"prompts": 1_000_000}

    def __post_init__(self) -> None:
        """Raise ValueError or UsageError, naming the flag, on settings that cannot work."""
        super().__post_init__()
        assert self.evaluation

    def check_names(self) -> None:
        """Raise UsageError on an unknown task, method or allocator."""
        super().check_names()
        check_methods(self.evaluation.method_list, "methods")
        check_allocators(self.evaluation.allocator_list)

    @property
    def evaluation(self) -> EvalConfig:
        """The settings of the measurement, as kvp-eval takes them."""
        shared = {item.name for item in fields(EvalConfig)} & {item.name for item in fields(self)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        return EvalConfig(**values, timing_prompts=0, tokens=False)
