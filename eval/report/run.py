"""The program: a results folder in, one HTML page and PNG figures out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eval.report import draw_html, draw_png, figures, tables
from eval.report.aggregates import LEARNED, ORACLE, setting_of
from eval.report.compare import PROTOCOLS, Comparison, Kind, compare, in_order
from eval.report.config import ReportConfig
from eval.report.costs import areas, head_curves, shown_curves
from eval.report.draw_text import draw_text
from eval.report.figure_types import Figure, Style, assign_styles
from eval.report.load import Results, load_results
from eval.report.markup import details, figure, paragraph, section, table
from eval.report.page import header, missing, page
from eval.report.timings import middle_budget, timings
from eval.report.token_ranks import token_map
from eval.report.token_text import token_text
from eval.results.records import policy_groups
from kvp.errors import ResultsError, UsageError
from policies.registry import METHODS


@dataclass(frozen=True, kw_only=True)
class Report:
    """A results folder and what all parts of its report share."""

    results: Results
    validation: Results | None
    attention_free: Collection[str]
    styles: Mapping[str, Style]
    resamples: int
    drawn: list[Callable[[Path], Path]]
    """How to write each figure of the page so far as a PNG into a folder."""

    def draw(self, description: Figure) -> str:
        """HTML of a figure, remembered for the PNG files."""
        self.drawn.append(partial(draw_png.draw, description))
        return figure(draw_html.draw(description), description.caption)


def run(config: ReportConfig) -> None:
    """Run kvp-report; raises KvpError on anything the user can mend."""
    folder = Path(config.results)
    out = Path(config.out) if config.out else folder / "report.html"
    png = Path(config.png) if config.png else out.parent / "figures"
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; name an HTML file")
    if png.exists() and not png.is_dir():
        raise UsageError(f"--png {png} is a file; name a folder")
    results = load_results(folder)
    validation = (
        load_results(Path(config.validation_results)) if config.validation_results else None
    )
    if validation is not None:
        _check_validation(results, validation)
    report = _report(results, validation, config.bootstrap)
    html = build(report)
    for parent in (out.parent, png):
        parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8")
    for draw in report.drawn:
        draw(png)
    print(f"{out} ({len(html.encode()) / 1e6:.1f} MB), {len(report.drawn)} figures in {png}")


def build(report: Report) -> str:
    """The whole page."""
    results = report.results
    groups = policy_groups([*results.rows, *results.curves, *results.kept])
    settings = [setting_of(row, groups) for row in results.rows]
    methods = in_order(list(dict.fromkeys(setting.family for setting in settings)))
    labels = list(dict.fromkeys(row["policy"] for row in results.rows if row["policy"]))
    accuracy = _compare(report, "accuracy")
    perplexity = _compare(report, "perplexity")
    kept = _compare(report, "kept")
    return page(
        f"KV-cache eviction on {results.setting('model')}",
        [
            ("about", "", header(results, methods, labels) + _headlines(report, accuracy)),
            ("accuracy", "Accuracy against budget", _accuracy(report, accuracy)),
            ("perplexity", "Perplexity against budget", _perplexity(report, perplexity)),
            ("kept", "Future attention kept by the whole model", _kept(report, kept)),
            ("cost", "Cost per budget and head", _costs(report)),
            ("tokens", "What each method keeps", _tokens(report)),
            ("timing", "Bytes and seconds", _held(accuracy or perplexity) + _timing(report)),
        ],
    )


def _report(results: Results, validation: Results | None, resamples: int) -> Report:
    attention_free = frozenset(name for name, entry in METHODS.items() if entry.attention_free)
    rows = [*results.rows, *results.curves, *results.kept]
    groups = policy_groups(rows)
    families = list(dict.fromkeys(setting_of(row, groups).family for row in rows))
    return Report(
        results=results,
        validation=validation,
        attention_free=attention_free,
        styles=assign_styles(families, attention_free),
        resamples=resamples,
        drawn=[],
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
    found = (
        compare(
            report.results,
            kind,
            protocol,
            validation=report.validation,
            resamples=report.resamples,
        )
        for protocol in dict.fromkeys(
            [*report.results.protocols, *(row["protocol"] for row in report.results.kept)]
        )
    )
    return [comparison for comparison in found if comparison is not None]


def _headlines(report: Report, comparisons: Sequence[Comparison]) -> str:
    return "\n".join(
        section(
            f"headline-{comparison.protocol}",
            PROTOCOLS.get(comparison.protocol, comparison.protocol),
            [table(tables.headline(comparison, report.attention_free, resamples=report.resamples))],
            level=3,
        )
        for comparison in comparisons
    )


def _accuracy(report: Report, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return missing("No generated answers in this folder: run kvp-eval --tasks ruler.")
    return "\n".join(_accuracy_section(report, comparison) for comparison in comparisons)


def _accuracy_section(report: Report, comparison: Comparison) -> str:
    parts = [report.draw(figures.overall(comparison, report.styles))]
    if len(comparison.tasks) > 1:
        parts.append(report.draw(figures.by_task(comparison, report.styles)))
    parts.append(
        details("every setting of every method", [table(tables.every_setting(comparison))])
    )
    if len(comparison.tasks) > 1:
        single = [
            table(tables.one_task(comparison, task, report.attention_free))
            for task in comparison.tasks
        ]
        parts.append(details("task by task", single))
    return _protocol_section(comparison, parts)


def _perplexity(report: Report, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return missing("No given replies in this folder: run kvp-eval --tasks chat or text.")
    return "\n".join(_whole(report, comparison) for comparison in comparisons)


def _kept(report: Report, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return missing("No traces measured in this folder: run kvp-eval --traces TRACES.")
    return "\n".join(_whole(report, comparison) for comparison in comparisons)


def _whole(report: Report, comparison: Comparison) -> str:
    """Figure, headline and every setting of a comparison that is not told task by task."""
    headline = tables.headline(comparison, report.attention_free, resamples=report.resamples)
    parts = [
        report.draw(figures.overall(comparison, report.styles)),
        table(headline),
        details("every setting of every method", [table(tables.every_setting(comparison))]),
    ]
    return _protocol_section(comparison, parts)


def _protocol_section(comparison: Comparison, parts: Sequence[str]) -> str:
    protocol = comparison.protocol
    title = PROTOCOLS.get(protocol, protocol)
    return section(f"{comparison.kind}-{protocol}", title, parts, level=3)


def _costs(report: Report) -> str:
    curves = report.results.curves
    if not curves:
        return missing("No cost curves in this folder: run kvp-eval --traces TRACES.")
    groups = policy_groups([*report.results.rows, *curves])
    parts = []
    for protocol in dict.fromkeys(row["protocol"] for row in curves):
        own = [row for row in curves if row["protocol"] == protocol]
        costs, found = head_curves(own, groups), areas(own, groups)
        shown = shown_curves(costs, found)
        mean, single = figures.cost_figures(report.results, costs, shown, protocol, report.styles)
        parts.append(
            section(
                f"cost-{protocol}-section",
                PROTOCOLS.get(protocol, protocol),
                [
                    report.draw(mean),
                    table(tables.areas(found, protocol)),
                    report.draw(single),
                ],
                level=3,
            )
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
    report.drawn.append(partial(draw_text, tokens, description.outlined, pair))
    if tokens.left_out:
        parts.append(
            paragraph(f"{tokens.left_out} heads cannot be chosen here, to keep the page small.")
        )
    return "\n".join(parts)


def _held(comparisons: Sequence[Comparison]) -> str:
    """Bytes that the rows of the first comparison held."""
    found = [tables.bytes_held(comparison) for comparison in comparisons]
    return "\n".join(table(held) for held in found if held is not None)


def _timing(report: Report) -> str:
    rows = report.results.timing
    if not rows:
        return missing("No timing pass in this folder: run kvp-eval --timing_prompts 3.")
    groups = policy_groups([*report.results.rows, *report.results.curves, *rows])
    prompts = {row["prompts"] for row in rows if "prompts" in row}
    said = f", median over {'/'.join(str(n) for n in sorted(prompts))} prompts" if prompts else ""
    found = timings(rows, groups)
    whole = table(tables.costs_of_requests(found, said))
    chosen = middle_budget(found)
    if len(chosen) == len(found):
        return whole
    return table(tables.costs_of_requests(chosen, said)) + details("every budget", [whole])
