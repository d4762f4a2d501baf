"""The collection; everything that can be refused is refused before the weights are loaded."""

import shlex
import shutil
import time
from typing import Any

from rich.filesize import decimal
from transformers import PreTrainedTokenizerBase

from kvp.artifacts.addresses import ObjectPath, Place, files_below, place
from kvp.artifacts.claim import check_folder
from kvp.artifacts.manifest import recorded_name, run_manifest
from kvp.data.encode import count_prompt_tokens
from kvp.data.sources import CollectionPlan, data_identity, plan_collection
from kvp.data.task import TaskSettings
from kvp.devices import device_of_rank, torch_device
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_config
from kvp.hf.loading import load_configured_model, load_configured_tokenizer
from kvp.hf.model_access import known_output_gram
from kvp.hf.model_identity import model_identity, weights_digest
from kvp.hf.rotary import known_frequencies
from kvp.hf.trace import RecordingSettings, check_reach, collect_all, default_batch_size
from kvp.program.ray_workers import do_with_ray
from kvp.progress import Progress, phase, say
from kvp.store import StorePlan, Trace, TraceWriter, planned_bytes
from kvp.store.metadata import STORE, list_committed
from trace_collect.config import CollectConfig

COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""
_COUNTED = 64
"""Prompts whose tokens are counted to estimate the size of the store before weights are loaded."""


def run(config: CollectConfig) -> None:
    """Collect a trace store, or with `dry_run` print what that takes and stop.

    Raises ModelError for model and tokenizer, UsageError for data, tasks and lengths that cannot
    work, StoreError where the target holds something else or the disk is too small.
    """
    model_config = load_config(config.model, revision=config.revision)
    check_reach(model_config, config.model, config.length, config.max_new_tokens)
    if config.engine == "local" and not config.dry_run:  # Ray's workers have their own devices
        torch_device(config.device)
    geometry, tokenizer = geometry_of(model_config), load_configured_tokenizer(config)
    prompts = plan_prompts(config, tokenizer)
    out, total = place(config.out), len(prompts)
    missing = total
    if config.out and check_folder(out, STORE, store_identity(config, prompts, tokenizer, None)):
        missing -= len(list_committed(out))
    if config.dry_run:
        announce_size(config, geometry, total, mean_tokens(prompts, tokenizer))
        print("dry run: nothing was written")
        return
    if missing:
        check_disk(out, announce_size(config, geometry, missing, mean_tokens(prompts, tokenizer)))
    if config.engine == "ray" and missing:
        with Progress("collecting", total, completed=total - missing) as bar:
            do_with_ray(run, config, config.device, lambda: bar.update(len(list_committed(out))))
    else:
        _collect(config, prompts)
    if (stored := len(list_committed(out))) < total:
        print(f"{out}: {stored} of {total} sequences; the others are for other ranks")
        return
    print(f"{out}: {stored} sequences, {decimal(sum(size for _, size in files_below(out)))}")
    traces, policy = shlex.quote(str(out)), shlex.quote(f"{out}-policy")
    print(f"next: kvp train --traces {traces} --out {policy}")


def prompt_settings(config: CollectConfig) -> TaskSettings:
    """Settings of the prompts."""
    return TaskSettings.of(config, needs_reply=config.answers == "reference")


def plan_prompts(config: CollectConfig, tokenizer: PreTrainedTokenizerBase) -> CollectionPlan:
    """The prompts by index, announced; UsageError for data that does not exist or fit."""
    phase("making the prompts")
    prompts = plan_collection(prompt_settings(config), config.counts, tokenizer)
    if prompts.tasks:
        print(f"tasks: {', '.join(prompts.tasks)}")
    for note in prompts.notes:
        say(f"note: {note}")
    return prompts


