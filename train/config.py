"""Settings of `kvp train` and `kvp merge`; no torch here.

Command line and `kvp.train` take what is not given of the recipe from the preset; a config that is
made directly has the defaults of the first one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from kvp.bounds import Positive, Weight
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.program.settings import Group, MemoryConfig, PathOrAddress, RunConfig
from kvp.training_names import NO_TRACES
from train.recipe import PRESETS, PresetName, Recipe, RecipeSettings

AUTO_HEADS = "auto"
"""`--heads` that every process of a job finds out for itself (`train.process_share`)."""
RUN_SETTINGS = ("validate_every", "validation_contexts")
"""Settings next to those of the recipe that decide the content of a policy or a shard."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(Group):
    """Computation."""

    heads: str | None = None
    """Train only these KV heads, START:STOP counted layer by layer; kvp merge joins the parts.
    `auto`: each process of a Slurm array, srun or torchrun its share, in a folder of its own in
    --out (docs/scaling.md)."""
    activation_gb: Weight = 8.0
    """Memory for activations of the rankers, GB; heads that do not fit together are computed
    twice, in groups (a third more time, the same result). What an objective needs is not in it."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig(Group):
    """Validation and checkpoints."""

    validate_every: Positive = 100
    """Steps between validations. The best weights are exported, of each head its own."""
    validation_contexts: Positive = 32
    """Held-out contexts per validation."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints, the most a killed run loses."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig, ComputeConfig, MemoryConfig, ValidationConfig, RecipeSettings):
    """Inputs and outputs of a training.

    Train one ranker per KV head from a trace store, and write a policy directory.
    """

    traces: PathOrAddress
    """Trace store written by kvp collect."""
    out: PathOrAddress
    """What is written. A policy directory; an unfinished run of the same settings is continued."""
    preset: PresetName = "fourier"
    """Recipe that the settings of ranker, objective, optimizer and contexts start from."""

    FOLDERS: ClassVar[Mapping[str, str]] = {"traces": NO_TRACES}
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        name: {field.name: getattr(recipe, field.name) for field in fields(RecipeSettings)}
        for name, recipe in PRESETS.items()
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recipe()  # making it checks it
        if self.heads not in (None, AUTO_HEADS):
            numbers = re.fullmatch(r"(\d{1,99}):(\d{1,99})", self.heads)
            if numbers is None or int(numbers[1]) >= int(numbers[2]):
                raise UsageError(f"--heads must be START:STOP, as in 0:56, got {self.heads}")

    def heads_of(self, geometry: Geometry) -> range:
        """KV heads that are trained, by default all; UsageError where the model has fewer."""
        if self.heads is None:
            return range(geometry.total_kv_heads)
        heads = range(*map(int, self.heads.split(":")))
        if heads.stop > geometry.total_kv_heads:
            raise UsageError(
                f"--heads {self.heads}: the model has {geometry.total_kv_heads} KV heads"
            )
        return heads

    def recipe(self) -> Recipe:
        """The preset with every setting that was given."""
        names = self.PRESETS[self.preset]
        return replace(PRESETS[self.preset], **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Group):
    """Shards."""

    shards: str
    """Policy directories written by kvp train --heads, comma separated, in any order, or the folder
    that --heads auto has written them into."""
    out: str
    """What is written. A policy directory."""
