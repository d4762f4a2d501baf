"""The program: settings in, results folder out.

Order of work: everything that can be refused is refused first (`eval.prepare`); then the manifest;
then one batched evaluation per prompt and protocol, appended to rows.jsonl as it is done; then the
timing pass, the cost curves and the token ranks; then the closing table.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.filesize import decimal

from eval.conclusion import conclusion
from eval.config import EvalConfig
from eval.cost_curves import CURVE_KEY, KEPT_KEY, measure_traces, usable_records
from eval.evaluate import Bench, evaluate, identify
from eval.methods import Method, file_digests, spec_of
from eval.prepare import Prepared, cache_bytes, methods_of, prepare, trace_settings
from eval.results.folder import (
    CURVES,
    KEPT,
    ROWS,
    TIMING,
    TOKENS,
    open_folder,
    write_counts,
    write_manifest,
)
from eval.results.records import Record, RecordFile, key_of, merge_records, read_records
from eval.settings import Setting
from eval.summary_table import print_headline
from eval.tasks import Prompt
from eval.timing import TIMING_KEY, timing_records
from eval.token_ranks import token_ranks
from kvp.artifacts.claim import OutputFolder
from kvp.hf import load_model
from kvp.hf.identity import model_identity
from kvp.manifest import write_sealed_json
from kvp.progress import Progress, phase, say

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def run(config: EvalConfig) -> list[Record]:
    """Run kvp-eval and return the records of rows.jsonl, those of earlier runs included.

    `config.methods` may be a list that holds scorer objects. With `dry_run` nothing is written, and
    the records are those of the one prompt that was measured. Raises KvpError on anything the user
    can mend.
    """
    methods = methods_of(config)
    config = replace(config, methods=",".join(map(spec_of, config.method_list)))
    if config.dry_run:
        return estimate(config, _prepare(config, methods))
    digests = file_digests(config.policy_list, methods)
    with open_folder(config, digests) as output:
        return _run(config, _prepare(config, methods), output, digests)


def _prepare(config: EvalConfig, methods: Sequence[Method]) -> Prepared:
    """Check everything that needs no weights, and print how much work there is."""
    phase("preparing prompts")
    prepared = prepare(config, methods)
    for note in prepared.notes:
        say(f"note: {note}")
    announce(config, prepared)
    return prepared


def _run(
    config: EvalConfig, prepared: Prepared, output: OutputFolder, digests: Mapping[str, str]
) -> list[Record]:
    """Evaluate into a claimed folder."""
    bench = load_bench(config)
    digest = model_identity(config.model, config.revision, bench.model, bench.tokenizer)
    write_manifest(output, config, digests, prepared.notes, digest)
    folder = output.path
    evaluate_all(bench, prepared, RecordFile(folder / ROWS))
    measure_all(bench, config, prepared, folder)
    write_counts(folder)
    records = list(read_records(folder / ROWS))
    print_headline(Console(markup=False), records, resamples=config.bootstrap, seed=config.seed)
    print(conclusion(records, seed=config.seed))
    say(f"results are in {folder}; to look at them: kvp-report {folder}")
    return records


def load_bench(config: EvalConfig) -> Bench:
    """Load the model."""
    torch.manual_seed(config.seed)
    phase("loading the model")
    model, tokenizer = load_model(
        config.model, device=config.device, dtype=config.dtype, revision=config.revision
    )
    return Bench(
        model=model,
        tokenizer=tokenizer,
        name=config.model,
        split=config.split,
        length=config.length,
        seed=config.seed,
        decode_batch=config.decode_batch,
        max_new_tokens=config.max_new_tokens,
    )


def announce(config: EvalConfig, prepared: Prepared) -> None:
    """Print how much work there is."""
    sizes = {len(settings) for settings in prepared.planned.values()}
    settings = f"{min(sizes)} to {max(sizes)}" if len(sizes) > 1 else f"{max(sizes)}"
    memory = cache_bytes(
        prepared,
        bytes_per_number=BYTES[config.dtype],
        decode_batch=config.decode_batch,
        new_tokens=config.max_new_tokens,
    )
    tasks = len({prompt.task for prompt in prepared.prompts})
    say(
        f"{len(prepared.prompts)} prompts of {tasks} tasks, {len(prepared.work)} evaluations of "
        f"{settings} settings each; {prepared.geometry.total_kv_heads} KV heads in "
        f"{prepared.geometry.layers} layers; caches take up to about {decimal(memory)} besides the "
        "model"
    )


def estimate(config: EvalConfig, prepared: Prepared) -> list[Record]:
    """Measure one prompt and estimate the time of the others; returns its records."""
    bench = load_bench(config)
    prompt, protocol = prepared.work[0]
    phase(f"measuring one prompt of {prompt.task}")
    started = time.perf_counter()
    records = evaluate(bench, prompt, protocol, prepared.settings(prompt, protocol))
    seconds = time.perf_counter() - started
    count = len(prepared.work)
    say(
        f"dry run: {seconds:.1f} s for one prompt, so about {duration(seconds * count)} for all "
        f"{count} evaluations; timing, curves and token ranks come on top. Nothing was written."
    )
    return records


def duration(seconds: float) -> str:
    """Seconds in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def evaluate_all(bench: Bench, prepared: Prepared, file: RecordFile) -> None:
    """Append the records that are not there yet, prompt by prompt."""
    missing: list[tuple[Prompt, str, list[Setting]]] = []
    for prompt, protocol in prepared.work:
        settings = [
            setting for setting in prepared.settings(prompt, protocol)
            if key_of(identify(bench, prompt, protocol, setting)) not in file.keys
        ]  # fmt: skip
        if settings:
            missing.append((prompt, protocol, settings))
    total = len(prepared.work)
    with Progress("evaluating", total, completed=total - len(missing)) as progress:
        for prompt, protocol, settings in missing:
            file.append(evaluate(bench, prompt, protocol, settings))
            progress.advance(note=f"{prompt.task} {protocol}")


