"""Preparation of a run: everything that can be checked before anything is written."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvp.artifacts.addresses import place
from kvp.artifacts.manifest import own_code, run_manifest
from kvp.devices import torch_device
from kvp.plugins import is_object_name
from kvp.store import TraceReader
from train.config import RUN_SETTINGS, TrainConfig
from train.data.compression_points import CompressionPoint, held_out_points
from train.data.contexts import ContextSource
from train.data.training_data import TrainingData, open_store, recorded_text
from train.job.run_folder import RunFolder
from train.learning.initial_rankers import key_frequencies
from train.learning.losses import load_objective
from train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs, checked before training."""

    config: TrainConfig
    recipe: Recipe
    device: torch.device
    training_data: TrainingData
    """Traces of the heads that are trained, and of no others."""
    heads: range
    """KV heads of the model that are trained."""
    target: RunFolder
    manifest: dict[str, Any]
    """What the policy records of the run: settings, recipe, traces, and own code where it has."""
    sources: dict[str, ContextSource] = field(default_factory=dict)
    """Contexts that are in use, by label."""

    @property
    def traces(self) -> TraceReader:
        """Traces of the heads that are trained."""
        return self.training_data.traces

    @property
    def whole(self) -> bool:
        """Whether all heads of the model are trained."""
        return len(self.heads) == self.traces.geometry.total_kv_heads

    def use_label(self, label: str) -> ContextSource:
        """Contexts with a label; those of others are forgotten: `--memory_gb` is for one."""
        for other in self.sources.keys() - {label}:
            self.sources[other].forget()
        if label not in self.sources:
            memory = int(self.config.memory_gb * 1e9)
            self.sources[label] = ContextSource(
                self.traces, memory_bytes=memory, device=self.device, label=label,
                recent="recent" in self.recipe.input_list,
            )  # fmt: skip
        return self.sources[label]

    def validation_points(self, limit: int) -> list[CompressionPoint]:
        """At most `limit` compression points of validation sequences."""
        return held_out_points(self.training_data.validation, self.recipe, limit=limit)


def prepare(config: TrainConfig) -> Job:
    """Check everything that can be checked before anything is written."""
    recipe, device = config.recipe(), torch_device(config.device)
    data = open_store(config, recipe)
    key_frequencies(data.traces, recipe)  # both raise before anything is written
    load_objective(recipe.objective)
    settings = ("preset", "seed", "heads", *RUN_SETTINGS)
    used = {"traces": data.identity}
    if code := own_code(filter(is_object_name, (recipe.label, recipe.objective))):
        used["code"] = code
    identity = {name: getattr(config, name) for name in settings} | asdict(recipe) | used
    text = recorded_text(data.traces.manifest)
    manifest = run_manifest(
        asdict(config), seed=config.seed, recipe=asdict(recipe), text=text, **used
    )
    return Job(
        config=config, recipe=recipe, device=device, training_data=data,
        heads=config.heads_of(data.traces.geometry), target=RunFolder(place(config.out), identity),
        manifest=manifest,
    )  # fmt: skip
