"""Questions to choose settings on that are no task of a benchmark.

    python -m recipes.real_models.lookups OUT D [PARTS CONTEXTS SEED]

Three questions are asked of each of 60 contexts, or six of each of CONTEXTS contexts of PARTS
parts, which have about 650 tokens each. Parts are a staff directory, orders, a table of prices, and
stretches of a novel of `D/novels_test`, of a module that `documents.py` does not use and of an
article. Questions ask for an entry, or what follows some words. Rows are for `kvp eval --tasks data
--split all`.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.real_models.documents import CITIES, FIRST, ITEMS, LAST, Documents, Question, is_even

CONTEXTS, ASKED = 10, 3
"""Contexts of each kind, and questions about each."""


class Lookups(Documents):
    """Draws contexts and questions."""

    def __init__(self, texts: Path) -> None:
        """Read the files; OSError where they are not there."""
        super().__init__(texts)
        self.draw = random.Random(977)
        novels = sorted((texts / "novels_test").glob("*.txt"))
        self.other_novels = [file.read_text(encoding="utf-8") for file in novels]
        modules = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
        self.other_code = [
            file for file in map(Path, modules) if not is_even(file) and file.stat().st_size > 9000
        ]

    def kinds(self) -> dict[str, Callable[[], tuple[str, list[Question]]]]:
        """What makes a part of each kind, by its task."""
        return {
            "people": self.people, "orders": self.orders, "prices": self.prices,
            "novel": self.novel_words, "code": self.code_lines, "wiki": self.article_words,
        }  # fmt: skip

    def people(self) -> tuple[str, list[Question]]:
        """A staff directory."""
        number = self.draw.randrange
        everyone = [f"{first} {last}" for first in FIRST for last in LAST]
        units = ["sales", "legal", "research", "support", "finance"]
        rows = [
            (name, number(100, 600), number(1000, 9999), self.draw.choice(units))
            for name in self.draw.sample(everyone, 40)
        ]
        asked = [
            (f"Which extension does {row[0]} have?", f"{row[2]}")
            for row in self.draw.sample(rows, ASKED)
        ]
        lines = (f"- {a}, room {b}, extension {c}, {d}" for a, b, c, d in rows)
        return "Staff directory\n" + "\n".join(lines), asked

    def orders(self) -> tuple[str, list[Question]]:
        """Orders."""
        choice = self.draw.choice
        rows = [
            (self._code() + str(i), self._name(), choice(ITEMS), self._price(), choice(CITIES))
            for i in range(26)
        ]
        totals, (buyer,) = self.draw.sample(rows, 2), self.draw.sample(rows, 1)
        asked = [(f"What is the total of order {row[0]}?", row[3]) for row in totals]
        lines = (
            f"Order {a}\n  customer: {b}\n  item: {c}\n  total: {d} EUR\n  ship to: {e}\n"
            for a, b, c, d, e in rows
        )
        return "\n".join(lines), [*asked, (f"Who placed order {buyer[0]}?", buyer[1])]

    def prices(self) -> tuple[str, list[Question]]:
        """A table."""
        choice, number = self.draw.choice, self.draw.randrange
        rows = [
            (f"{choice(ITEMS)} {self._code()[:4]}{i}", number(500), self._price(), choice(LAST))
            for i in range(38)
        ]
        priced, (supplied,) = self.draw.sample(rows, 2), self.draw.sample(rows, 1)
        asked = [(f"What is the price of the {row[0]}?", row[2]) for row in priced]
        head = "| product | stock | price | supplier |\n|---|---|---|---|\n"
        lines = "\n".join(f"| {a} | {b} | {c} | {d} |" for a, b, c, d in rows)
        return head + lines, [*asked, (f"Who supplies the {supplied[0]}?", supplied[3])]

    def novel_words(self) -> tuple[str, list[Question]]:
        """A stretch of a novel."""
        return self._followed(" ".join(self._stretch(self.draw.choice(self.other_novels)).split()))

    def code_lines(self) -> tuple[str, list[Question]]:
        """A stretch of a module."""
        text = self._stretch(self.draw.choice(self.other_code).read_text(encoding="utf-8"))
        lines, asked = [line for line in text.split("\n") if len(line.strip()) > 25], []
        for _ in range(ASKED):
            place = self.draw.randrange(3, len(lines) - 2)
            question = f"Which line of the code comes right after `{lines[place].strip()}`?"
            asked.append((question, lines[place + 1].strip()))
        return text, asked

    def article_words(self) -> tuple[str, list[Question]]:
        """An article."""
        return self._followed(self.article())

    def _followed(self, text: str) -> tuple[str, list[Question]]:
        words, asked = text.split(), []
        for _ in range(ASKED):
            start = self.draw.randrange(20, len(words) - 40)
            opening, answer = words[start : start + 8], words[start + 8 : start + 14]
            question = f'Which words follow "{" ".join(opening)}" in the text?'
            asked.append((question, " ".join(answer)))
        return text, asked


def row_of(task: str, context: str, asked: list[Question]) -> dict[str, Any]:
    """A row of a context and what is asked of it."""
    questions = [{"question": question, "answer": answer} for question, answer in asked]
    return {"task": task, "context": context, "questions": questions}


def long_rows(made: Lookups, parts: int, contexts: int) -> list[dict[str, Any]]:
    """Questions about several parts that stand one after the other."""
    kinds = list(made.kinds().values())
    rows = []
    for number in range(contexts):
        chosen = [kinds[number % len(kinds)]] if parts == 1 else kinds[:parts]
        chosen += [made.draw.choice(kinds[1:]) for _ in range(parts - len(chosen))]
        made.draw.shuffle(chosen)
        drawn = [kind() for kind in chosen]
        asked = [question for _, questions in drawn for question in questions]
        asked = made.draw.sample(asked, min(6, len(asked)))
        text = "".join(f"{part}\n\n" for part, _ in drawn)
        rows.append(row_of(f"lookups_{parts}", text, asked))
    return rows


def short_rows(made: Lookups) -> list[dict[str, Any]]:
    """Questions about one part each."""
    rows = []
    for _ in range(CONTEXTS):
        for name, kind in made.kinds().items():
            context, asked = kind()
            rows.append(row_of(name, f"{context}\n\n", asked))
    return rows


def main(out: Path, texts: Path, parts: int = 0, contexts: int = 0, seed: int = 0) -> None:
    """Write the rows."""
    made = Lookups(texts)
    if parts:
        made.draw = random.Random(seed)
        rows = long_rows(made, parts, contexts)
    else:
        rows = short_rows(made)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="rows, JSONL")
    parser.add_argument("texts", type=Path, metavar="D", help="folder of texts")
    parser.add_argument("numbers", type=int, nargs="*", help="PARTS CONTEXTS SEED")
    given = parser.parse_args()
    if len(given.numbers) not in (0, 3):
        parser.error("PARTS, CONTEXTS and SEED are given together")
    main(given.out, given.texts, *given.numbers)
