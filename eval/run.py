"""The program: settings in, results folder out.

Order of work: everything that can be refused is refused first; then the manifest; then one batched
evaluation per prompt and protocol, appended to rows.jsonl as it is done; then the timing pass, the
cost curves and the token ranks; then the closing table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eval.config import EvalConfig
from eval.cost_curves import CURVE_KEY, KEPT_KEY, measure_traces
from eval.evaluate import Bench, evaluate, identify
from eval.held_out_traces import open_traces
from eval.methods import Method, build_methods, check_methods, file_digests
from eval.results.folder import CURVES, KEPT, ROWS, TIMING, TOKENS, open_folder, write_manifest
from eval.results.records import RowFile, key_of, merge_rows, read_rows
from eval.settings import Setting, plan, protection_of
from eval.summary_table import print_headline
from eval.tasks import Prompt, load_all, protocols_of, task_names
from eval.timing import TIMING_KEY, timing_rows
from eval.token_ranks import token_ranks
from kvp.artifacts.claim import OutputFolder
from kvp.hf import geometry_of, load_model
from kvp.hf.identity import model_identity
from kvp.manifest import atomic_write_json

Cells = dict[tuple[str, str], list[Setting]]
"""What to run for each (task, protocol)."""


def run(config: EvalConfig) -> None:
    """Run kvp-eval; raises KvpError on anything the user can mend."""
    task_names(config.task_list)
    methods = build_methods(config)
    digests = file_digests(config, methods)
    with open_folder(config, digests) as folder:
        _run(config, methods, folder, digests)


def _run(
    config: EvalConfig,
    methods: Sequence[Method],
    output: OutputFolder,
    digests: Mapping[str, str],
) -> None:
    """Evaluate into a claimed folder."""
    console = Console(stderr=True)
    torch.manual_seed(config.seed)
    model, tokenizer = load_model(
        config.model, device=config.device, dtype=config.dtype, revision=config.revision
    )
    geometry = geometry_of(model.config)
    check_methods(methods, geometry)
    traces = open_traces(config.traces, geometry, methods) if config.traces else None
    bench = Bench(config=config, model=model, tokenizer=tokenizer)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prompts, unfit = load_all(config, tokenizer, positions)
    cells, small = _plan(config, methods, prompts)
    notes = [*unfit, *small]
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False)
    model_digest = model_identity(config.model, config.revision, model, tokenizer)
    write_manifest(output, config, digests, notes, model_digest)

    folder = output.path
    _evaluate_all(bench, console, RowFile(folder / ROWS), prompts, cells)
    generated = [prompt for prompt in prompts if not prompt.forced] or prompts
    protocol = protocols_of(config, generated[0].task)[0]
    if config.timing_prompts:
        timed = generated[: config.timing_prompts]
        own = _timed_cells(cells[timed[0].task, protocol])
        rows = timing_rows(bench, timed, protocol, own)
        merge_rows(folder / TIMING, rows, TIMING_KEY)
    if traces:
        measured = measure_traces(config, methods, traces, model, tokenizer)
        merge_rows(folder / CURVES, measured.curves, CURVE_KEY)
        merge_rows(folder / KEPT, measured.kept, KEPT_KEY)
    if config.tokens:
        content = token_ranks(bench, generated[0], protocol, methods)
        atomic_write_json(folder / TOKENS, content)
    print_headline(
        Console(), read_rows(folder / ROWS), resamples=config.bootstrap, seed=config.seed
    )


def _plan(
    config: EvalConfig,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
) -> tuple[Cells, list[str]]:
    """Cells of every task and protocol, and the notes on what is left out."""
    cells: Cells = {}
    notes: list[str] = []
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        for protocol in protocols_of(config, task):
            own = [prompt.boundary(protocol) for prompt in prompts if prompt.task == task]
            cells[task, protocol], said = plan(
                methods,
                config.budget_list,
                protection=config.protection,
                protected_tokens=protection_of(config, protected=True).tokens,
                shortest=min(own),
            )
            notes += [f"{task}, {protocol}: {note}" for note in said]
    return cells, notes


def _evaluate_all(
    bench: Bench,
    console: Console,
    file: RowFile,
    prompts: Sequence[Prompt],
    cells: Cells,
) -> None:
    """Append the rows that are not there yet, prompt by prompt."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        work = [(p, name) for p in prompts for name in protocols_of(bench.config, p.task)]
        bar = progress.add_task("prompts", total=len(work))
        for prompt, protocol in work:
            progress.update(bar, description=f"{prompt.task} {protocol}")
            missing = [
                cell for cell in cells[prompt.task, protocol]
                if key_of(identify(bench.config, prompt, protocol, cell)) not in file.keys
            ]  # fmt: skip
            if missing:
                file.append(evaluate(bench, prompt, protocol, missing))
            progress.advance(bar)


def _timed_cells(cells: Sequence[Setting]) -> list[Setting]:
    """Cells worth timing: protection costs nothing, so each method and budget is timed one way."""
    protected = {(cell.method, cell.budget) for cell in cells if cell.protected}
    return [
        cell for cell in cells
        if cell.protected or (cell.method, cell.budget) not in protected
    ]  # fmt: skip
