"""Pages, figure and CSV files from what run.sh measured.

    pages.py RUN --to REPOSITORY --published METHODS --allocated METHODS

Writes the marked blocks of docs/results/methods.md and docs/results/nano.md, the figure
docs/results/methods.png, and every table as CSV below benchmarks/results. What RUN has no results
for stays as it is; a run of fewer prompts than the real one calls itself a trial.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import method_tables
import tasks
import witness
from blocks import fill_file
from full_tables import area_table, comparisons, tables_of
from sizes import sizes

from eval.report import draw_png, figures
from eval.report.best_settings import Comparison, Kind
from eval.report.figure_types import Figure, LineFigure, assign_styles
from eval.report.load import Results, load_results
from eval.report.markdown import markdown
from eval.report.page import Table, commands
from eval.report.run import ATTENTION_FREE
from eval.results.records import LEARNED
from eval.tune.settings_file import load_settings
from kvp.config_groups import split_list

PROTOCOLS = ("query_aware", "query_agnostic")
LEAST_PROMPTS = 300
"""Answered prompts below which a run is a trial."""
TRIAL = "**A trial of the recipe on few prompts: not the measurement.**\n"
FIGURE = "methods.png"
INDICES = {
    "tuning": "What kvp tune chose, and all that it tried",
    "methods": "Every table of docs/results/methods.md, and those of settings it does not show",
}
"""Titles of the folders of raw results."""
_SETTINGS = re.compile(r"([:\s'\"=]|^)[^\s:,'\"()=]*/benchmarks/results/tuning/")


Block = tuple[str, str | None]
"""Name and content of a part of a page; None where this RUN did not measure it."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A results folder under one protocol."""

    results: Results
    protocol: str
    by_kind: dict[Kind, Comparison]

    @property
    def trial(self) -> bool:
        """Whether too few prompts were answered for a result."""
        units = {
            (record["task"], record["example"])
            for record in self.results.records if record["score"] is not None
        }  # fmt: skip
        return 0 < len(units) < LEAST_PROMPTS

    def table(self, kind: Kind, make: object, *arguments: object) -> str | None:
        """A table of one kind of result as Markdown; None where no such settings were run."""
        if kind not in self.by_kind or not callable(make):
            return None
        table = make(self.by_kind[kind], *arguments)
        return markdown(table) if table is not None and table.rows else None


def measured(folder: Path, protocol: str) -> Measured | None:
    """A results folder; None where there is none."""
    if not folder.exists():
        return None
    results = load_results(folder)
    return Measured(
        results=results, protocol=protocol, by_kind=comparisons(results, protocol)
    )  # fmt: skip


def of_protocol(
    each: Measured | None, protocol: str, published: Sequence[str], allocated: Sequence[str]
) -> Iterator[Block]:
    """Blocks of methods.md about one protocol."""
    if each is None:
        names = ("answers", "against", "published", "allocators", "dialogues", "replies", "kept")
        yield from ((f"{name}-{protocol}", None) for name in names)
        return

    def scores(comparison: Comparison) -> Table:
        return method_tables.scores(comparison, method_tables.shown_lines(comparison))

    def as_published(comparison: Comparison) -> Table | None:
        lines = method_tables.published_lines(comparison, published)
        return method_tables.scores(comparison, lines) if len(lines) > 1 else None  # the full cache

    yield f"answers-{protocol}", each.table("accuracy", scores)
    yield f"against-{protocol}", each.table("accuracy", method_tables.against, LEARNED)
    yield f"published-{protocol}", each.table("accuracy", as_published)
    yield f"allocators-{protocol}", each.table("accuracy", method_tables.allocations, allocated)
    yield f"dialogues-{protocol}", each.table("perplexity", scores)
    yield f"replies-{protocol}", each.table("perplexity", method_tables.against, LEARNED)
    costs = area_table(each.results, protocol)
    yield f"kept-{protocol}", None if costs is None else markdown(costs)


