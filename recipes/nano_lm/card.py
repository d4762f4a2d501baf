"""Print the table of the model card from what `evaluate.py` wrote.

    python recipes/nano_lm/card.py ruler.json

A dash stands for what was not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def ruler_table(records: Sequence[dict[str, Any]]) -> str:
    """Per cent of the references found, with its interval, by task and prompt length."""
    lengths = sorted({record["length"] for record in records})
    cells = {(record["task"], record["length"]): record for record in records}
    lines = [
        "| task | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |",
        "|---|" + "---|" * len(lengths),
    ]
    for task in dict.fromkeys(record["task"] for record in records):
        found = [cells.get((task, length)) for length in lengths]
        lines.append(f"| {task} | " + " | ".join(map(_score, found)) + " |")
    return "\n".join(lines)


def _score(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    return f"{record['score']:.1f} ({record['low']:.1f}-{record['high']:.1f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("ruler", type=Path, help="what evaluate.py wrote")
    args = parser.parse_args()
    print(ruler_table(json.loads(args.ruler.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
