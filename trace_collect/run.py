"""The collection itself: announce, open or continue the store, write sequence after sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kvp.data.collection_plan import CollectionPlan, plan_collection
from kvp.hf import geometry_of, load_config, load_model
from kvp.hf.loading import local_folder
from kvp.hf.model_access import known_frequencies
from kvp.hf.output_projection import known_output_gram
from kvp.hf.trace import check_reach, collect
from kvp.manifest import run_manifest
from kvp.store import StorePlan, Trace, TraceWriter
from trace_collect.config import CollectConfig
from trace_collect.estimate import Estimate, check_disk
from trace_collect.jobs import identity, request_of


@dataclass(frozen=True)
class _Run:
    """What every sequence is collected with."""

    config: CollectConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    jobs: CollectionPlan

    def trace(self, index: int) -> Trace:
        return collect(
            self.model,
            self.tokenizer,
            self.jobs[index],
            index=index,
            continuation=self.config.answers,
            max_new_tokens=self.config.max_new_tokens,
            queries=self.config.store == "qkv",
            grid=self.config.cuts,
            labels=self.config.label_list,
        )


def run(config: CollectConfig) -> None:
    """Collect a trace store, or with `dry_run` say what it would be.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        UsageError: data, tasks or lengths that cannot work.
        StoreError: the target holds something else, or the disk is too small.
    """
    console = Console(highlight=False, soft_wrap=True)
    if config.dry_run:
        _dry_run(config, console)
        return
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    model, tokenizer = load_model(
        config.model, device=config.device, dtype=config.dtype, revision=config.revision
    )
    jobs = plan_collection(request_of(config), config.counts, tokenizer)
    parts = _Run(config, model, tokenizer, jobs)
    plan = StorePlan(
        geometry=geometry_of(model_config),
        dtype=config.dtype,
        max_tokens=config.max_tokens,
        sequences=len(jobs),
        store=config.store,
        grid=config.cuts,
        grid_dtype=config.grid_dtype,
        labels=config.label_list,
    )
    manifest = run_manifest(
        asdict(config),
        seed=config.seed,
        model={"id": config.model, "revision": config.revision},
        rope_frequencies=known_frequencies(model, config.max_tokens),
        identity=identity(config, jobs, model, tokenizer),
    )
    if jobs.tasks:
        console.print(f"tasks: {', '.join(jobs.tasks)}")
    out = Path(config.out)
    with TraceWriter.create_or_resume(out, plan, manifest, known_output_gram(model)) as writer:
        missing = writer.missing()
        if len(missing) < len(jobs):
            console.print(f"{out}: {len(jobs) - len(missing)} of {len(jobs)} sequences are there")
        if missing:
            estimate = _estimate(config, model_config, len(missing))
            for line in estimate.lines(config.rate):
                console.print(line)
            check_disk(out, estimate.disk_bytes)
            _write_all(parts, writer, missing, console)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    console.print(f"{out}: {len(jobs)} sequences, {decimal(size)}")


def _write_all(parts: _Run, writer: TraceWriter, missing: Sequence[int], console: Console) -> None:
    started, tokens = time.monotonic(), 0
    with _progress(console) as progress:
        task = progress.add_task("collect", total=len(missing), rate=0.0)
        for index in missing:
            trace = parts.trace(index)
            writer.write(trace)
            tokens += trace.record.length
            progress.update(task, advance=1, rate=tokens / (time.monotonic() - started))


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress


def _dry_run(config: CollectConfig, console: Console) -> None:
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    rate = config.rate
    if rate is None and _has_local_weights(config.model):
        rate = _measured_rate(config)
    for line in _estimate(config, model_config, config.sequences).lines(rate):
        console.print(line)
    if rate is None:
        console.print("time unknown: give --rate TOKENS_PER_SECOND (no local weights to measure)")


def _has_local_weights(model: str) -> bool:
    folder = local_folder(model)
    return folder is not None and any(folder.glob("*.safetensors"))


def _measured_rate(config: CollectConfig) -> float:
    """Tokens per second of one sequence, the second of two, without writing."""
    model, tokenizer = load_model(
        config.model, device=config.device, dtype=config.dtype, revision=config.revision
    )
    parts = _Run(
        config, model, tokenizer, plan_collection(request_of(config), config.counts, tokenizer)
    )
    parts.trace(0)
    started = time.monotonic()
    trace = parts.trace(len(parts.jobs) - 1)
    return trace.record.length / (time.monotonic() - started)


def _estimate(config: CollectConfig, model: PreTrainedConfig, sequences: int) -> Estimate:
    return Estimate(
        geometry=geometry_of(model),
        dtype=config.dtype,
        sequences=sequences,
        tokens=sequences * config.max_tokens,
        store=config.store,
        grid=config.cuts,
        grid_dtype=config.grid_dtype,
        labels=len(config.label_list),
    )