def of_small(small: Measured | None, each: Measured | None, protocol: str) -> Iterator[Block]:
    """Blocks of methods.md about the smallest budgets of a protocol."""
    if small is None or each is None or "accuracy" not in each.by_kind:
        yield from ((f"{name}-{protocol}", None) for name in ("small", "enough", "small-replies"))
        return

    def scores(comparison: Comparison) -> Table:
        return method_tables.scores(comparison, method_tables.shown_lines(comparison))

    yield f"small-{protocol}", small.table("accuracy", scores)
    yield f"small-replies-{protocol}", small.table("perplexity", scores)
    yield f"enough-{protocol}", markdown(method_tables.enough(answers(each, small)))


def answers(*folders: Measured | None) -> list[Comparison]:
    """The comparisons of answers that there are."""
    return [each.by_kind["accuracy"] for each in folders if each and "accuracy" in each.by_kind]


def of_stories(each: Measured | None) -> Iterator[Block]:
    """Blocks of methods.md about the small Llama."""
    if each is None:
        yield from ((name, None) for name in ("stories", "stories-against"))
        return

    def scores(comparison: Comparison) -> Table:
        return method_tables.scores(comparison, method_tables.shown_lines(comparison))

    costs = area_table(each.results, each.protocol)
    tables = (each.table("perplexity", scores), markdown(costs) if costs else None)
    yield "stories", "\n".join(filter(None, tables)) or None
    yield "stories-against", each.table("perplexity", method_tables.against, LEARNED)


def tuning(settings: Path) -> str | None:
    """The chosen settings of every tuning."""
    parts = []
    for name in (*PROTOCOLS, "stories"):
        path = settings / f"{name}.json"
        if path.exists():
            parts.append(f"### {name}\n\n{markdown(method_tables.tuning(load_settings(path)))}")
    return "\n".join(parts) or None


def task_table(path: Path) -> str | None:
    """The tasks, and which were chosen."""
    if not path.exists():
        return None
    rows = [
        [
            line["task"], f"{line['full']} ({line['low']} to {line['high']})", line["prompts"],
            line["longest_right_answer"], "yes" if int(line["chosen"]) else "no",
        ]
        for line in tasks.read(path)
    ]  # fmt: skip
    header = ("task", "full cache, %", "prompts", "longest right answer, tokens", "used")
    return markdown(Table(caption="Validation prompts.", header=header, rows=rows))


def setup(found: Mapping[str, Measured]) -> str | None:
    """What was measured: model, prompts, commands."""
    if not found:
        return None
    first = next(iter(found.values())).results
    records = first.records
    answered = {(r["task"], r["example"]) for r in records if r["score"] is not None}
    replies = {(r["task"], r["example"]) for r in records if r["nll"] is not None}
    digest = str((first.setting("model_digest") or {}).get("weights", "not recorded"))
    lines = [line for each in found.values() for line in commands(each.results.manifest)]
    trial = TRIAL if any(each.trial for each in found.values()) else ""
    return "\n".join(
        [
            trial,
            f"- Model `{first.setting('model')}`, weights {digest[:12]}, {first.setting('dtype')}; "
            f"kvp {first.manifest['kvp']}, {str(first.manifest['created'])[:10]}.",
            f"- {len(answered)} test prompts of {len({task for task, _ in answered})} tasks, at "
            f"most {first.setting('length')} tokens, answers of at most "
            f"{first.setting('max_new_tokens')} tokens; {len(replies)} dialogues; prompt seed "
            f"{first.setting('seed')}.",
            "",
            "```",
            *dict.fromkeys(lines),
            "```",
        ]
    )


def summary(found: Mapping[str, Measured]) -> str | None:
    """Sentences about the smallest budget."""
    lines = [
        f"- {method_tables.sentence(comparison, spec)}"
        for each in found.values()
        for comparison in (each.by_kind.get("accuracy"), each.by_kind.get("perplexity"))
        if comparison is not None
        for spec in comparison.budgets.specs[:1]
    ]
    trial = TRIAL if any(each.trial for each in found.values()) else ""
    return "\n".join([trial, *lines]) if lines else None