def measure_all(bench: Bench, config: EvalConfig, prepared: Prepared, folder: Path) -> None:
    """Timing, cost curves and token ranks, where the settings request them."""
    prompt = prepared.answered
    protocol = next(name for other, name in prepared.work if other is prompt)
    if config.timing_prompts:
        timed = [p for p in prepared.prompts if p.forced == prompt.forced][: config.timing_prompts]
        settings = _timed(prepared.settings(prompt, protocol))
        with Progress("timing", len(timed)) as progress:
            timings = timing_records(bench, timed, protocol, settings, advance=progress.advance)
        merge_records(folder / TIMING, timings, TIMING_KEY)
    if prepared.traces:
        measured_on = trace_settings(config)
        usable = usable_records(prepared.traces, measured_on)
        with Progress("cost curves", sum(map(len, usable.values()))) as progress:
            measured = measure_traces(
                measured_on, prepared.methods, prepared.traces, bench.model, bench.tokenizer,
                advance=progress.advance,
            )  # fmt: skip
        merge_records(folder / CURVES, measured.curves, CURVE_KEY)
        merge_records(folder / KEPT, measured.kept, KEPT_KEY)
    if config.tokens:
        phase("ranking the tokens of one prompt")
        content = token_ranks(bench, prompt, protocol, prepared.methods, config.budget_list)
        write_sealed_json(folder / TOKENS, content)


def _timed(settings: Sequence[Setting]) -> list[Setting]:
    """Settings to time: protection costs nothing, so each method and budget is timed once."""
    protected: set[tuple[Method, object]] = {
        (setting.method, setting.budget) for setting in settings if setting.protected
    }
    return [
        setting for setting in settings
        if setting.protected or (setting.method, setting.budget) not in protected
    ]  # fmt: skip
