"""Training data of `--source traces --on_missing model`: a store that is filled while it is read.

The store is the one that kvp-collect makes with the same settings, and either program continues
the other. What is left out: the reading and writing (`train.online.filled_store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from rich.filesize import decimal

from kvp.artifacts.addresses import Place, place
from kvp.artifacts.disk_space import check_disk
from kvp.errors import StoreError, UsageError
from kvp.hf import load_model
from kvp.hf.batch_size import default_batch_size
from kvp.hf.identity import weights_digest
from kvp.hf.model_access import known_frequencies
from kvp.hf.output_projection import known_output_gram
from kvp.hf.trace import Recorded, collect_all
from kvp.manifest import digest_json, run_manifest
from kvp.portable import recorded_name
from kvp.progress import phase
from kvp.ranks import rank_of
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, planned_bytes
from kvp.store.sequence_records import committed
from kvp.store.store_manifest import load_metadata
from train.config import TrainConfig
from train.data.compression_points import limits, points_by_kind
from train.data.store_checks import check_label, check_plan, usable
from train.distributed import Workers
from train.head_range import heads_within, parse_heads
from train.model.feature_statistics import spread
from train.online.filled_store import FilledTraces, Filling
from train.online.model_runner import long_enough
from train.online.planned_store import PlannedStore, plan_store
from train.online.schedule import Schedule
from train.online.trace_buffer import RecordWindow
from train.recipe import Recipe

_SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class FilledTrainingData:
    """`train.data.training_data.TrainingData` of a store that is filled while it is read."""

    traces: FilledTraces
    training: RecordWindow
    """Sequences to draw contexts from, each traced when it is read."""
    held_out: Sequence[int]
    """Indices of the validation sequences."""
    identity: dict[str, Any]

    @cached_property
    def first(self) -> RecordWindow:
        """The sequences that feature statistics are taken from."""
        first = spread(self.training)
        assert isinstance(first, RecordWindow), "as what it is spread over"
        self.traces.trace_all(first.numbers)
        return first

    @cached_property
    def validation(self) -> list[SequenceRecord]:
        """The validation sequences."""
        self.traces.trace_all(self.held_out)
        return list(RecordWindow(self.traces, self.held_out))

    def close(self) -> None:
        """Let other writers into the store."""
        self.traces.close()


def open_filled_store(
    config: TrainConfig, recipe: Recipe, device: torch.device, workers: Workers
) -> FilledTrainingData:
    """Plan the store, and load the model where a sequence is missing.

    Runs the model only over prompts that may be too short to compress without their answers: which
    sequences there are to draw from must be known before the first step.

    Raises:
        StoreError: the store is damaged, of other settings, or holds nothing to train or validate
            on; or the disk is too small.
        ModelError: the model or its tokenizer cannot be used.
        UsageError: settings that cannot work.
    """
    assert config.traces is not None, "checked by the configuration"
    path = place(config.traces)
    present = committed(path) if path.is_dir() else []
    if present and len(present) == load_metadata(path)[1].sequences:
        reader = TraceReader(path)
        traces = _traces(config, recipe, workers, path, reader.plan, None)
        chosen = [[one.index for one in usable(reader, split, recipe)] for split in _SPLITS]
    else:
        store = plan_store(config, recipe)
        traces = _traces(
            config, recipe, workers, path, store.plan,
            _filling(config, store, device, workers, len(store.jobs) - len(present)),
        )  # fmt: skip
        chosen = [_usable(store, traces, split, recipe, set(present)) for split in _SPLITS]
    training, held_out = chosen
    if recipe.sequences > len(training):
        raise UsageError(
            f"--sequences {recipe.sequences}: the store has {len(training)} training sequences "
            "that are long enough"
        )
    training = training[: recipe.sequences or None]
    whole = Schedule(buffer=len(training), epochs_per_sequence=0)
    order = whole.order(0, recipe, seed=config.seed)
    traces.need([*training, *held_out], [training[place] for place in order])
    return FilledTrainingData(
        traces=traces,
        training=RecordWindow(traces, training),
        held_out=held_out,
        identity={
            "geometry": traces.geometry.to_dict(),
            "store": digest_json([traces.manifest["identity"], traces.plan.to_dict()]),
            "sequences": digest_json([training, held_out]),  # whichever of them are there
            "train": len(training),
            "validation": len(held_out),
        },
    )


def _traces(
    config: TrainConfig,
    recipe: Recipe,
    workers: Workers,
    path: Place,
    plan: StorePlan,
    filling: Filling | None,
) -> FilledTraces:
    check_plan(path, plan, recipe)
    check_label(path, plan, recipe.label)
    heads = None
    if config.heads is not None:
        trained = heads_within(parse_heads(config.heads), plan.geometry)
        heads = slice(trained.start, trained.stop)
    rank = workers.rank if workers.count > 1 else rank_of(None, None)
    return FilledTraces(path, plan, filling, heads=heads, rank=rank)


def _filling(
    config: TrainConfig, store: PlannedStore, device: torch.device, workers: Workers, missing: int
) -> Filling:
    """Load the model; says what will be written."""
    settings, plan = config.online(), store.plan
    most = missing * planned_bytes(
        plan.geometry,
        dtype=plan.dtype,
        tokens=plan.max_tokens,
        store=plan.store,
        grid=plan.grid,
        grid_dtype=plan.grid_dtype,
        grid_labels=len(plan.grid_labels),
        labels=len(plan.labels),
    )
    check_disk(store.path, most, flag="--traces")
    if workers.first:
        for note in store.jobs.notes:
            print(f"note: {note}")
        print(
            f"{store.path}: {missing} of {plan.sequences} sequences are missing, at most "
            f"{decimal(most)}; what is read of them runs through {settings.model} first"
        )
        phase(f"loading {settings.model}")
    model, tokenizer = load_model(
        settings.model,
        device=str(device),
        dtype=settings.dtype,
        revision=settings.revision,
        quantization=settings.quantization,
    )

    together = default_batch_size(model.config, dtype=plan.dtype, max_tokens=plan.max_tokens)
    recorded = Recorded(
        continuation=settings.answers,
        max_new_tokens=settings.max_new_tokens,
        queries=plan.store_queries,
        grid=plan.grid,
        grid_labels=plan.grid_labels,
        labels=plan.labels,
    )

    def traces(indices: Iterable[int]) -> Iterator[Trace]:
        samples = ((index, store.jobs[index]) for index in indices)
        for traced in collect_all(model, tokenizer, samples, recorded, rows=together):
            assert traced is not None, "there is a sample whenever one is asked for"
            yield traced.trace()

    return Filling(
        manifest=run_manifest(
            {**asdict(settings), **store.request.counts, "store": plan.store},
            seed=config.seed,
            model={"id": recorded_name(settings.model), "revision": settings.revision},
            rope_frequencies=known_frequencies(model, plan.max_tokens),
            identity=store.request.identity(store.jobs, tokenizer, weights_digest(model)),
        ),
        output_gram=known_output_gram(model),
        traces=traces,
        together=together,
    )


def _usable(
    store: PlannedStore, traces: FilledTraces, split: str, recipe: Recipe, present: Set[int]
) -> list[int]:
    """Indices of a split's sequences that are long enough; StoreError if there are none."""
    indices = store.indices(split)
    without = {
        index
        for index in indices
        if index not in present and long_enough(store.jobs[index], store.tokenizer, recipe)
    }
    traces.trace_all([index for index in indices if index not in without])
    chosen = [
        index
        for index in indices
        if index in without or points_by_kind(traces.record(index), recipe)
    ]
    if not chosen:
        raise StoreError(
            f"--traces {store.path} has no {split} sequences long enough to compress: none of its "
            f"{len(indices)} sequences is longer than {limits(recipe)}"
        )
    return chosen
