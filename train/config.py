"""Settings of `kvp-train`; no torch here, so that `--help` answers at once.

The settings of the recipe (`train.recipe`) are None until a preset gives them; a config has done so
when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvp.config_groups import (
    AnswerConfig,
    DataConfig,
    DryRunConfig,
    Group,
    MemoryConfig,
    ModelConfig,
    RunConfig,
    optional,
)
from train.calibration.config import CalibrationConfig, calibration_target
from train.head_range import AUTO, parse_heads
from train.objectives import READ_BY
from train.online.settings import OnlineConfig, OnlineSettings
from train.recipe import (
    PRESETS,
    ContextSettings,
    ObjectiveSettings,
    OptimizerSettings,
    PresetName,
    RankerSettings,
    Recipe,
)

_RECIPE_GROUPS = (RankerSettings, ObjectiveSettings, OptimizerSettings, ContextSettings)

if TYPE_CHECKING:  # what a config holds once it is made
    RankerFlags = RankerSettings
    ObjectiveFlags = ObjectiveSettings
    OptimizerFlags = OptimizerSettings
    ContextFlags = ContextSettings
else:  # what a caller may leave to the preset
    RankerFlags, ObjectiveFlags, OptimizerFlags, ContextFlags = map(optional, _RECIPE_GROUPS)


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(Group):
    """Computation."""

    devices: int = 1
    """Processes that share the contexts of every step, one per GPU or, on a CPU, sharing its cores;
    the result differs by rounding only."""
    heads: str | None = None
    """Train only these KV heads, START:STOP counted layer by layer; kvp merge joins the parts.
    `auto`: each process of a Slurm array, srun or torchrun its share, in a folder of its own in
    --out (docs/scaling.md)."""
    activation_gb: float = 8.0
    """Memory for activations of the rankers, GB; heads that do not fit together are computed
    twice, in groups (a third more time, the same result). What an objective needs is not in it."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Group):
    """Validation and checkpoints."""

    validate_every: int = 100
    """Steps between validations. Each head exports its best averaged weights."""
    validation_contexts: int = 32
    """Held-out contexts per validation."""
    checkpoint_every: int = 50
    """Steps between checkpoints, the most a killed run loses."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "validate_every": 1,
        "validation_contexts": 1,
        "checkpoint_every": 1,
    }


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    RunConfig,
    ComputeConfig,
    MemoryConfig,
    DryRunConfig,
    ValidationConfig,
    CalibrationConfig,
    ObjectiveFlags,
    RankerFlags,
    OptimizerFlags,
    ContextFlags,
    ModelConfig,
    DataConfig,
    AnswerConfig,
    OnlineConfig,
):
    """Inputs and outputs of a training.

    Train one ranker per KV head, from a trace store or a model, and write a policy directory.
    """

    out: str
    """What is written. A policy directory; an unfinished run of the same settings is continued."""
    source: Literal["traces", "model"] = "traces"
    """Where traces come from: a store, or a model that runs first and leaves none on disk (its
    settings: Model, Data, Answers and Online collection)."""
    traces: str | None = None
    """Trace store written by kvp-collect. Required with --source traces."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""
    preset: PresetName = "fourier"
    """Recipe that the settings of ranker, objective, optimizer and contexts start from."""
    init_from: str | None = None
    """Policy whose rankers training starts from, instead of random weights: a folder, `nano` or
    `org/name` on the hub."""

    VISIBLE: ClassVar[tuple[str, ...]] = (
        "out", "traces", "source", "preset", "objective", "label", "steps", "lr", "hidden",
        "inputs", "neighbours", "contexts", "permutations", "init_from", "model", "dtype",
        "device", "devices", "data", "tasks", "length", "sequences", "seed", "dry_run",
    )  # fmt: skip
    ADDRESSES: ClassVar[tuple[str, ...]] = ("out", "traces", "init_from")
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {
            field.name: getattr(recipe, field.name)
            for group in _RECIPE_GROUPS
            for field in fields(group)
        }
        for name, recipe in PRESETS.items()
    }
    """Settings of each preset, for the command line."""

    def __post_init__(self) -> None:
        """Fill settings from the preset; raise ValueError naming a flag that cannot work."""
        for name, value in self.PRESETS[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        target = calibration_target(self.calibration, self.label)
        object.__setattr__(self, "calibration", target)
        super().__post_init__()
        for name in ("memory_gb", "activation_gb"):
            if not getattr(self, name) > 0:
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
            if self.heads != AUTO:
                parse_heads(self.heads)
            elif self.devices > 1:
                raise ValueError("--heads auto needs --devices 1: its processes do not talk")

    def _check_source(self) -> None:
        if self.only_costs and self.source == "traces":
            return  # no source is chosen yet
        if self.source == "traces":
            self._check_online_unused()
            if self.traces is None:
                raise ValueError("--traces is missing: name a trace store, or use --source model")
            return
        if self.traces is not None:
            raise ValueError("--traces cannot be used with --source model")
        if self.allow_incomplete:
            raise ValueError("--allow_incomplete needs --source traces")

    def _check_online_unused(self) -> None:
        """Raise ValueError for settings of a model that a store does not need."""
        defaults = OnlineSettings()
        for name in [one.name for one in reversed(fields(OnlineSettings))]:
            if getattr(self, name) != getattr(defaults, name):
                raise ValueError(f"--{name} needs --source model")

    @property
    def only_costs(self) -> bool:
        """Whether a dry run compares the ways to a policy, without traces at hand."""
        return self.dry_run and self.traces is None

    def online(self) -> OnlineSettings:
        """Settings of --source model."""
        return OnlineSettings(
            **{one.name: getattr(self, one.name) for one in fields(OnlineSettings)}
        )

    def recipe(self) -> Recipe:
        """The preset with every setting that was given."""
        names = self.PRESETS[self.preset]
        return replace(PRESETS[self.preset], **{name: getattr(self, name) for name in names})

    def unread(self) -> list[str]:
        """Settings that differ from the preset's and that the objective does not read."""
        preset = self.PRESETS[self.preset]
        return [
            name
            for name, readers in READ_BY.items()
            if getattr(self, name) != preset[name] and self.objective not in readers
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