def figure(found: Mapping[str, Measured]) -> LineFigure | None:
    """Answers against budget, a panel per protocol; None where a protocol is missing."""
    shown = [each.by_kind["accuracy"] for each in found.values() if "accuracy" in each.by_kind]
    if len(shown) < len(PROTOCOLS):
        return None
    families = dict.fromkeys(family for each in shown for family in each.choices)
    styles = assign_styles(list(families), ATTENTION_FREE)
    drawn = [figures.overall(each, styles) for each in shown]
    panels = tuple(
        replace(
            one.panels[0],
            title=method_tables.SEEN[each.protocol],
            # Chosen settings differ between the panels, so that the legend has names alone.
            curves=tuple(replace(curve, label=curve.key) for curve in one.panels[0].curves),
        )
        for one, each in zip(drawn, shown, strict=True)
    )
    return replace(drawn[0], name="methods", panels=panels, columns=len(panels))


def without_folders(text: str | None, run: Path) -> str | None:
    """The text without the names of this machine's folders: RUN, and paths in the repository."""
    if text is None:
        return None
    return _SETTINGS.sub(r"\1benchmarks/results/tuning/", text.replace(str(run.absolute()), "RUN"))


def write_csv(markdown_text: str, folder: Path) -> None:
    """Every table of a Markdown text as a file of its own."""
    script = Path(__file__).parents[1] / "csv_tables.py"
    subprocess.run([sys.executable, str(script), str(folder)], input=markdown_text, text=True,
                   check=True)  # fmt: skip


def index(folder: Path, title: str) -> None:
    """List the files of a folder, or the indices of those in it, so that each is linked."""
    names = sorted(
        f"{path.name}/README.md" if path.is_dir() else path.name
        for path in folder.iterdir() if path.name != "README.md"
    )  # fmt: skip
    text = "\n".join([f"# {title}", "", *(f"- [{name}]({name})" for name in names), ""])
    (folder / "README.md").write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of run.sh")
    parser.add_argument("--to", type=Path, default=Path(), help="repository to write to")
    parser.add_argument("--published", type=split_list, required=True, help="as --methods names")
    parser.add_argument("--allocated", type=split_list, required=True, help="names of methods")
    arguments = parser.parse_args()
    run, docs = arguments.run, arguments.to / "docs" / "results"
    raw = arguments.to / "benchmarks" / "results"
    by_protocol = {name: measured(run / f"test-{name}", name) for name in PROTOCOLS}
    small = {name: measured(run / f"small-{name}", name) for name in PROTOCOLS}
    found = {name: each for name, each in by_protocol.items() if each is not None}
    drawing: Figure | None = figure(found)
    if drawing is not None:
        (docs / FIGURE).write_bytes(draw_png.draw(drawing))
    blocks: dict[str, str | None] = {
        "setup": setup(found),
        "summary": summary(found),
        "tasks": task_table(raw / "tuning" / "tasks.csv"),
        "tuning": tuning(raw / "tuning"),
        "figure": f"![answers against budget]({FIGURE})" if drawing is not None else None,
        "sizes": "\n".join(
            markdown(table) for each in found.values()
            if (table := sizes(each.results.records)) is not None
        ) or None,
    }  # fmt: skip
    for name, each in by_protocol.items():
        blocks |= dict(of_protocol(each, name, arguments.published, arguments.allocated))
        blocks |= dict(of_small(small[name], each, name))
    stories = measured(run / "stories" / "test", "query_agnostic")
    blocks |= dict(of_stories(stories))
    blocks = {name: without_folders(text, run) for name, text in blocks.items()}
    fill_file(docs / "methods.md", blocks)
    fill_file(docs / "nano.md", witness.blocks(run / "witness", Path(__file__).parent))
    for name, each in {**found, **({"stories": stories} if stories else {})}.items():
        parts = tables_of(each.results, each.protocol, each.by_kind)
        write_csv(without_folders("\n".join(parts), run), raw / "methods" / name)
    for name, title in INDICES.items():
        if any(path.name != "README.md" for path in (raw / name).glob("*")):
            index(raw / name, title)
    print(f"pages in {docs}, tables in {raw}")


if __name__ == "__main__":
    main()
