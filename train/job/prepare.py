"""Preparation of a run: everything that can be checked before anything is written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch

from kvp.artifacts.addresses import place
from kvp.artifacts.manifest import own_code
from kvp.devices import torch_device
from kvp.plugins import is_object_name
from kvp.store import TraceReader
from train.config import TrainConfig
from train.data.compression_points import CompressionPoint, held_out_points
from train.data.contexts import ContextSource
from train.data.training_data import TrainingData, open_store
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
    code: dict[str, dict[str, str]]
    """`code`: `own_code` of a user's own label and objective; empty where kvp has both."""
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

    def source(self, label: str) -> ContextSource:
        """Contexts with a label; those of others are forgotten: `--memory_gb` is for one."""
        for other in self.sources.keys() - {label}:
            self.sources[other].forget()
        if label not in self.sources:
            memory = int(self.config.memory_gb * 1e9)
            self.sources[label] = ContextSource(
                self.traces, memory_bytes=memory, device=self.device, label=label,
                recent=self.recipe.reads_queries,
            )  # fmt: skip
        return self.sources[label]

    def validation_points(self, limit: int) -> list[CompressionPoint]:
        """At most `limit` compression points of validation sequences."""
        return held_out_points(self.training_data.validation, self.recipe, limit=limit)


def prepare(config: TrainConfig, recipe: Recipe) -> Job:
    """Check everything that can be checked before anything is written."""
    device = torch_device(config.device)
    training_data = open_store(config, recipe)
    traces = training_data.traces
    key_frequencies(traces, recipe)  # raises before anything is written
    load_objective(recipe.objective)  # as does this
    digests = own_code(filter(is_object_name, (recipe.label, recipe.objective)))
    code = {"code": digests} if digests else {}
    identity = config.identity() | asdict(recipe) | {"traces": training_data.identity} | code
    return Job(
        config=config,
        recipe=recipe,
        device=device,
        training_data=training_data,
        heads=config.heads_of(traces.geometry),
        target=RunFolder(place(config.out), identity),
        code=code,
    )
