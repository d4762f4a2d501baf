"""The collection itself: announce, open or continue the store, write sequence after sequence.

Everything that can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.filesize import decimal
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from kvp.artifacts.addresses import files_below, make_folder, place
from kvp.costs import seconds_of, told
from kvp.data.sources import CollectionPlan
from kvp.errors import ModelError, StoreError, UsageError
from kvp.hf import geometry_of, load_config
from kvp.hf.loading import check_quantization, device_of_rank, model_of, tokenizer_of, torch_device
from kvp.hf.model_access import known_frequencies, known_output_gram, weights_digest
from kvp.hf.trace import check_reach
from kvp.manifest import recorded_name, run_manifest
from kvp.progress import Progress, phase
from kvp.ray_engine import Pool, check_in_sight, do_pieces
from kvp.store import StorePlan, Trace, TraceWriter
from kvp.store.metadata import committed, load_metadata, uncommitted
from trace_collect.collection import (
    Collection,
    announce,
    check_disk,
    check_out,
    identity_of,
    planned,
)
from trace_collect.config import CollectConfig

_LARGEST_GROUP, _GROUPS_EACH = 32, 4
"""Sequences that Ray gives a worker at a time at most, and how often at least."""


def run(config: CollectConfig) -> None:
    """Collect a trace store, or with `dry_run` print what that takes and stop.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        UsageError: data, tasks or lengths that cannot work.
        StoreError: the target holds something else, or the disk is too small.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    if config.dry_run:
        _dry_run(config, model_config)
        return
    if config.engine == "local":  # Ray's workers have devices of their own
        check_quantization(config.quantization, torch_device(config.device))
    tokenizer = tokenizer_of(config)
    jobs = _planned(config, tokenizer)
    missing = len(jobs) - check_out(config, jobs, tokenizer)
    if missing:
        check_disk(place(config.out), announce(config, model_config, missing))
    if config.engine == "ray" and missing:
        _collect_with_ray(config, len(jobs))
    else:
        _collect(_loaded(config, jobs))
    out = place(config.out)
    if (there := len(committed(out))) < len(jobs):
        print(f"{out}: {there} of {len(jobs)} sequences; the others are for other ranks")
        return
    print(f"{out}: {there} sequences, {decimal(sum(size for _, size in files_below(out)))}")
    print(f"next: kvp-train --traces {shlex.quote(str(out))} --out POLICY_FOLDER")


def _planned(config: CollectConfig, tokenizer: PreTrainedTokenizerBase) -> CollectionPlan:
    """The prompts; what is to be known of them is printed."""
    phase("making the prompts")
    jobs = planned(config, tokenizer)
    if jobs.tasks:
        print(f"tasks: {', '.join(jobs.tasks)}")
    for note in jobs.notes:
        print(f"note: {note}")
    return jobs


def _dry_run(config: CollectConfig, model_config: PreTrainedConfig) -> None:
    """Print bytes, and where model and device are there the seconds of a few sequences.

    Raises as the collection itself would where it can be known.
    """
    jobs, count, absent = None, config.sequences, ""
    try:
        tokenizer = tokenizer_of(config)
    except ModelError as error:
        absent = str(error)
    else:
        jobs = _planned(config, tokenizer)
        check_out(config, jobs, tokenizer)
        count = len(jobs)
    announce(config, model_config, count)
    if jobs is not None:
        try:
            check_quantization(config.quantization, torch_device(config.device))
            with tempfile.TemporaryDirectory() as folder:
                there = replace(config, out=folder)
                print(_measured(_loaded(there, jobs)))
        except (ModelError, UsageError) as error:
            absent = str(error)
    if absent:
        print(f"no times, which are measured on the model itself: {absent}")
    print("dry run: nothing was written")


