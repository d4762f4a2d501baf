"""Put what one kvp-tune chose into the settings that another chose, in place of the same methods.

    join_settings.py FOLDER TARGET    # FOLDER of kvp-tune; TARGET.json and TARGET.csv are written

So that a method can be tuned again alone: `TUNED=kvp run.sh tune`, at other budgets where it answers
everything at those of the others. Without TARGET.json both files are copies of the folder's.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.tune.settings_file import SETTINGS, TunedSettings, load_settings, save_settings
from eval.tune.tables import TABLE
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json

MAY_DIFFER = ("settings_per_method", "budgets")
"""Settings of the later tuning that stand in `run` of the joined file."""


def joined(earlier: TunedSettings, later: TunedSettings) -> TunedSettings:
    """The methods of both, in the order of `earlier`; `later` wins.

    Raises SystemExit where they were chosen on different prompts or budgets.
    """
    differing = [
        name for name in {**earlier.data, **later.data}
        if name not in MAY_DIFFER and earlier.data.get(name) != later.data.get(name)
    ]  # fmt: skip
    if differing or earlier.split != later.split:
        raise SystemExit(f"chosen on other data ({', '.join(differing) or 'split'}): tune all")
    ours = {(each.method, each.group, each.protocol): each for each in earlier.methods}
    ours |= {(each.method, each.group, each.protocol): each for each in later.methods}
    return replace(earlier, methods=tuple(ours.values()))


def joined_tables(earlier: str, later: str) -> str:
    """Lines of both CSV texts; those of methods in `later` come from there."""
    header, *new = later.splitlines()
    column = header.split(",").index("method")
    again = {row[column] for row in csv.reader(new)}
    old = earlier.splitlines()[1:]
    kept = [
        line for line, row in zip(old, csv.reader(old), strict=True) if row[column] not in again
    ]
    return "\n".join([header, *kept, *new, ""])


def _run(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = read_sealed_json(path, ResultsError)["run"]
    return run


def main() -> None:
    """Command line."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    settings, table = target.with_suffix(".json"), target.with_suffix(".csv")
    later = load_settings(folder)
    rows = (folder / TABLE).read_text(encoding="utf-8")
    run = _run(folder / SETTINGS)
    if settings.exists():
        earlier = load_settings(settings)
        if {each.method for each in earlier.methods} - {each.method for each in later.methods}:
            run = {**_run(settings), "later": run}
        later = joined(earlier, later)
        if table.exists():
            rows = joined_tables(table.read_text(encoding="utf-8"), rows)
    save_settings(settings, later, run)
    table.write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    main()
