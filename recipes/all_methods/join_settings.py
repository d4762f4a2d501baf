"""Put what one kvp tune chose into the settings that another chose, in place of the same methods.

    join_settings.py FOLDER TARGET    # FOLDER of kvp tune; TARGET.json and TARGET.csv are written

So that a method can be tuned again alone: `TUNED=snapkv run.sh tune`. Without TARGET.json both
files are copies of the folder's.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.tune.settings_file import SETTINGS, Tuned, TunedSettings, load_settings, save_settings
from eval.tune.tables import TABLE
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json

TRIED = "settings_per_method"
"""May differ: every entry says how many settings were tried."""


def joined(earlier: TunedSettings, later: TunedSettings) -> TunedSettings:
    """The methods of both, in the order of `earlier`; `later` wins.

    Raises SystemExit where they were chosen on different prompts or budgets.
    """
    theirs, ours = _comparable(earlier), _comparable(later)
    differing = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differing or earlier.split != later.split:
        raise SystemExit(f"chosen on other data ({', '.join(differing) or 'split'}): tune all")
    methods = {_key(each): each for each in (*earlier.methods, *later.methods)}
    return replace(earlier, methods=tuple(methods.values()))


def joined_tables(earlier: str, later: str, replaced: Collection[str]) -> str:
    """Lines of both CSV texts, those of the `replaced` methods of the earlier one left out."""
    header, *new = later.splitlines()
    old = earlier.splitlines()[1:]
    column = header.split(",").index("method")
    kept = [
        line for line, row in zip(old, csv.reader(old), strict=True) if row[column] not in replaced
    ]
    return "\n".join([header, *kept, *new, ""])


def _comparable(settings: TunedSettings) -> dict[str, Any]:
    """What was tuned on; a folder of a model may lie elsewhere."""
    data = {name: value for name, value in settings.data.items() if name != TRIED}
    return {**data, "model": Path(str(data.get("model"))).name}


def _key(entry: Tuned) -> tuple[str, str, str]:
    return entry.method, entry.group, entry.protocol


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
        again = {_key(each) for each in later.methods}
        replaced = {each.requested for each in earlier.methods if _key(each) in again}
        if len(replaced) < len(earlier.methods):
            run = {**_run(settings), "later": run}
        later = joined(earlier, later)
        if table.exists():
            rows = joined_tables(table.read_text(encoding="utf-8"), rows, replaced)
    save_settings(settings, later, run)
    table.write_text(rows, encoding="utf-8")


if __name__ == "__main__":
    main()
