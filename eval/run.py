"""The program kvp eval: settings in, results folder out.

Everything that can be refused is refused first (`eval.prepared_run`). Then come the manifest, the
rows, prompt by prompt (`eval.work`), the timing pass (`eval.timing`) and the closing table.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from eval.config import EvalConfig
from eval.digests import file_digests, input_digests
from eval.methods import Method, make_objects, policies_of, spell
from eval.output_folder import open_folder, write_manifest
from eval.policy_arguments import find_trained_tasks
from eval.prepared_run import LoadedModel, PreparedRun, build_run_methods, prepare
from eval.results.closing import closing_text
from eval.results.comparison import compare_all
from eval.results.folder import Results, load_results, read_folder
from eval.results.parts import PARTS, RecordParts
from eval.results.record_names import MANIFEST, ROWS, TIMING
from eval.results.records import RECORDS, Record, RecordFile
from eval.results.sealing import seal
from eval.runner import Runner, evaluate_together
from eval.timing import measure_times
from eval.work import WorkPieces, evaluate_missing, evaluation_progress, load_runner
from kvp.artifacts.addresses import ObjectPath, files_below, place
from kvp.artifacts.claim import OutputFolder
from kvp.artifacts.manifest import portable
from kvp.data.splits import ALL
from kvp.devices import device_of_rank
from kvp.errors import ResultsError, UsageError
from kvp.grouping import group_by
from kvp.hf.model_identity import describe_mismatch
from kvp.program.ray_workers import do_with_ray
from kvp.progress import phase, say
from kvp.specification import split_list


def run(
    config: EvalConfig,
    loaded: LoadedModel | None = None,
    *,
    temporary: bool = False,
    printed: bool = True,
) -> Sequence[Mapping[str, Any]]:
    """Run kvp eval and return the records of rows.jsonl, those of earlier runs included.

    A worker that ends while others are at work returns none: the last one closes the run.

    `config.methods` may be a list that holds objects (`eval.methods.MethodArgument`); `loaded` is
    the model that `config.model` only names, `temporary` says that nobody will look at the folder,
    `printed` that the closing table is printed. With `dry_run` nothing is written, and the records
    are those of the one prompt that was measured. Raises KvpError on anything the user can mend.
    """
    named = all(isinstance(method, str) for method in config.method_list)
    if config.engine == "ray" and (loaded or not named):
        raise UsageError("engine='ray' takes models and methods by name: objects stay in a process")
    if temporary and config.engine == "local":  # a launcher's processes have a folder each
        device = device_of_rank(config.device, config.worker)
        config = replace(config, device=device, rank=0, world_size=1)
    made = make_objects(config.method_list)
    methods = build_run_methods(config, made)
    config = replace(config, methods=",".join(map(spell, made)))
    if config.dry_run:
        prepared = _prepare(config, methods, loaded)
        return measure_dry_run(load_runner(config, prepared.methods, loaded), prepared)
    if config.engine == "ray":
        results = _run_with_ray(config, methods)
    else:
        results = _run_here(config, methods, loaded)
    if results is None:
        return []
    if printed:
        print(closing_text(compare_all(results), shutil.get_terminal_size((100, 20)).columns))
    if not temporary:
        say(f"results are in {config.out}; to look at them: kvp report {config.out}")
    return list(results.records)


def _run_here(
    config: EvalConfig, methods: Sequence[Method], loaded: LoadedModel | None
) -> Results | None:
    """Evaluate what this process has to; None where others are still at work."""
    digests = file_digests(split_list(config.policies), methods, config.task_list)
    with open_folder(config, digests, shared=config.worker.shared) as output:
        prepared = _prepare(config, methods, loaded)
        runner = load_runner(config, prepared.methods, loaded)
        _write_plan(output, prepared, runner, digests)
        rows = _evaluate_rows(output, prepared, runner)
        if rows is None:
            return None
        earlier, file = output.existing_marker or {}, output.local / TIMING
        same = earlier.get("config") == portable(config.recorded_settings()) and file.exists()
        if config.timing_prompts and same and TIMING in earlier.get("files", ()):
            say(f"times are those of the run before; to measure them again, delete {TIMING}")
        elif config.timing_prompts:
            measure_times(runner, prepared, config.timing_prompts, file)
        return _close(output, rows)


def _run_with_ray(config: EvalConfig, methods: Sequence[Method]) -> Results | None:
    """Have Ray's workers evaluate what is missing; the last of them closes the run."""
    prepared, out = _prepare(config, methods, None), place(config.out)
    undone = WorkPieces(config, prepared, RecordParts(out)).undone()
    left, total = sum(map(len, undone)), len(prepared.work)
    if not left:
        return _run_here(config.local(), methods, None)
    before = sum(1 for _ in files_below(out / PARTS))
    with evaluation_progress(total, total - left) as progress:

        def show_progress() -> None:
            new = sum(1 for _ in files_below(out / PARTS)) - before
            progress.update(max(progress.completed, total - left + new))

        do_with_ray(run, config, config.device, show_progress)
        progress.update(total)
    results = load_results(config.out)
    if lacking := results.unfinished:
        raise ResultsError(f"--out {out}: {lacking}")
    return results


