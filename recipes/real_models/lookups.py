"""Questions to choose settings on that are no task of a benchmark.

    python -m recipes.real_models.lookups OUT D

Three questions are asked of each of 60 contexts of about 650 tokens: staff directories, orders,
tables of prices, and stretches of novels of `D/novels_test`, of modules that `documents.py` does
not use and of articles. Questions ask for an entry, or what follows some words. Rows are for
`kvp eval --tasks data --split all`. Takes a second.
"""

import argparse
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

from recipes.real_models.documents import (
    CITIES,
    FIRST,
    ITEMS,
    LAST,
    Documents,
    Question,
    is_even,
    write_rows,
)

CONTEXTS, ASKED = 10, 3
"""Contexts of each kind, and questions about each."""


class Lookups(Documents):
    """Draws contexts and questions."""

    def __init__(self, texts: Path) -> None:
        """Read the files of `texts`, and draw nothing yet."""
        super().__init__(texts)
        self.draw = random.Random(977)
        novels = sorted((texts / "novels_test").glob("*.txt"))
        self.other_novels = [file.read_text(encoding="utf-8") for file in novels]
        modules = sorted(map(str, Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
        self.other_code = [
            file for file in map(Path, modules) if not is_even(file) and file.stat().st_size > 9000
        ]

    def kinds(self) -> dict[str, Callable[[], tuple[str, list[Question]]]]:
        """What draws a context with questions, by the task of its rows."""
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


def main(out: Path, texts: Path) -> None:
    """Write the rows; SystemExit where `texts` lacks what they are cut from."""
    drawn = Lookups(texts)
    if not (drawn.other_novels and drawn.articles):
        raise SystemExit(f"{texts} lacks novels_test/*.txt or wiki_train.jsonl (README.md)")
    rows = []
    for _ in range(CONTEXTS):
        for name, kind in drawn.kinds().items():
            context, asked = kind()
            questions = [{"question": question, "answer": answer} for question, answer in asked]
            rows.append({"task": name, "context": f"{context}\n\n", "questions": questions})
    write_rows(out, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="rows, JSONL")
    parser.add_argument("texts", type=Path, metavar="D", help="folder of texts")
    main(**vars(parser.parse_args()))
