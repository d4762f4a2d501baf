"""Tables of a study: CSV files, and the block of docs/results/training.md that is called like it.

    python -m recipes.training.tables configs/training/objectives.yaml RUN

An arm is in them once all its seeds are trained, its answers once they are evaluated. The page has
test skill, and answers to test prompts with the question not seen at the first budget of the
settings; the CSV files have all.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from eval.results.stats import Interval, holm
from recipes.all_methods.blocks import fill_file, names
from recipes.csv_tables import tables_of, write
from recipes.training.arms import Result, Training
from recipes.training.results import accuracy, difference, over_seeds, records_of, results_of
from recipes.training.settings import PROTECTIONS, SPLITS, Arm, Settings, load_settings

PROTOCOLS = {"query_aware": "question seen", "query_agnostic": "question not seen"}


@dataclass(frozen=True, kw_only=True)
class Table:
    """A caption, and cells below a header."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """With the caption above."""
        lines = [f"| {' | '.join(row)} |" for row in (self.header, *self.rows)]
        rule = "|---" + "|--:" * (len(self.header) - 1) + "|"
        return "\n".join([f"**{self.caption}**", "", lines[0], rule, *lines[1:], ""])

    def at(self, budget: str) -> Table:
        """The columns of a budget, each with the difference that follows it."""
        at = [i for i, name in enumerate(self.header) if f" {budget}" in name]
        kept = [0, *(place for i in at for place in (i, i + 1))]
        return Table(
            caption=self.caption,
            header=[self.header[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )

    def without(self, *names: str) -> Table:
        """Without these columns, and those in which no row has a value."""
        cells = list(zip(*self.rows, strict=True))
        kept = [
            i for i, name in enumerate(self.header) if name not in names and {*cells[i]} != {"–"}
        ]
        return Table(
            caption=self.caption,
            header=[self.header[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("settings", type=Path)
    parser.add_argument("run", type=Path, help="folder of recipes.training.run")
    parser.add_argument("--page", type=Path, default=Path("docs/results/training.md"))
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/ and that name")
    given = parser.parse_args()
    training = Training(settings=load_settings(given.settings), run=given.run)
    trained = [arm for arm in training.settings.arms if training.finished(arm)]
    if not trained:
        parser.error(f"{given.run}: no arm is trained yet")
    first = skills(training, trained)
    found = {split: [*answers(training, trained, split)] for split in SPLITS}
    budget = training.settings.evaluate["budgets"].split(",")[0]
    name = given.settings.stem
    folder = given.csv or Path("benchmarks", "results", name)
    every = [first, *itertools.chain(*found.values())]
    text = "\n".join(table.markdown() for table in every)
    write(tables_of(text.splitlines()), folder)
    shown = [first.without("skill, validation", "seeds")]
    shown += [table.at(budget) for table in found["test"][-1:]]
    index = os.path.relpath(folder / "README.md", given.page.parent)
    link = f"All tables: [CSV]({index})."
    others = dict.fromkeys(names(given.page.read_text(encoding="utf-8")))
    block = "\n".join([*(table.markdown() for table in shown), link])
    fill_file(given.page, others | {name: block})
    print(f"block {name} of {given.page}, tables in {folder}")


def skills(training: Training, trained: Sequence[Arm]) -> Table:
    """What was tuned, the skill reached, the answers on validation prompts, the cost."""
    by_arm = results_of(training.run)
    last = SPLITS[-1]
    chosen = validation_answers(training, trained)
    rows = [
        [
            arm.name,
            tuned(arm, by_arm[arm.name][0], training.settings),
            *(
                str(over_seeds(by_arm[arm.name], lambda r, s=split: r[s]["skill"]))
                for split in SPLITS
            ),
            str(over_seeds(by_arm[arm.name], lambda r: r[last]["lost"]["12.5%"])),
            str(over_seeds(by_arm[arm.name], lambda r: r[last]["rank_correlation"])),
            f"{chosen[arm.name]:.1f}" if arm.name in chosen else "–",
            f"{by_arm[arm.name][0][last]['parameters']:,}",
            seconds(by_arm[arm.name]),
            str(arm.seeds),
        ]
        for arm in trained
    ]
    header = ["arm", "tuned", *(f"skill, {split}" for split in SPLITS), "lost at 12.5 %"]
    header += ["rank correlation", "answers, validation", "weights per head", "CPU s", "seeds"]
    answers = ", and answers on validation prompts (%, mean of all settings)" if chosen else ""
    return Table(caption=f"Skill{answers}", header=header, rows=rows)


def tuned(arm: Arm, result: Result, settings: Settings) -> str:
    """Chosen values; `!` after one at an end of its grid."""
    values = []
    for name in arm.tuned:
        value, grid = result["settings"][name], settings.tuning.grids[name].values
        values.append(f"{name} {value}" + "!" * (value in (grid[0], grid[-1])))
    return ", ".join(values) or "–"


def seconds(results: Sequence[Result]) -> str:
    """Processor seconds of a run of one thread, median over seeds that were not interrupted."""
    known = [r["processor_seconds"] for r in results if r["processor_seconds"] is not None]
    return f"{median(known):.0f}" if known else "–"


def validation_answers(training: Training, trained: Sequence[Arm]) -> dict[str, float]:
    """Arm -> mean accuracy on validation prompts over protocols, allocators and budgets, %."""
    columns = [
        records
        for protocol in PROTOCOLS
        for _, records in settings_of(training, "validation", protocol)
    ]
    return {
        arm.name: mean(accuracy(records[arm.name]).mean for records in columns)
        for arm in trained
        if columns and all(arm.name in records for records in columns)
    }


Columns = Sequence[tuple[str, dict[str, list[Result]]]]
"""Name of a setting -> records of every arm and of the full cache."""


def settings_of(training: Training, split: str, protocol: str) -> Columns:
    """Every allocator, budget and protection (`+p`) that has answers."""
    folder = training.run / "answers" / split
    if not (folder / "rows.jsonl").exists():
        return []
    flags = training.settings.evaluate
    settings = itertools.product(
        flags["allocators"].split(","),
        flags["budgets"].split(","),
        PROTECTIONS[flags["protection"]],
    )
    columns = [
        (
            f"{allocator} {budget}{' +p' * protected}",
            records_of(
                folder, protocol=protocol, allocator=allocator, budget_spec=budget,
                protected=protected,
            ),
        )
        for allocator, budget, protected in settings
    ]  # fmt: skip
    return [column for column in columns if column[1]]


def answers(training: Training, trained: Sequence[Arm], split: str) -> Iterator[Table]:
    """Accuracy of every arm and its difference to the reference, by protocol.

    A star marks differences other than 0 at 5 % after Holm's correction for the whole table.
    """
    names = [arm.name for arm in trained]
    for protocol, words in PROTOCOLS.items():
        if columns := settings_of(training, split, protocol):
            caption = f"Answers on {split} prompts, {words}, %"
            yield from compared(training.settings.reference, names, columns, caption)


def compared(
    reference: str, names: Sequence[str], columns: Columns, caption: str
) -> Iterator[Table]:
    """The table of arms in all columns; none where the reference has no records."""
    names = [name for name in names if all(name in found for _, found in columns)]
    if reference not in names:
        return
    gaps = {
        (name, column): difference(found[name], found[reference])
        for name in names if name != reference
        for column, found in columns
    }  # fmt: skip
    stars = dict(zip(gaps, holm(list(gaps.values())), strict=True))

    def text(interval: Interval, sign: str, star: str = "") -> str:
        values = (interval.mean, interval.low, interval.high)
        mean_, low, high = (f"{each:{sign}.1f}" for each in values)
        return f"{mean_}{star} ({low} to {high})"

    def difference_of(name: str, column: str) -> str:
        if (name, column) not in gaps:
            return "–"
        return text(gaps[name, column], "+", " *" if stars[name, column] else "")

    rows = [
        [
            name,
            *(
                cell
                for column, found in columns
                for cell in (text(accuracy(found[name]), ""), difference_of(name, column))
            ),
        ]
        for name in names
    ]
    header = ["arm"]
    for column, _ in columns:
        header += [column, f"− {reference}"]
    whole = accuracy(columns[0][1]["full"]).mean
    yield Table(caption=f"{caption} (full cache {whole:.1f})", header=header, rows=rows)


if __name__ == "__main__":
    main()
