"""The folded parts of a page: every table of a run, and where the scripts draw its details.

A part of the page holds all runs and protocols one after another; the selector shows one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from eval.report import charts, draw_png, figures, tables
from eval.report.aggregates import method_of
from eval.report.answers import answers_of
from eval.report.best_settings import Comparison, Kind, in_order
from eval.report.costs import (
    areas,
    head_curves,
    head_skills,
    middle_budget,
    shown_curves,
    timings,
)
from eval.report.failures import cells_of, evidence_table, failure_table
from eval.report.figure_types import Figure, Style
from eval.report.load import Results
from eval.report.page import details, facts, missing, only, paragraph, table
from eval.report.tokens import TokenMap, protected_ranges, token_map, token_text
from eval.results.records import LEARNED, ORACLE, policy_groups
from policies.registry import METHODS

ATTENTION_FREE = frozenset(name for name, entry in METHODS.items() if entry.attention_free)
"""Methods that read no attention, as the policies of KVP."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a page, and what all of its parts share."""

    number: int
    label: str
    """Its name among the runs of the page."""
    results: Results
    styles: Mapping[str, Style]
    resamples: int
    comparisons: Mapping[Kind, Sequence[Comparison]]
    """By what is compared, one of each protocol that has it."""
    maximum_digits: int
    """Of ranks of tokens."""
    drawn: dict[str, Callable[[], bytes]] = field(default_factory=dict)
    """PNG file name -> how to make its content, for every figure so far."""

    def draw(self, description: Figure) -> None:
        """Remember a figure for the PNG files."""
        self.drawn[f"{description.name}.png"] = partial(draw_png.draw, description)

    def of(self, comparison: Comparison, parts: Sequence[str], name: str = "") -> str:
        """Parts about one comparison."""
        ident = f"{name or comparison.kind}-{comparison.protocol}"
        return self.under(comparison.protocol, parts, ident)

    def under(self, protocol: str, parts: Sequence[str], ident: str) -> str:
        """Parts about one protocol."""
        ident = ident if self.number == 0 else f"{ident}-{self.number}"
        return only(parts, ident=ident, run=self.number, protocol=protocol)

    def always(self, parts: Sequence[str]) -> str:
        """Parts about the whole run."""
        return only(parts, run=self.number)


def accuracy(run: Run) -> str:
    """Scores of all methods: over all tasks, and task by task."""
    comparisons = run.comparisons["accuracy"]
    if not comparisons:
        return run.always(
            [missing("No generated answers in this folder: run kvp-eval --tasks ruler.")]
        )
    return "\n".join(_accuracy(run, comparison) for comparison in comparisons)


def _accuracy(run: Run, comparison: Comparison) -> str:
    parts = _over_all_tasks(run, comparison)
    if len(comparison.tasks) < 2:
        return run.of(comparison, parts)
    run.draw(figures.by_task(comparison, run.styles))
    single = [
        only([table(tables.one_task(comparison, task))], run=run.number, task=task)
        for task in comparison.tasks
    ]
    return run.of(comparison, [*parts, details("task by task", single)])


def over_all_tasks(run: Run, kind: Kind, lacking: str) -> str:
    """Tables of one kind, of every protocol."""
    comparisons = run.comparisons[kind]
    if not comparisons:
        return run.always([missing(lacking)])
    return "\n".join(
        run.of(comparison, _over_all_tasks(run, comparison)) for comparison in comparisons
    )


def _over_all_tasks(run: Run, comparison: Comparison) -> list[str]:
    """Headline and every setting of a comparison."""
    if not comparison.grid:
        return [missing("No method has answers to all tasks of this folder.")]
    run.draw(figures.overall(comparison, run.styles))
    headline = tables.headline(comparison, ATTENTION_FREE, resamples=run.resamples)
    every = table(tables.every_setting(comparison))
    return [table(headline), details("every setting of every method", [every])]


def failures(run: Run) -> str:
    """Right answers that eviction lost, and the tokens of the answer that heads kept."""
    sections = []
    layers = run.results.manifest.get("layers", ())
    for comparison in run.comparisons["accuracy"]:
        cells = cells_of(run.results, comparison.protocol)
        shown = tables.lines_shown(comparison)
        lost = failure_table(cells, comparison, shown)
        parts = [] if lost is None else [table(lost)]
        every = failure_table(cells, comparison, tables.lines_of_all(comparison))
        if every is not None:
            parts.append(details("every setting of every method", [table(every)]))
        for spec in comparison.budgets.specs:
            kept = evidence_table(cells, comparison, spec, shown, layers)
            if kept is not None:
                parts.append(only([table(kept)], run=run.number, budget=spec))
        if parts:
            sections.append(run.of(comparison, parts, "failures"))
    return "\n".join(sections) or run.always(
        [missing("No answers of the full cache to compare with: run kvp-eval --methods full,...")]
    )


