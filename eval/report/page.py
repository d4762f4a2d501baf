"""The program, and its page: a results folder in, one HTML page out, and PNG figures if asked for.

The page is one file: style, figures (SVG), answers and a CSV file of all numbers are in it, fonts
are those of the reader's system. Its one script (`web/page.js`) shows the views that its address
names, and unpacks what is compressed; a content security policy forbids every other one and every
request. The template (`web/page.html`) escapes every text.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from jinja2 import Environment, PackageLoader, StrictUndefined

from eval.report import figures, tables
from eval.report.answers import pack_answers, pack_text
from eval.report.config import ReportConfig
from eval.report.costs import Timing, describe_savings, summarise_timings
from eval.report.figures import DrawnSettings, Picture, drawn_settings
from eval.report.tables import Table
from eval.results.captions import describe_conditions, describe_data, describe_intervals
from eval.results.comparison import Comparison, compare_all
from eval.results.folder import Results, load_results
from eval.results.frame import tidy
from eval.results.method_setting import MethodSetting, budget_axis, group_policies, sort_families
from eval.results.record_names import SEEN
from eval.results.sentences import findings, sentences, smallest_budgets
from kvp.artifacts.addresses import is_address
from kvp.artifacts.files import atomic_write_bytes
from kvp.artifacts.manifest import shown_text
from kvp.errors import UsageError
from kvp.progress import Progress

GENERATOR = '<meta name="generator" content="kvp-report">'
"""Mark by which a page is recognised as a report."""


class Text(NamedTuple):
    """A paragraph."""

    text: str
    style: str = ""
    budget: str = ""
    """Budget of the paragraph, where the reader of the page can choose one."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the template shows of a comparison, while the reader has chosen its protocol, or none.

    Without a setting that answered all prompts it has no picture and no table.
    """

    ident: str
    title: str
    protocol: str
    texts: list[Text]
    picture: Picture | None
    table: Table | None
    folded: Mapping[str, tuple[str, list[Table]]]
    """Titles and further tables, by name."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A results folder, and every number that is computed from it."""

    results: Results
    families: Iterable[str]
    comparisons: Sequence[Comparison]
    measured: Iterable[str]
    """What was measured, sentence by sentence."""
    numbers: Sequence[pandas.DataFrame]
    """Of each comparison (`eval.results.frame.tidy`)."""
    sections: Sequence[Section]

    @property
    def pictures(self) -> list[Picture]:
        """All figures."""
        return [section.picture for section in self.sections if section.picture]


def build_page(results: Results) -> Page:
    """Compute every number of a page."""
    records = [*results.in_plan, *results.timing]
    groups = group_policies(records)
    families = sort_families(MethodSetting.of(record, groups) for record in records)
    compared = compare_all(results)
    comparisons = [it for it in compared if any(row["budget_spec"] for row in it.records)]
    with Progress("computing intervals", len(comparisons)) as progress:
        numbers = [tidy(comparison) for comparison in progress.over(comparisons)]
    styles, timings = figures.line_styles(families), summarise_timings(results.timing, groups)
    return Page(
        results=results, families=families, comparisons=comparisons, numbers=numbers,
        measured=dict.fromkeys(map(describe_data, compared)),
        sections=[*map(partial(_section, styles, timings), comparisons, numbers)],
    )  # fmt: skip


