"""The program: a results folder in, one HTML page and PNG figures out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eval.report import draw_html, draw_png, figures, tables
from eval.report.aggregates import method_of
from eval.report.best_settings import Comparison, Kind, compare, in_order
from eval.report.config import ReportConfig
from eval.report.costs import areas, head_curves, middle_budget, shown_curves, timings
from eval.report.failures import cells_of, evidence_table, failure_table
from eval.report.figure_types import Figure, Style, assign_styles
from eval.report.files import check_targets, write_report
from eval.report.load import Results, load_results
from eval.report.page import details, facts, figure, missing, page, paragraph, section, table
from eval.report.schema import PROTOCOL_NAMES
from eval.report.tokens import TOKEN_SCRIPT, rank_styles, token_map, token_text
from eval.results.records import LEARNED, ORACLE, policy_groups
from eval.tune.settings_file import load_settings
from kvp.errors import ResultsError
from policies.registry import METHODS

ATTENTION_FREE = frozenset(name for name, entry in METHODS.items() if entry.attention_free)
"""Methods that read no attention, as the policies of KVP."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """A results folder and what all parts of its report share."""

    results: Results
    validation: Results | None
    attention_free: Collection[str]
    styles: Mapping[str, Style]
    resamples: int
    drawn: dict[str, Callable[[], bytes]]
    """PNG file name -> how to make its content, for every figure of the page so far."""

    def draw(self, description: Figure) -> str:
        """HTML of a figure, remembered for the PNG files."""
        self.drawn[f"{description.name}.png"] = partial(draw_png.draw, description)
        return figure(draw_html.draw(description), description.caption)


def run(config: ReportConfig) -> None:
    """Run kvp-report; raises KvpError on anything the user can mend."""
    folder = Path(config.results)
    out = Path(config.out) if config.out else folder / "report.html"
    png = Path(config.png) if config.png else out.parent / "figures"
    check_targets(out, png)
    results = load_results(folder)
    validation = (
        load_results(Path(config.validation_results)) if config.validation_results else None
    )
    if validation is not None:
        _check_validation(results, validation)
    if config.settings:
        settings = load_settings(Path(config.settings))
        if results.setting("split") in (settings.split, "all"):
            raise ResultsError(
                f"--settings {config.settings}: chosen on the {settings.split} split, as "
                f"{folder} has; evaluate them on another (kvp-eval --split test)"
            )
        results = replace(results, tuned=(*results.tuned, settings))
    report = _report(results, validation, config.bootstrap)
    html = build(report)
    write_report(out, html, png, {name: draw() for name, draw in report.drawn.items()})
    print(f"{out} ({len(html.encode()) / 1e6:.1f} MB), {len(report.drawn)} figures in {png}")


def build(report: Report) -> str:
    """The whole page: the message first, then the evidence, how it was made last."""
    results = report.results
    groups = policy_groups([*results.records, *results.curves, *results.kept])
    methods = in_order(
        list(dict.fromkeys(method_of(record, groups).family for record in results.records))
    )
    labels = list(dict.fromkeys(record["policy"] for record in results.records if record["policy"]))
    accuracy = _compare(report, "accuracy")
    perplexity = _compare(report, "perplexity")
    kept = _compare(report, "kept")
    sentences = (
        tables.summary(comparison, report.attention_free) for comparison in (*accuracy, *perplexity)
    )
    lead = [paragraph(sentence, kind="summary") for sentence in sentences if sentence is not None]
    lead += [paragraph(note, kind="note") for note in results.notes]
    return page(
        f"KV-cache eviction on {results.setting('model')}",
        "\n".join(lead),
        [
            ("accuracy", "Accuracy against budget", _accuracy(report, accuracy)),
            ("perplexity", "Perplexity against budget", _perplexity(report, perplexity)),
            ("failures", "Answers lost and evidence kept", _failures(report, accuracy)),
            ("kept", "Future attention kept by the whole model", _kept(report, kept)),
            ("cost", "Cost per budget and head", _costs(report)),
            ("tokens", "What each method keeps", _tokens(report)),
            ("timing", "Bytes and seconds", _bytes(accuracy or perplexity) + _timing(report)),
            ("about", "How this was made", facts(results, methods, labels)),
        ],
        styles=rank_styles(),
        scripts=(draw_html.library(), draw_html.DRAW_SCRIPT, TOKEN_SCRIPT),
    )


def _report(results: Results, validation: Results | None, resamples: int) -> Report:
    records = [*results.records, *results.curves, *results.kept]
    groups = policy_groups(records)
    families = list(dict.fromkeys(method_of(record, groups).family for record in records))
    return Report(
        results=results,
        validation=validation,
        attention_free=ATTENTION_FREE,
        styles=assign_styles(families, ATTENTION_FREE),
        resamples=resamples,
        drawn={},
    )


def _check_validation(results: Results, validation: Results) -> None:
    for name in ("model", "length"):
        if results.setting(name) != validation.setting(name):
            raise ResultsError(
                f"--validation_results {validation.folder} has --{name} "
                f"{validation.setting(name)!r}, "
                f"{results.folder} has {results.setting(name)!r}; evaluate both with the same"
            )
    if results.setting("split") == validation.setting("split"):
        raise ResultsError(
            f"--validation_results {validation.folder} has the same split as {results.folder}; "
            "choose settings on other prompts (kvp-eval --split validation)"
        )


def _compare(report: Report, kind: Kind) -> list[Comparison]:
    results = report.results
    protocols = [*results.protocols, *(record["protocol"] for record in results.kept)]
    comparisons = (
        compare(results, kind, protocol, validation=report.validation, resamples=report.resamples)
        for protocol in dict.fromkeys(protocols)
    )
    return [comparison for comparison in comparisons if comparison is not None]


def _accuracy(report: Report, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return missing("No generated answers in this folder: run kvp-eval --tasks ruler.")
    return "\n".join(_accuracy_section(report, comparison) for comparison in comparisons)


def _accuracy_section(report: Report, comparison: Comparison) -> str:
    parts = _over_all_tasks(report, comparison)
    if len(comparison.tasks) > 1:
        parts.append(report.draw(figures.by_task(comparison, report.styles)))
        single = [table(tables.one_task(comparison, task)) for task in comparison.tasks]
        parts.append(details("task by task", single))
    return _protocol_section(comparison, parts)


def _failures(report: Report, comparisons: Sequence[Comparison]) -> str:
    """Right answers that eviction lost, and the tokens of the answer that heads kept."""
    sections = []
    for comparison in comparisons:
        cells = cells_of(report.results, comparison.protocol)
        shown = tables.lines_shown(comparison)
        specs = comparison.budgets.specs
        found = [
            failure_table(cells, comparison, shown),
            evidence_table(
                cells,
                comparison,
                specs[(len(specs) - 1) // 2],
                shown,
                report.results.manifest.get("layers", ()),
            ),
        ]
        parts = [table(each) for each in found if each is not None]
        every = failure_table(cells, comparison, tables.lines_of_all(comparison))
        if every is not None:
            parts.append(details("every setting of every method", [table(every)]))
        if parts:
            sections.append(_protocol_section(comparison, parts, name="failures"))
    return "\n".join(sections) or missing(
        "No answers of the full cache to compare with: run kvp-eval --methods full,..."
    )


def _perplexity(report: Report, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return missing("No given replies in this folder: run kvp-eval --tasks chat or text.")
    return "\n".join(
        _protocol_section(comparison, _over_all_tasks(report, comparison))
        for comparison in comparisons
    )


def _kept(report: Report, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return missing("No traces measured in this folder: run kvp-eval --traces TRACES.")
    return "\n".join(
        _protocol_section(comparison, _over_all_tasks(report, comparison))
        for comparison in comparisons
    )


def _over_all_tasks(report: Report, comparison: Comparison) -> list[str]:
    """Figure, headline and every setting of a comparison."""
    if not comparison.grid:
        return [missing("No method has answers to all tasks of this folder.")]
    headline = tables.headline(comparison, report.attention_free, resamples=report.resamples)
    every = table(tables.every_setting(comparison))
    return [
        report.draw(figures.overall(comparison, report.styles)),
        table(headline),
        details("every setting of every method", [every]),
    ]


def _protocol_section(comparison: Comparison, parts: Sequence[str], name: str | None = None) -> str:
    protocol = comparison.protocol
    return section(
        f"{name or comparison.kind}-{protocol}", PROTOCOL_NAMES[protocol], parts, level=3
    )


def _costs(report: Report) -> str:
    curves = report.results.curves
    if not curves:
        return missing("No cost curves in this folder: run kvp-eval --traces TRACES.")
    groups = policy_groups([*report.results.records, *curves])
    parts = []
    for protocol in dict.fromkeys(record["protocol"] for record in curves):
        records = [record for record in curves if record["protocol"] == protocol]
        costs, measured = head_curves(records, groups), areas(records, groups)
        shown = shown_curves(costs, measured)
        mean, single = figures.cost_figures(report.results, costs, shown, protocol, report.styles)
        content = [
            report.draw(mean),
            table(tables.areas(measured, protocol, records[0].get("metrics_version", 1))),
            report.draw(single),
        ]
        parts.append(
            section(f"cost-{protocol}-section", PROTOCOL_NAMES[protocol], content, level=3)
        )
    return "\n".join(parts)


def _tokens(report: Report) -> str:
    content = report.results.tokens
    if content is None:
        return missing("No token ranks in this folder: run kvp-eval --tokens true.")
    tokens = token_map(content, (LEARNED, ORACLE, *METHODS))
    description = figures.token_figure(report.results, tokens)
    pair = (tokens.methods[0], ORACLE if ORACLE in tokens.methods else tokens.methods[-1])
    parts = [token_text(tokens, description.outlined, pair), report.draw(description)]
    report.drawn["tokens-text.png"] = partial(
        draw_png.draw_text, tokens, description.outlined, pair
    )
    if tokens.left_out:
        parts.append(
            paragraph(f"{tokens.left_out} heads cannot be selected here, to keep the page small.")
        )
    return "\n".join(parts)


def _bytes(comparisons: Sequence[Comparison]) -> str:
    """Bytes of the caches that the comparisons measured."""
    measured = [tables.cache_bytes(comparison) for comparison in comparisons]
    return "\n".join(table(content) for content in measured if content is not None)


def _timing(report: Report) -> str:
    records = report.results.timing
    if not records:
        return missing("No timing pass in this folder: run kvp-eval --timing_prompts 6.")
    groups = policy_groups([*report.results.records, *report.results.curves, *records])
    measured = timings(records, groups)
    whole = table(tables.costs_of_requests(measured))
    shown = middle_budget(measured)
    if len(shown) == len(measured):
        return whole
    return table(tables.costs_of_requests(shown)) + details("every budget", [whole])