def costs(run: Run) -> tuple[str, dict[str, charts.Json]]:
    """Areas under the cost curves, and by protocol what the scripts draw of every head."""
    curves = run.results.curves
    if not curves:
        lacking = "No cost curves in this folder: run kvp-eval --traces TRACES."
        return run.always([missing(lacking)]), {}
    groups = policy_groups([*run.results.records, *curves])
    parts, drawn = [], {}
    for protocol in dict.fromkeys(record["protocol"] for record in curves):
        records = [record for record in curves if record["protocol"] == protocol]
        found, measured = head_curves(records, groups), areas(records, groups)
        shown = shown_curves(found, measured)
        shown = {family: shown[family] for family in in_order(list(shown))}
        run.draw(figures.cost_figure(run.results, found, shown, protocol, run.styles))
        content = [table(tables.areas(measured, protocol))]
        parts.append(run.under(protocol, content, f"cost-{protocol}"))
        skills = head_skills(records, groups)
        drawn[protocol] = charts.heads(found, skills, measured, shown, run.styles)
    return "\n".join(parts), drawn


def tokens(run: Run) -> tuple[str, charts.Json]:
    """The text of a prompt, coloured by rank, and what the scripts draw of it."""
    content, answers = run.results.tokens, answers_of(run.results)
    if content is None or answers is None:
        return run.always(
            [missing("No token ranks in this folder: run kvp-eval --tokens true.")]
        ), None
    order = (LEARNED, ORACLE, *METHODS)
    shown = token_map(content, order, answers.budgets.values(), maximum_digits=run.maximum_digits)
    description = figures.token_figure(run.results, shown)
    run.draw(description)
    pair = (shown.methods[0], ORACLE if ORACLE in shown.methods else shown.methods[-1])
    run.drawn["tokens-text.png"] = partial(draw_png.draw_text, shown, description.outlined, pair)
    parts = [_slider(run), token_text(shown, _outlined(run, shown), pair)]
    parts.append(paragraph(f"{description.caption} {_HOW_EVICTED}", kind="scale"))
    if shown.left_out:
        parts.append(
            paragraph(f"{shown.left_out} heads cannot be selected here, to keep the page small.")
        )
    inner = "\n".join(parts)
    html = f'<div class="token-map" data-run="{run.number}">{inner}</div>'
    return html, charts.tokens(shown, answers)


_HOW_EVICTED = (
    "A budget evicts what is crossed out. With all heads, that is what no head keeps, and the "
    "colour says how many heads keep a token; with one head it says how long the head keeps it. "
    "Every head keeps as many tokens here; the answers are those of the settings that were run, "
    "whose budgets may differ between heads."
)


def _slider(run: Run) -> str:
    name = f"token-budget-{run.number}"
    return (
        f'<p class="budget" hidden><label for="{name}">budget</label> '
        f'<input type="range" id="{name}" min="0" step="1"> <output class="size" for="{name}">'
        "</output></p>"
    )


def _outlined(run: Run, shown: TokenMap) -> tuple[tuple[int, int], ...]:
    sinks, recents = (run.results.setting(name) or 0 for name in ("sinks", "recents"))
    return protected_ranges(len(shown.tokens), sinks, recents)


def bytes_and_seconds(run: Run) -> str:
    """Bytes of the caches as measured, and the timing pass."""
    parts = []
    for comparison in run.comparisons["accuracy"] or run.comparisons["perplexity"]:
        content = tables.cache_bytes(comparison)
        if content is not None:
            parts.append(run.of(comparison, [table(content)], "bytes"))
    records = run.results.timing
    if not records:
        lacking = "No timing pass in this folder: run kvp-eval --timing_prompts 6."
        return "\n".join([*parts, run.always([missing(lacking)])])
    measured = timings(records, _groups(run.results))
    whole = table(tables.costs_of_requests(measured))
    shown = middle_budget(measured)
    if len(shown) == len(measured):
        return "\n".join([*parts, run.always([whole])])
    middle = table(tables.costs_of_requests(shown))
    return "\n".join([*parts, run.always([middle, details("every budget", [whole])])])


def about(run: Run) -> str:
    """Model, methods, data, commands and versions."""
    records = run.results.records
    groups = policy_groups([*records, *run.results.curves, *run.results.kept])
    methods = in_order(list(dict.fromkeys(method_of(each, groups).family for each in records)))
    policies = list(dict.fromkeys(each["policy"] for each in records if each["policy"]))
    return run.always([facts(run.results, methods, policies)])


def _groups(results: Results) -> Mapping[str | None, str]:
    return policy_groups([*results.records, *results.curves, *results.timing])
