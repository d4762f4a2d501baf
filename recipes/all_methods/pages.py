"""Page and CSV files from what run.sh measured.

    pages.py RUN --to REPOSITORY

Writes the marked blocks of docs/results/methods.md, and every table as CSV below
benchmarks/results/methods. What RUN has no results for stays as it is; a run of
fewer prompts than the real one calls itself a trial.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import method_tables
from blocks import fill_file

from eval.report import tables
from eval.report.tables import markdown
from eval.results.comparison import Comparison, Kind, compare
from eval.results.folder import Results, load_results
from eval.results.frame import OVERALL, tidy
from eval.results.records import SEEN
from eval.results.settings import budget_order

PROTOCOLS = ("query_aware", "query_agnostic")
KINDS: tuple[Kind, ...] = ("accuracy", "perplexity")
LEAST_PROMPTS = 300
"""Answered prompts below which a run is a trial."""
TRIAL = "**A trial of the recipe on few prompts: not the measurement.**\n"
_SETTINGS = re.compile(r"([:\s'\"=]|^)[^\s:,'\"()=]*/benchmarks/results/tuning/")


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

    @property
    def answers(self) -> str | None:
        """The table of answers; None where there are none."""
        comparison = self.by_kind.get("accuracy")
        return markdown(method_tables.scores(comparison)) if comparison else None


def measured(folder: Path, protocol: str) -> Measured | None:
    """A results folder; None where there is none."""
    if not folder.exists():
        return None
    results = load_results(folder)
    resamples = method_tables.RESAMPLES
    found = {kind: compare(results, kind, protocol, resamples=resamples) for kind in KINDS}
    by_kind = {kind: each for kind, each in found.items() if each is not None}
    return Measured(results=results, protocol=protocol, by_kind=by_kind)


def every_table(protocol: str, by_kind: Mapping[Kind, Comparison]) -> Iterator[str]:
    """Heading and tables of a protocol: what kvp report shows, without a choice."""
    yield f"## {protocol}, the {SEEN[protocol]} at compression\n"
    for comparison in by_kind.values():
        yield markdown(tables.every_setting(comparison))
        numbers = tidy(comparison)
        if numbers["cache_bytes"].notna().all():
            shown = numbers[(numbers["task"] == OVERALL) & numbers["chosen"]]
            memory = shown.pivot(index="method", columns="budget", values="cache_bytes")
            memory = memory[sorted(memory, key=budget_order)]
            yield "**Bytes of keys and values right after the eviction, mean over prompts**\n"
            yield f"| method | {' | '.join(memory)} |\n|---|{'--:|' * len(memory.columns)}"
            for name, row in memory.iterrows():
                yield f"| {name} | {' | '.join('' if isnan(n) else f'{n:,.0f}' for n in row)} |"
            yield ""


def setup(found: Mapping[str, Measured]) -> str | None:
    """What was measured: model and prompts."""
    if not found:
        return None
    first = next(iter(found.values())).results
    records = first.records
    answered = {(r["task"], r["example"]) for r in records if r["score"] is not None}
    replies = {(r["task"], r["example"]) for r in records if r["nll"] is not None}
    digest = str((first.setting("model_digest") or {}).get("weights", "not recorded"))
    return (
        f"{TRIAL if any(each.trial for each in found.values()) else ''}"
        f"Model `{first.setting('model')}`, weights {digest[:12]}, {first.setting('dtype')}; "
        f"kvp {first.manifest['kvp']}, {str(first.manifest['created'])[:10]}. "
        f"{len(answered)} test prompts of {len({task for task, _ in answered})} tasks, at "
        f"most {first.setting('length')} tokens, answers of at most "
        f"{first.setting('max_new_tokens')} tokens; {len(replies)} dialogues; prompt seed "
        f"{first.setting('seed')}."
    )


def summary(found: Mapping[str, Measured]) -> str | None:
    """Sentences about the smallest budget."""
    lines = [
        f"- {method_tables.sentence(comparison, spec)}"
        for each in found.values()
        for comparison in (each.by_kind.get("accuracy"), each.by_kind.get("perplexity"))
        if comparison is not None
        for spec in [*comparison.budgets][:1]
    ]
    return "\n".join(lines) or None


def without_folders(text: str, run: Path) -> str:
    """The text without the names of this machine's folders: RUN, and paths in the repository."""
    return _SETTINGS.sub(r"\1benchmarks/results/tuning/", text.replace(str(run.absolute()), "RUN"))


def write_csv(markdown_text: str, folder: Path) -> None:
    """Every table of a Markdown text as a file of its own."""
    script = Path(__file__).parents[1] / "csv_tables.py"
    subprocess.run([sys.executable, str(script), str(folder)], input=markdown_text, text=True,
                   check=True)  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="folder of run.sh")
    parser.add_argument("--to", type=Path, default=Path(), help="repository to write to")
    arguments = parser.parse_args()
    run, docs = arguments.run, arguments.to / "docs" / "results"
    raw = arguments.to / "benchmarks" / "results" / "methods"
    by_protocol = {name: measured(run / f"test-{name}", name) for name in PROTOCOLS}
    found = {name: each for name, each in by_protocol.items() if each is not None}
    blocks: dict[str, str | None] = {"setup": setup(found), "summary": summary(found)}
    for name, each in by_protocol.items():
        blocks[f"answers-{name}"] = each.answers if each else None
    fill_file(
        docs / "methods.md",
        {name: text and without_folders(text, run) for name, text in blocks.items()},
    )
    for name, each in found.items():
        parts = every_table(each.protocol, each.by_kind)
        write_csv(without_folders("\n".join(parts), run), raw / name)
    print(f"page in {docs}, tables in {raw}")


if __name__ == "__main__":
    main()