def _measured(parts: Collection) -> str:
    """Collect a batch of sequences after one to warm up, and say what all of them take."""
    total = len(parts.jobs)
    few = min(parts.batch_size + 1, total)
    numbers = tuple(number * total // few for number in range(few))
    with _open(parts) as writer:
        if few > 1:
            write_all(parts, writer, numbers[:1])
            numbers = numbers[1:]
        seconds = seconds_of(lambda: write_all(parts, writer, numbers), parts.model.device)
    each = seconds / len(numbers)
    return f"{total} sequences of {each:.3g} s: {told(total * each, parts.model.device)}"


def _loaded(config: CollectConfig, jobs: CollectionPlan) -> Collection:
    """The prompts with the model."""
    phase(f"loading {config.model}")
    model, tokenizer = model_of(config, device_of_rank(config.device, config.worker))
    return Collection(config, model, tokenizer, jobs)


def _open(parts: Collection) -> TraceWriter:
    """Begin or continue the store."""
    config, model, jobs = parts.config, parts.model, parts.jobs
    plan = StorePlan(
        geometry=geometry_of(model.config),
        dtype=config.dtype,
        max_tokens=config.max_tokens,
        sequences=len(jobs),
        labels=config.label_list,
    )
    manifest = run_manifest(
        config.recorded(),
        seed=config.seed,
        model={"id": recorded_name(config.model), "revision": config.revision},
        rope_frequencies=known_frequencies(model, config.max_tokens),
        identity=identity_of(config, jobs, parts.tokenizer, weights_digest(model)),
    )
    return TraceWriter.create_or_resume(
        config.out, plan, manifest, known_output_gram(model), shared=config.worker.shared
    )


def _collect(parts: Collection) -> None:
    """Collect in this process, alone or as one of several."""
    total = len(parts.jobs)
    with _open(parts) as writer:
        missing = writer.missing()
        if len(missing) < total:
            print(f"{writer.path}: {total - len(missing)} of {total} sequences are there")
        write_all(parts, writer, parts.config.worker.share(missing))


class RayWorker:
    """What collects in one of Ray's workers."""

    def __init__(self, config: CollectConfig, groups: Sequence[tuple[int, ...]]) -> None:
        """Load the model and open the store; errors as `run`. `groups` are collected together."""
        check_in_sight(config.out)
        check_quantization(config.quantization, torch_device(config.device))
        tokenizer = tokenizer_of(config)
        self._parts = _loaded(config, planned(config, tokenizer))
        self._writer = _open(self._parts)
        self._groups = groups

    def __call__(self, number: int) -> None:
        """Collect what is missing of a group; StoreError where the disk refuses."""
        missing = uncommitted(self._writer.path, self._groups[number])
        write_all(self._parts, self._writer, missing)

    def close(self) -> None:
        """Leave the store."""
        self._writer.close()


def _collect_with_ray(config: CollectConfig, total: int) -> None:
    """Have Ray's workers collect what is missing."""
    out = place(config.out)
    missing = uncommitted(out, range(total))
    pool = Pool.of(config, config.device)
    size = max(1, min(_LARGEST_GROUP, len(missing) // (_GROUPS_EACH * (pool.size or 1))))
    groups = [tuple(missing[first : first + size]) for first in range(0, len(missing), size)]
    make_folder(out)
    try:
        with Progress("collecting", total, completed=total - len(missing)) as progress:
            do_pieces(
                partial(RayWorker, config, groups),
                range(len(groups)),
                pool,
                lambda group: progress.advance(len(groups[group])),
            )
    finally:
        if isinstance(out, Path):
            with suppress(OSError):  # something is in it
                out.rmdir()
    # The last writer of a store deletes what killed ones left half-written.
    manifest, plan = load_metadata(out)
    with TraceWriter.create_or_resume(out, plan, manifest, shared=True) as writer:
        if left := writer.missing():
            raise StoreError(
                f"--out {out} lacks {len(left)} sequences that workers wrote: it must be a folder "
                "that all machines share"
            )


def write_all(parts: Collection, writer: TraceWriter, indices: Sequence[int]) -> None:
    """Write sequences while the model goes on."""
    if not indices:
        return
    with Progress("collecting", len(indices)) as progress:
        started, tokens = time.monotonic(), 0

        def given(trace: Trace) -> None:
            nonlocal tokens
            tokens += trace.record.length
            rate = tokens / (time.monotonic() - started)
            progress.advance(note=f"{rate:.0f} tokens/s")

        writer.write_all(parts.traces(indices), given)