def store_identity(
    config: CollectConfig,
    prompts: CollectionPlan,
    tokenizer: PreTrainedTokenizerBase,
    weights: str | None,
) -> dict[str, Any]:
    """What decides the content of a store: a resumed run must repeat all of it.

    `weights` is their digest (`kvp.hf.model_identity.weights_digest`), None before they are loaded.
    The device is left out: it changes rounding, which is not what a trace means.
    """
    data = data_identity(prompt_settings(config), prompts.tasks)
    return {
        **({} if config.chat_template else {"chat_template": False}),
        "model": model_identity(config.model, config.revision, tokenizer, weights),
        "data": {**data, "sequences": config.counts},
        "continuation": config.answers,
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
    }


def mean_tokens(prompts: CollectionPlan, tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean number of tokens of a prompt, over at most `_COUNTED` prompts, evenly spread."""
    spaced = [prompts[index] for index in range(0, len(prompts), -(-len(prompts) // _COUNTED))]
    return sum(count_prompt_tokens(sample, tokenizer) for sample in spaced) / len(spaced)


def announce_size(config: CollectConfig, geometry: Geometry, missing: int, mean: float) -> int:
    """Print about what the missing sequences take, and return the bytes on disk.

    `mean` is the mean number of tokens of a prompt.
    """
    tokens = min(round(missing * (mean + config.max_new_tokens)), missing * config.max_tokens)
    labels = len(config.label_list)
    raw = planned_bytes(geometry, dtype=config.dtype, tokens=tokens, labels=labels)
    on_disk = round(raw * COMPRESSED[config.dtype])
    print(f"{missing} sequences, about {tokens} tokens; {geometry}, {config.dtype}")
    print(f"about {decimal(raw)}, {decimal(on_disk)} on disk after lossless compression")
    return on_disk


def check_disk(path: Place, needed: int) -> None:
    """Raise StoreError when the disk that `path` will be on has fewer than `needed` bytes left."""
    if isinstance(path, ObjectPath):
        return
    folder = path.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise StoreError(
            f"--out {path}: about {decimal(needed)} to write, {decimal(free)} free on that disk"
        )


def _collect(config: CollectConfig, prompts: CollectionPlan) -> None:
    """Collect in this process, alone or as one of several; sequences are written meanwhile."""
    phase(f"loading {config.model}")
    model, tokenizer = load_configured_model(config, device_of_rank(config.device, config.worker))
    recorded = RecordingSettings(
        continuation=config.answers, max_new_tokens=config.max_new_tokens, labels=config.label_list
    )
    batch_size = config.batch_size or default_batch_size(
        model.config, dtype=config.dtype, max_tokens=config.max_tokens
    )
    store_plan = StorePlan(
        geometry=geometry_of(model.config), dtype=config.dtype, max_tokens=config.max_tokens,
        sequences=len(prompts), labels=config.label_list,
    )  # fmt: skip
    manifest = run_manifest(
        config.recorded_settings(),
        seed=config.seed,
        model={"id": recorded_name(config.model), "revision": config.revision},
        rope_frequencies=known_frequencies(model, config.max_tokens),
        identity=store_identity(config, prompts, tokenizer, weights_digest(model)),
    )
    with TraceWriter.create_or_resume(
        config.out, store_plan, manifest, known_output_gram(model), shared=config.worker.shared
    ) as writer:
        missing = writer.missing()
        if stored := len(prompts) - len(missing):
            print(f"{writer.path}: {stored} of {len(prompts)} sequences are there")
        if not (indices := config.worker.share(missing)):
            return
        with Progress("collecting", len(indices)) as progress:
            started, tokens = time.monotonic(), 0

            def log_speed(trace: Trace) -> None:
                nonlocal tokens
                tokens += trace.record.length
                rate = tokens / (time.monotonic() - started)
                progress.advance(note=f"{rate:.0f} tokens/s")

            samples = ((index, prompts[index]) for index in indices)
            traces = collect_all(model, tokenizer, samples, recorded, batch_size=batch_size)
            writer.write_all(traces, log_speed)
