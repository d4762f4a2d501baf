"""Tables of a study: CSV files, and the block of a page that is called as the settings file.

    python -m recipes.training.tables configs/training/objectives.yaml RUN

An arm is in them once all its seeds are trained, its answers once they are evaluated.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from eval.stats import Interval, holm, perplexity
from recipes.all_methods.blocks import fill_file
from recipes.csv_tables import tables_of, write
from recipes.training.arms import Result, Training
from recipes.training.results import (
    accuracy,
    difference,
    nats_difference,
    over_seeds,
    records_of,
    results_of,
)
from recipes.training.settings import PROTECTIONS, Arm, Settings, load_settings

PROTOCOLS = {"query_aware": "question seen", "query_agnostic": "question not seen"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("settings", type=Path)
    parser.add_argument("run", type=Path, help="folder of recipes.training.run")
    parser.add_argument("--page", type=Path, help="default: that of the settings")
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/ and that name")
    given = parser.parse_args()
    training = Training(settings=load_settings(given.settings), run=given.run)
    trained = [arm for arm in training.settings.arms if training.finished(arm)]
    if not trained:
        parser.error(f"{given.run}: no arm is trained yet")
    parts = [skills(training, trained)]
    found = {split: [*answers(training, trained, split)] for split in training.settings.splits}
    shown = found[training.settings.splits[-1]]
    name = given.settings.stem
    folder = given.csv or Path("benchmarks", "results", name)
    write(tables_of("\n".join([*parts, *itertools.chain(*found.values())]).splitlines()), folder)
    page = given.page or Path(training.settings.page)
    index = os.path.relpath(folder / "README.md", page.parent)
    fill_file(page, {name: "\n".join([*parts, *shown, f"All tables: [CSV]({index})."])})
    print(f"block {name} of {page}, tables in {folder}")


def skills(training: Training, trained: Sequence[Arm]) -> str:
    """What was tuned, the skill reached, the answers on validation prompts, the cost."""
    by_arm = results_of(training.run)
    splits = training.settings.splits
    last = splits[-1]
    chosen = validation_answers(training, trained)
    rows = [
        [
            arm.name,
            tuned(arm, by_arm[arm.name][0], training.settings),
            *(
                str(over_seeds(by_arm[arm.name], lambda r, s=split: r[s]["skill"]))
                for split in splits
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
    header = ["arm", "tuned", *(f"skill, {split}" for split in splits), "lost at 12.5 %"]
    header += ["rank correlation", "answers, validation", "weights per head", "CPU s", "seeds"]
    return table("Skill, and answers on validation prompts (%, mean of all settings)", header, rows)


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
        for _, records in settings_of(training, "validation", "score", protocol)
    ]
    return {
        arm.name: mean(accuracy(records[arm.name]).mean for records in columns)
        for arm in trained
        if columns and all(arm.name in records for records in columns)
    }


Columns = Sequence[tuple[str, dict[str, list[Result]]]]
"""Name of a setting -> records of every arm and of the full cache."""


def settings_of(training: Training, split: str, value: str, protocol: str) -> Columns:
    """Every allocator, budget and protection (`+p`) that has records with a `value`."""
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
                folder, value, protocol=protocol, allocator=allocator, budget_spec=budget,
                protected=protected,
            ),
        )
        for allocator, budget, protected in settings
    ]  # fmt: skip
    return [column for column in columns if column[1]]


def answers(training: Training, trained: Sequence[Arm], split: str) -> Iterator[str]:
    """Accuracy and perplexity of every arm and its difference to the reference, by protocol.

    A star marks differences other than 0 at 5 % after Holm's correction for the whole table.
    """
    names = [arm.name for arm in trained]
    for protocol, words in PROTOCOLS.items():
        if columns := settings_of(training, split, "score", protocol):
            caption = f"Answers on {split} prompts, {words}, %"
            yield from compared(training, names, columns, caption, accuracy, difference, 1)
        if columns := settings_of(training, split, "nll", protocol):
            caption = (
                f"Perplexity of replies on {split} prompts, {words}; differences in nats, + worse"
            )
            yield from compared(training, names, columns, caption, perplexity, nats_difference, 3)


def compared(
    training: Training,
    names: Sequence[str],
    columns: Columns,
    caption: str,
    value: Callable[[list[Result]], Interval],
    gap: Callable[[list[Result], list[Result]], Interval],
    digits: int,
) -> Iterator[str]:
    """The table of arms in all columns; none where the reference has no records."""
    reference = training.settings.reference
    names = [name for name in names if all(name in found for _, found in columns)]
    if reference not in names:
        return
    gaps = {
        (name, column): gap(found[name], found[reference])
        for name in names if name != reference
        for column, found in columns
    }  # fmt: skip
    stars = dict(zip(gaps, holm(list(gaps.values())), strict=True))

    def text(interval: Interval, sign: str, star: str = "") -> str:
        mean_, low, high = (
            f"{each:{sign}.{digits}f}" for each in (interval.mean, interval.low, interval.high)
        )
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
                for cell in (text(value(found[name]), ""), difference_of(name, column))
            ),
        ]
        for name in names
    ]
    header = ["arm"]
    for column, _ in columns:
        header += [column, f"− {reference}"]
    whole = value(columns[0][1]["full"]).mean
    yield table(f"{caption} (full cache {whole:.{digits}f})", header, rows)


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its caption above it."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join(
        [f"**{caption}**", "", lines[0], "|---" + "|--:" * (len(header) - 1) + "|", *lines[1:], ""]
    )


if __name__ == "__main__":
    main()
