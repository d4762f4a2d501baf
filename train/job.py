"""Preparation of a run: checks before training, and the initial rankers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvp.artifacts.addresses import place
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.ranking import Protection
from policies.policy_files import Shard, load_shard
from policies.ranker import HeadRankers, RankerSpec
from train.config import TrainConfig
from train.data.compression_points import CompressionPoint, held_out_points
from train.data.contexts import ContextSource
from train.data.store_checks import device_of, protection_of
from train.data.traces import Traces
from train.data.training_data import TrainingData, open_training_data
from train.distributed import Workers, device_of_worker
from train.head_range import parse_heads
from train.model.feature_statistics import feature_statistics, key_frequencies, spread
from train.recipe import Recipe
from train.run_folder import RunFolder

Sources = dict[tuple[str, bool], ContextSource]
"""Contexts by label, and by whether they hold what the last queries attend to."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a run needs, checked before training."""

    config: TrainConfig
    recipe: Recipe
    workers: Workers
    device: torch.device
    training_data: TrainingData
    """Traces of the heads that are trained, and of no others."""
    heads: range
    """KV heads of the model that are trained."""
    target: RunFolder
    sources: Sources
    """Contexts that are in use."""
    shared: bool
    """Whether other runs of the process use `sources`, too."""
    initial: HeadRankers | None
    """Rankers of `--init_from`; None where training starts from random weights."""
    initial_record: Mapping[str, str]
    """Repository and commit of `--init_from`; empty for a folder, and without it."""

    @property
    def traces(self) -> Traces:
        """Traces of the heads that are trained."""
        return self.training_data.traces

    @property
    def whole(self) -> bool:
        """Whether all heads of the model are trained."""
        return len(self.heads) == self.traces.geometry.total_kv_heads

    @property
    def protection(self) -> Protection:
        """Tokens that take no part in ranking, reward and calibration."""
        return protection_of(self.recipe)

    def source(self, label: str) -> ContextSource:
        """Contexts of the store with a label.

        One label after the other, within `--memory_gb`: those of other labels remember nothing from
        then on, unless `sources` are shared.
        """
        key = (label, self.recipe.reads_queries)
        if not self.shared:
            for other in self.sources.keys() - {key}:
                self.sources[other].forget()
        if key not in self.sources:
            memory = int(self.config.memory_gb * 1e9)
            self.sources[key] = ContextSource(
                self.traces, memory_bytes=memory, device=self.device, label=label,
                recent=self.recipe.reads_queries,
            )  # fmt: skip
        return self.sources[key]

    def held_out(self, limit: int) -> list[CompressionPoint]:
        """At most `limit` compression points of validation sequences."""
        return held_out_points(self.training_data.validation, self.recipe, limit=limit)


def prepare(config: TrainConfig, workers: Workers, sources: Sources | None) -> Job:
    """Check everything that can be checked before anything is written."""
    recipe = config.recipe()
    device = device_of_worker(device_of(config.device), workers)
    training_data = open_training_data(config, recipe, device, workers)
    recipe = recipe.for_traces(queries=training_data.traces.plan.store_queries)
    frequencies = key_frequencies(training_data.traces, recipe)  # before anything is written
    heads = range(training_data.traces.geometry.total_kv_heads)
    if config.heads is not None:
        heads = parse_heads(config.heads)
    initial, record = None, {}
    identity = {**config.identity(), "traces": training_data.identity}
    if config.init_from is not None:
        spec = ranker_spec(recipe, training_data.traces.geometry, frequencies=frequencies)
        shard = load_shard(config.init_from)
        initial = _rankers_of(shard, recipe, spec, training_data.traces, heads)
        record = shard.source.record
        identity["init_from"] = rankers_digest(initial)
    return Job(
        config=config,
        recipe=recipe,
        workers=workers,
        device=device,
        training_data=training_data,
        heads=heads,
        target=RunFolder(place(config.out), identity),
        sources={} if sources is None else sources,
        shared=sources is not None,
        initial=initial,
        initial_record=record,
    )


def initial_rankers(job: Job) -> HeadRankers:
    """Rankers of the trained heads before the first step.

    Those of `--init_from`, or random ones that are the same for a head whichever others train.
    """
    if job.initial is not None:
        return job.initial
    recipe, geometry = job.recipe, job.traces.geometry
    first = spread(job.training_data.training)
    longest = max(record.length for record in first)
    frequencies = key_frequencies(job.traces, recipe)
    spec = ranker_spec(recipe, geometry, reference_length=longest, frequencies=frequencies)
    generator = torch.Generator().manual_seed(job.config.seed)
    rankers = HeadRankers(spec, geometry.total_kv_heads, generator)
    if not job.whole:
        states = rankers.head_states()[job.heads.start : job.heads.stop]
        rankers = HeadRankers.from_head_states(spec, states)
    if recipe.architecture == "fourier":
        rankers.standardise(**feature_statistics(job.traces, first, spec))
    return rankers


def ranker_spec(
    recipe: Recipe,
    geometry: Geometry,
    *,
    reference_length: int = 1,
    frequencies: tuple[float, ...] = (),
) -> RankerSpec:
    """Rankers of a recipe; the size of their weights depends on recipe and geometry alone."""
    return RankerSpec(
        head_dim=geometry.head_dim,
        architecture=recipe.architecture,
        hidden=recipe.hidden,
        max_positions=recipe.max_positions,
        reference_length=reference_length,
        inputs=recipe.input_list,
        blocks=recipe.blocks,
        neighbours=recipe.neighbours,
        key_frequencies=frequencies,
    )


def _rankers_of(
    shard: Shard, recipe: Recipe, spec: RankerSpec, traces: Traces, heads: range
) -> HeadRankers:
    """Rankers of some heads of a policy; UsageError where this run cannot train them."""
    folder = shard.source.name
    if shard.meta.geometry != traces.geometry:
        raise UsageError(
            f"--init_from {folder} is of a model with {shard.meta.geometry}, the traces of one "
            f"with {traces.geometry}"
        )
    if missing := sorted(set(heads) - set(shard.meta.head_range)):
        raise UsageError(f"--init_from {folder} has no ranker of head {missing[0]}")
    if different := _different(shard.rankers.spec.to_dict(), spec.to_dict()):
        raise UsageError(
            f"--init_from {folder} has other rankers ({different}); give the settings that it "
            "was trained with"
        )
    first = shard.meta.head_range.start
    states = shard.rankers.with_dtype(torch.float32).head_states()[
        heads.start - first : heads.stop - first
    ]
    return HeadRankers.from_head_states(shard.rankers.spec, states)


def _different(policy: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Settings in which two rankers differ, but for the length that positions are relative to."""
    names = [name for name in run if name != "reference_length" and policy.get(name) != run[name]]
    return ", ".join(f"{name}: {policy.get(name)} there, {run[name]} here" for name in names)


def rankers_digest(rankers: HeadRankers) -> str:
    """SHA-256 of all weights, part of the identity of a run."""
    digest = hashlib.sha256()
    for tensor in rankers.state_dict().values():
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
