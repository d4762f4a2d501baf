"""Which RULER tasks the full cache answers: a measured table, and what later steps read of it.

    tasks.py choose TABLE.csv --results RUN/tasks    # of kvp-eval --methods full --split validation
    tasks.py names TABLE.csv                         # the chosen tasks, comma separated
    tasks.py tokens TABLE.csv                        # longest answer that any method may give

A task is chosen where the full cache reaches `LEAST` of the score. Answers of all methods may have
a quarter more tokens than the longest right answer seen.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.results.folder import MANIFEST, ROWS, read_manifest
from eval.results.records import FULL, Record, read_records
from eval.stats import bootstrap_mean, by_policy
from kvp.hf import load_tokenizer

LEAST = 0.8
"""Mean score of the full cache, 0 to 1."""
MARGIN = 1.25
"""Tokens that an answer may have, as a multiple of the longest right one."""
COLUMNS = ("task", "prompts", "full", "low", "high", "longest_right_answer", "chosen")


def measured(folder: Path) -> list[dict[str, Any]]:
    """One line per task of a results folder: score of the full cache in %, and longest answer."""
    identity = read_manifest(folder / MANIFEST)["identity"]
    tokenizer = load_tokenizer(identity["model"], revision=identity.get("revision"))
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in read_records(folder / ROWS):
        if record["method"] == FULL and record["score"] is not None:
            by_task[record["task"]].append(record)
    lines = []
    for task, records in by_task.items():
        interval = bootstrap_mean(by_policy(records))
        right = [record["prediction"] for record in records if record["score"] == 1]
        lengths = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in right]
        values = (task, len(records), *(f"{100 * value:.1f}" for value in
                  (interval.mean, interval.low, interval.high)),
                  max(lengths, default=0), int(interval.mean >= LEAST))  # fmt: skip
        lines.append(dict(zip(COLUMNS, values, strict=True)))
    return lines


def write(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the table; raises SystemExit where no task is answered."""
    if not any(line["chosen"] for line in lines):
        raise SystemExit(f"the full cache reaches {LEAST:.0%} of no task: is this the right model?")
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a table."""
    if not path.exists():
        raise SystemExit(f"{path} does not exist: run the step `tasks` first")
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def chosen(path: Path) -> list[dict[str, str]]:
    """The lines of the chosen tasks."""
    return [line for line in read(path) if int(line["chosen"])]


def answer_tokens(path: Path) -> int:
    """Tokens that an answer may have: a multiple of 8."""
    longest = max(int(line["longest_right_answer"]) for line in chosen(path))
    return 8 * math.ceil(MARGIN * longest / 8)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=("choose", "names", "tokens"))
    parser.add_argument("table", type=Path)
    parser.add_argument("--results", type=Path, help="results folder of the full cache")
    arguments = parser.parse_args()
    if arguments.action == "choose":
        if arguments.results is None:
            parser.error("choose needs --results")
        write(measured(arguments.results), arguments.table)
        print(arguments.table.read_text(encoding="utf-8"), end="")
    elif arguments.action == "names":
        print(",".join(line["task"] for line in chosen(arguments.table)))
    else:
        print(answer_tokens(arguments.table))


if __name__ == "__main__":
    main()
