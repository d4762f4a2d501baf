"""Print the tables of the model card from what `evaluate.py` and `perplexity.py` wrote.

    python recipes/nano_lm/card.py ruler.json perplexity.json

A dash stands for what was not measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXTS = {
    "dev": "Schema-Guided Dialogue, dev (chats)",
    "train": "Schema-Guided Dialogue, train records held out (chats)",
    "Eliot_Felix_1866": "Eliot, Felix Holt (1866)",
    "Gaskell_Ruth_1855": "Gaskell, Ruth (1855)",
    "oasst1_en_train_texts": "oasst1, train messages held out",
    "oasst1_en_validation": "oasst1, validation messages",
    "valid": "WikiText-2, validation",
}
"""Files of held-out text (`corpus.py`) and what they are."""


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


def perplexity_table(records: Sequence[dict[str, Any]]) -> str:
    """Perplexities of the model and the 5-gram, and what the whole context is worth, by text."""
    lines = ["| held-out text | nano | 5-gram | context |", "|---|--:|--:|--:|"]
    for record in records:
        context = record["all_before"] / record["near_alone"]
        text = TEXTS.get(record["source"], record["source"])
        numbers = f"{record['model']:.1f} | {record['kneser_ney']:.1f} | {context:.2f}"
        lines.append(f"| {text} | {numbers} |")
    return "\n".join(lines)


def _score(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    return f"{record['score']:.1f} ({record['low']:.1f}-{record['high']:.1f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("ruler", type=Path, help="what evaluate.py wrote")
    parser.add_argument("perplexity", type=Path, help="what perplexity.py wrote")
    args = parser.parse_args()
    print(ruler_table(json.loads(args.ruler.read_text(encoding="utf-8"))), end="\n\n")
    print(perplexity_table(json.loads(args.perplexity.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