def _prepare(
    config: EvalConfig, methods: Sequence[Method], loaded: LoadedModel | None
) -> PreparedRun:
    """Check everything that needs no weights, and print how much work there is."""
    phase("preparing prompts")
    prepared = prepare(config, methods, loaded)
    for note in prepared.notes:
        say(f"note: {note}")
    counts = {len(evaluation.methods) for evaluation in prepared.work}
    settings = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    prompts, tasks = len(prepared.prompts), len({prompt.task for prompt in prepared.prompts})
    say(
        f"{prompts} prompt{'s' * (prompts > 1)} of {tasks} task{'s' * (tasks > 1)}, "
        f"{len(prepared.work)} evaluations of {settings} settings each; "
        f"{prepared.geometry.total_kv_heads} KV heads in {prepared.geometry.layers} layers"
    )
    return prepared


def _write_plan(
    output: OutputFolder, prepared: PreparedRun, runner: Runner, digests: Mapping[str, str]
) -> None:
    """Write the manifest: what is planned, and notes on policies, which are printed, too."""
    config = runner.config
    inputs = input_digests(config) if config.split in (ALL, "train") else {}
    policies = policies_of(prepared.methods)
    trained = find_trained_tasks(policies, inputs)
    what = f"which --split {config.split} measures, too"
    notes = []
    for label, tasks in trained.items():
        read = [flag for flag in tasks if flag in inputs]
        notes += [f"policy {label}: trained on rows of --{flag}, {what}" for flag in read]
    for label, scorer in policies.items():
        if (name := describe_mismatch(runner.model, scorer.metadata.get("model"))) is not None:
            notes.append(f"policy {label}: made on {name}")
    for note in notes:
        say(f"note: {note}")
    write_manifest(
        output, config, digests, [*prepared.notes, *notes], model_digest=runner.identify_model(),
        layers=prepared.geometry.layer_indices, planned=planned_rows(prepared), trained=trained,
        tuned=dict.fromkeys(method.tuned for method in prepared.methods if method.tuned),
    )  # fmt: skip


def _evaluate_rows(
    output: OutputFolder, prepared: PreparedRun, runner: Runner
) -> RecordFile | None:
    """Write the rows that the folder lacks; None where some of them are for other ranks."""
    path = output.path  # with parts where workers write them, or have left them
    parts = output.shared or isinstance(path, ObjectPath) or (path / PARTS).is_dir()
    rows = RecordParts(path) if parts else RecordFile(output.local / ROWS)
    evaluate_missing(runner, prepared, rows, runner.config.worker)
    rows.refresh()
    if undone := WorkPieces(runner.config, prepared, rows).undone():
        say(
            f"{sum(map(len, undone))} of {len(prepared.work)} evaluations are for other ranks; "
            "the last one that ends closes the run"
        )
        return None
    rows.write_whole(output.local / ROWS)
    return rows


def _close(output: OutputFolder, rows: RecordFile) -> Results:
    """Seal a folder whose rows are all there, and read it."""
    output.push(*RECORDS)
    output.pull(*RECORDS)  # another worker may close the run, too
    seal(output.local)
    output.push(MANIFEST)
    results = read_folder(output.local)
    rows.delete_parts()
    return results


def planned_rows(prepared: PreparedRun) -> list[dict[str, Any]]:
    """`planned` of the manifest, task by task (`write_manifest` joins those of equal settings)."""
    by_task = group_by(prepared.work, lambda it: (it.prompt.task, it.protocol))
    return [
        {"protocol": protocol, "prompts": {task: len(same)}, "settings": settings}
        for (task, protocol), same in by_task.items()
        if (settings := [list(method.key) for method in same[0].methods])
    ]


def measure_dry_run(runner: Runner, prepared: PreparedRun) -> list[Record]:
    """Measure one prompt and estimate the time of the others; returns its records."""
    prompt, protocol, methods = prepared.work[0]
    phase(f"measuring one prompt of {prompt.task}")
    for _ in range(1 if runner.model.device.type == "cpu" else 2):  # a GPU first loads its kernels
        started = time.perf_counter()
        (records,) = evaluate_together(runner, [prompt], protocol, methods)
        seconds = time.perf_counter() - started
    count = len(prepared.work)
    say(
        f"dry run: {seconds:.1f} s for one prompt, so about "
        f"{timedelta(seconds=math.ceil(seconds * count))} for all {count} evaluations; timing "
        "comes on top. Nothing was written."
    )
    return records