def render(page: Page) -> str:
    """The page as HTML."""
    web = resources.files("eval.report") / "web"
    environment = Environment(
        loader=PackageLoader("eval.report", "web"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["packed"] = pack_text
    shown = page.comparisons
    names = dict.fromkeys(comparison.protocol for comparison in shown)
    protocols = [(name, SEEN[name]) for name in names]
    specs = [*budget_axis(record for comparison in shown for record in comparison.records)]
    best = (comparison.best.budget for comparison in shown if comparison.best)
    script = (web / "page.js").read_text("utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    with Progress("drawing", len(page.pictures)) as progress:
        drawn = {picture.name: picture.inline for picture in progress.over(page.pictures)}
    every_number = pandas.concat([pandas.DataFrame(), *page.numbers], ignore_index=True)
    measures = [(comparison.measure.title, comparison) for comparison in shown]
    reading = [
        *(f"{title.capitalize()}: {describe_conditions(it)}." for title, it in measures),
        *(f"Intervals, {title}: {describe_intervals(it)}." for title, it in measures),
    ]
    return environment.get_template("page.html").render(
        policy="default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        generator=GENERATOR,
        style=(web / "page.css").read_text("utf-8").strip(),
        script=script,
        protocols=[("", protocols[0][1])] if len(protocols) == 1 else [("", "both"), *protocols],
        budgets=specs,
        budget=next(best, (specs or [""])[-1]),
        page=page,
        drawn=drawn,
        reading=dict.fromkeys(reading) if shown else (),
        answers=pack_answers(shown),
        facts=_facts_table(page.results),
        csv=every_number.to_csv(index=False, float_format="%.6g"),
    )


def _section(
    styles: figures.Styles,
    timings: Sequence[Timing],
    comparison: Comparison,
    numbers: pandas.DataFrame,
) -> Section:
    name = f"{comparison.kind}-{comparison.protocol}"
    measure = comparison.measure.title.removesuffix(", %").capitalize()
    title = f"{measure}, {SEEN[comparison.protocol]}"
    picture = table = None
    if comparison.cells:
        shown, lines = drawn_settings(comparison), _figure_title(comparison, measure)
        picture = Picture(
            name=name,
            figure=figures.draw_quality(comparison, shown, styles, lines),
            caption=f"{measure} against budget. {_describe_drawn(comparison, shown)}.",
        )
        table = tables.make_score_table(comparison, tables.choose_rows(comparison))
    return Section(
        ident=name, title=title, protocol=comparison.protocol, picture=picture, table=table,
        texts=list(_sentences(comparison, timings)),
        folded=_folded_tables(comparison, numbers, timings),
    )  # fmt: skip


def _figure_title(comparison: Comparison, measure: str) -> list[str]:
    results, tasks = comparison.results, comparison.task_sort.tasks
    of_task = f" of {tasks[0]}" if len(tasks) == 1 else ""
    return [
        f"{measure}{of_task}, {SEEN[comparison.protocol]}",
        f"{results.model_name}, at most {results.setting('length')} tokens",
        *(["unfinished: ranks no method"] if comparison.unfinished else ()),
    ]


def _describe_drawn(comparison: Comparison, shown: DrawnSettings) -> str:
    """Which settings a figure has, and which methods it leaves out."""
    best, which = comparison.best, "Methods have their tuned or default settings"
    run = [setting.family for setting in best.compared] if best else []
    ranked = [setting.family for setting in best.ranked] if best else []
    if best and (picked := [family for family in ranked if run.count(family) > 1]):
        which = f"{', '.join(picked)}: one setting at every budget, chosen on the prompts shown, "
        which += f"the best at {best.budget}. That favours them; tables have the default"
    families = {setting.family for setting in shown}
    left_out = [it.family for it in comparison.choices if it.family not in families]
    return f"{which}. Not drawn: {', '.join(left_out)}" if left_out else which


def _sentences(comparison: Comparison, timings: Sequence[Timing]) -> Iterator[Text]:
    """The sentences on a comparison, budget by budget, without those at the top of the page."""
    if comparison.task_sort.apart and not comparison.unfinished:
        yield Text(comparison.task_sort.apart, "note")
    if comparison.best is None:
        return
    for spec in comparison.budgets:
        if best := comparison.best_at(spec):
            main, *others = findings(comparison, best)
            yield Text(main, "summary", spec)
            if saved := describe_savings(comparison, best, timings):
                yield Text(saved, "saved", spec)
            yield from (Text(text, budget=spec) for text in others)
    yield from map(Text, smallest_budgets(comparison))
    yield Text("No method was run at this budget.", "missing lacking")


def _folded_tables(
    comparison: Comparison, numbers: pandas.DataFrame, timings: Sequence[Timing]
) -> dict[str, tuple[str, list[Table]]]:
    """Titles and tables by name, without the titles that have no table."""
    timed = [timing for timing in timings if timing.protocol == comparison.protocol]
    specs = comparison.budgets if len(comparison.task_sort.tasks) > 1 else ()
    many = len(comparison.settings) > tables.FEW
    every = [tables.make_full_table(comparison)] if many else []
    differences = [*tables.make_difference_tables(comparison, numbers)]
    parts: dict[str, tuple[str, list[Table]]] = {
        "costs": ("Bytes and seconds", [tables.make_cost_table(timed)] if timed else []),
        "differences": ("Differences, paired by prompt", differences),
        "tasks": ("Task by task", [tables.make_task_table(comparison, spec) for spec in specs]),
        "every": ("Every setting of every method", every),
    }
    return {name: part for name, part in parts.items() if part[1]}


def _facts_table(results: Results) -> Table:
    """Model, policies and versions."""
    manifest = results.manifest
    policies = [f"{name} {digest[:12]}" for name, digest in manifest.get("policies", {}).items()]
    known = {name: manifest.get(name) for name in ("kvp", "python")} | manifest.get("packages", {})
    facts: dict[str, Any] = {
        "model": f"{results.setting('model')}. {results.model_details}",
        "policies (digest)": shown_text(", ".join(policies)),
        "versions": ", ".join(f"{name} {value}" for name, value in known.items() if value),
        "created": manifest.get("created"),
    }
    rows = [[name, str(value)] for name, value in facts.items() if value]
    return Table(caption="How this was made", header=("what", "value"), rows=rows)


def run(config: ReportConfig) -> None:
    """Run kvp report; raises KvpError on anything the user can mend."""
    if config.out is None and is_address(config.results):
        raise UsageError(f"--out is missing: a page cannot be written to {config.results}")
    out = Path(config.out or Path(config.results, "report.html"))
    png = Path(config.png) if config.png else None
    if out.is_file() and GENERATOR.encode() not in out.read_bytes()[:8192]:
        raise UsageError(
            f"--out: {out} was not written by kvp report and would be lost; name another path"
        )
    results = load_results(config.results)
    page = build_page(results)
    text = render(page).encode("utf-8", "backslashreplace")
    pictures = page.pictures if png else []
    files = {Path(png or "", f"{it.name}.png"): it.image("png") for it in pictures}
    for path, content in {**files, out: text}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_bytes(path, content)
    written = f"{out} ({len(text) / 1e6:.1f} MB){f', figures in {png}' if png else ''}"
    lines = [line for comparison in page.comparisons for line in sentences(comparison)]
    print(*dict.fromkeys(filter(None, (results.unfinished, *lines))), written, sep="\n")
