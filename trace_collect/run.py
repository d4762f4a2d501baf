"""The collection itself: announce, open or continue the store, write sequence after sequence.

Everything that can be refused is refused before the weights are loaded.
"""

from __future__ import annotations

import shlex
import time

from rich.console import Console
from rich.filesize import decimal
from transformers import PreTrainedConfig

from kvp.artifacts.addresses import files_below, place
from kvp.hf import geometry_of, load_config, load_model, load_tokenizer
from kvp.hf.identity import weights_digest
from kvp.hf.loading import check_quantization, torch_device
from kvp.hf.model_access import known_frequencies
from kvp.hf.output_projection import known_output_gram
from kvp.hf.rank_device import device_of_rank
from kvp.hf.trace import check_reach
from kvp.manifest import run_manifest
from kvp.progress import Progress, phase
from kvp.store import StorePlan, TraceWriter
from kvp.store.sequence_records import committed
from trace_collect.collection import Collection, planned
from trace_collect.config import CollectConfig
from trace_collect.disk_space import check_disk
from trace_collect.dry_run import dry_run
from trace_collect.estimate import estimate
from trace_collect.jobs import check_out, identity


def run(config: CollectConfig) -> None:
    """Collect a trace store, or with `dry_run` print its size and stop.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        UsageError: data, tasks or lengths that cannot work.
        StoreError: the target holds something else, or the disk is too small.
    """
    console = plain_console()
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    check_quantization(config.quantization, torch_device(config.device))
    if config.dry_run:
        dry_run(config, model_config, console)
        return
    tokenizer = load_tokenizer(config.model, revision=config.revision)
    jobs = planned(config, tokenizer, console)
    missing = len(jobs) - check_out(config, jobs, tokenizer)
    if missing:
        expected = estimate(config, model_config, missing)
        for line in expected.lines(config.rate):
            console.print(line)
        check_disk(place(config.out), expected.disk_bytes)
    phase(f"loading {config.model}")
    model, tokenizer = load_model(
        config.model,
        device=device_of_rank(config.device, config.worker),
        dtype=config.dtype,
        revision=config.revision,
        quantization=config.quantization,
    )
    _collect(Collection(config, model, tokenizer, jobs), model_config, console)


def plain_console() -> Console:
    """A console that prints text as it is: brackets in a path are no markup."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _collect(parts: Collection, model_config: PreTrainedConfig, console: Console) -> None:
    config, model, jobs = parts.config, parts.model, parts.jobs
    plan = StorePlan(
        geometry=geometry_of(model_config),
        dtype=config.dtype,
        max_tokens=config.max_tokens,
        sequences=len(jobs),
        store=config.store,
        grid=config.grid_points,
        grid_dtype=config.grid_dtype,
        labels=config.label_list,
    )
    manifest = run_manifest(
        config.recorded(),
        seed=config.seed,
        model={"id": config.model, "revision": config.revision},
        rope_frequencies=known_frequencies(model, config.max_tokens),
        identity=identity(config, jobs, parts.tokenizer, weights_digest(model)),
    )
    out = place(config.out)
    worker = config.worker
    with TraceWriter.create_or_resume(
        out, plan, manifest, known_output_gram(model), shared=worker.shared
    ) as writer:
        missing = writer.missing()
        if len(missing) < len(jobs):
            console.print(f"{out}: {len(jobs) - len(missing)} of {len(jobs)} sequences are there")
        if missing:
            _write_all(parts, writer)
    console.print(
        f"{out}: {len(jobs)} sequences, {decimal(sum(size for _, size in files_below(out)))}"
    )
    console.print(f"next: kvp-train --traces {shlex.quote(str(out))} --out POLICY_FOLDER")


def _write_all(parts: Collection, writer: TraceWriter) -> None:
    """Write what is missing, or this worker's part of it."""
    started, tokens, total = time.monotonic(), 0, len(parts.jobs)
    there = len(committed(writer.path))
    with Progress("collecting", total, completed=there) as progress:
        for index in writer.to_write(parts.config.worker):
            trace = parts.trace(index)
            writer.write(trace)
            tokens += trace.record.length
            note = f"{tokens / (time.monotonic() - started):.0f} tokens/s"
            progress.update(len(committed(writer.path)), note=note)
        progress.update(total)
