"""Documents of many kinds with questions about them: traces of a policy that has seen no benchmark.

    python recipes/real_models/documents.py OUT [D]

Code is of Python's standard library; records, tables and logs are drawn. D adds what it holds of
`novels_train` (a folder of texts), `wiki_train.jsonl` and `sgd.jsonl` (`texts.py` makes them) and
`gsm8k.jsonl` (its training questions). OUT gets conversations: a document, or examples with labels,
and nine questions about names, numbers and lines of it, drawn at random, with exact answers. One of
six begins with a rule that all its answers follow. No needle is put into any text. Takes seconds.
"""

import argparse
import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CONVERSATIONS, QUESTIONS = 1000, 9
"""Conversations, and questions in each."""
WORDS, CHARACTERS, EXAMPLE_WORDS = 620, 4300, 22
"""Words of a document, about; its characters, at most; words of an example with a label, about."""
RULED = 6
"""One conversation of so many begins with a rule."""
KINDS = "novel article program dialogue records log table exercises"
DRAWN = (
    "novel article program dialogue mixture records novel article log mixture program table "
    "mixture exercises"
)
"""Each kind as often as it is drawn; a mixture is of five short documents."""
HEADS = (
    "Follow this rule throughout our conversation: {}\n\n",
    "{} Do so whatever I ask.\n\nHere is the text.\n\n",
    "Guidelines for the assistant\n- {}\n\n---\n\n",
    "Before you read on: {}\n\n",
)
RULES = {
    "Start each reply with {}:": "{word}: {answer}",
    "Close each reply with {}.": "{answer} {word}",
    "Put each reply into square brackets.": "[{answer}]",
    "Reply in capital letters only.": "{capitals}",
    "I am {}; use my name whenever you reply.": "{word}, {answer}",
    "Add a line with the reference {} below each reply.": "{answer}\nReference: {word}",
    "Wrap each reply in <{0}> and </{0}>.": "<{word}>{answer}</{word}>",
    "Say each reply twice.": "{answer}. {answer}",
}
"""A rule, and an answer that follows it; the word of a rule is drawn."""
FIRST, LAST, CITIES, ITEMS = map(
    str.split,
    (
        "Amara Bruno Chen Dalia Emeka Fiona Goran Hana Ivo Jamila Kofi Lena Mateo Nadia Oscar "
        "Priya Quentin Rosa Selim Tova Umar Vera Wes Ximena Yusuf Zora",
        "Abbott Banerjee Castillo Dvorak Eriksen Fontaine Gupta Hashimoto Ibarra Jansen Kowalski "
        "Lindqvist Moreau Novak Okafor Petrov Quinn Rossi Sato Tanaka Ueda Vasquez Weber Xu Yilmaz "
        "Zhang",
        "Lisbon Tallinn Accra Osaka Quito Bergen Tunis Leeds Davao Turin Perth Lagos Graz Lima "
        "Porto Hanoi Malmo Cusco",
        "kettle drill ladder monitor keyboard lantern jacket tent router printer blender saddle "
        "telescope helmet microphone projector",
    ),
)
ENTITY = re.compile(
    r"(?<![A-Za-z0-9])(?:[0-9][0-9A-Za-z.,:/\-]*[0-9A-Za-z]|[0-9]+|[A-Z][a-z]+(?: [A-Z][a-z]+)+"
    r"|[A-Z][a-z]{3,}|[A-Za-z]+_[A-Za-z_0-9]+|[A-Z0-9]{4,}|[a-z]+\.[a-z]+\(\))"
)
"""A number, a name, or an identifier of code."""
CLOZE = (
    'What comes right after "{}" in the text above?',
    'Complete from the text above: "{} ..."',
    'The text above says "{} ...". What follows?',
    'Which name or number follows "{}"?',
)
ABOUT = (
    "Quote the line about {}.",
    "What does the text above say about {}?",
    "Find {} in the text above and quote what it says there.",
)


Question = tuple[str, str]
"""A question and its answer."""
Kind = Callable[[int], str]
"""Draws a document of a kind; its argument is the number of words, about."""


def is_even(file: Path) -> bool:
    """Whether a file is in the half that is trained on: the digest of its name is even."""
    return int(hashlib.sha256(file.name.encode()).hexdigest(), 16) % 2 == 0


def source_files() -> list[Path]:
    """Half of the standard library's longer modules; the others are for tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = ("site-packages", "/test", "idlelib")
    return [
        Path(file)
        for file in sorted(map(str, [*root.glob("*.py"), *root.glob("[a-z]*/*.py")]))
        if not any(part in file for part in left_out)
        and 6_000 < Path(file).stat().st_size < 200_000
        and is_even(Path(file))
    ]


class Documents:
    """Draws documents; each kind is a method, whose documents have about `words` words."""

    def __init__(self, texts: Path | None) -> None:
        """Read what documents are cut from; kinds without files in `texts` are left out."""
        self.draw = random.Random(11)
        novels = sorted((texts / "novels_train").glob("*.txt")) if texts else []
        self.novels = [file.read_text(encoding="utf-8") for file in novels]
        self.articles = [row["text"] for row in _rows(texts, "wiki_train")]
        self.dialogues = [row["messages"] for row in _rows(texts, "sgd")]
        self.problems = _rows(texts, "gsm8k")
        self.code = source_files()

    def available(self, names: str) -> list[Kind]:
        """Methods of the kinds `names` (separated by spaces), if their files are there."""
        needed = {
            "novel": self.novels,
            "article": self.articles,
            "dialogue": self.dialogues,
            "exercises": self.problems,
        }
        return [getattr(self, name) for name in names.split() if needed.get(name, True)]

    def novel(self, words: int = WORDS) -> str:
        """A stretch of a novel."""
        return self._stretch(self.draw.choice(self.novels), words)

    def article(self, words: int = WORDS) -> str:
        """The beginning of a piece of an article."""
        return self._cut(self.draw.choice(self.articles), words)

    def program(self, words: int = WORDS) -> str:
        """A stretch of a module."""
        return self._stretch(self.draw.choice(self.code).read_text(encoding="utf-8"), words)

    def dialogue(self, words: int = WORDS) -> str:
        """Dialogues of a customer and an agent."""
        text = ""
        while len(text.split()) < words:
            for turn in self.draw.choice(self.dialogues):
                speaker = "Customer" if turn["role"] == "user" else "Agent"
                text += f"{speaker}: {turn['content']}\n"
            text += "\n"
        return self._cut(text, words)

    def exercises(self, words: int = WORDS) -> str:
        """Exercises with their solutions."""

        def line() -> str:
            row = self.draw.choice(self.problems)
            return f"{row['question']}\n{row['answer']}\n"

        return self._lines(line, words)

    def records(self, words: int = WORDS) -> str:
        """Records of one kind."""
        choice, number = self.draw.choice, self.draw.randrange
        kind = number(4)

        def person() -> str:
            row = {"id": number(1000, 99999), "name": self._name(), "city": choice(CITIES)}
            row["phone"] = f"+{number(10, 99)} {number(100, 999)} {number(1000, 9999)}"
            return json.dumps({**row, "joined": self._date()})

        def order() -> str:
            return (
                f"Order {self._code()}\n  customer: {self._name()}\n"
                f"  item: {number(1, 9)} x {choice(ITEMS)}\n  total: {self._price()} EUR\n"
                f"  ship to: {choice(CITIES)}\n"
            )

        def setting() -> str:
            suffix = ["limit", "port", "path", "timeout", "owner", "mode"]
            key = f"{choice(ITEMS)}_{choice(suffix)}"
            values = [str(number(9999)), choice(CITIES).lower(), "/srv/" + self._code().lower()]
            return f"{key} = {choice([*values, 'true', 'false', self._name()])}"

        def desk() -> str:
            place = f"{self._name()}, room {number(100, 600)}, extension {number(1000, 9999)}"
            return f"- {place}, {choice(['sales', 'legal', 'research', 'support', 'finance'])}"

        return self._lines((person, order, setting, desk)[kind], words)

    def log(self, words: int = WORDS) -> str:
        """A server's log."""
        choice, number = self.draw.choice, self.draw.randrange
        seconds = 0
        why = ["timeout after 30 s", "connection reset", "no space left", "permission denied"]

        def line() -> str:
            nonlocal seconds
            seconds += number(1, 90)
            time = f"{8 + seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
            head = f"{self._date()[:4]}-03-14 {time}"
            head += f" {choice(['INFO', 'INFO', 'INFO', 'WARN', 'ERROR', 'DEBUG'])}"
            head += f" {choice(['auth', 'db', 'cache', 'http', 'queue', 'disk'])}: "
            user = f"user {self._name().split()[0].lower()}{number(99)}"
            events = [
                f"{user} logged in from 10.{number(255)}.{number(255)}.{number(255)}",
                f"GET /api/{choice(ITEMS)}/{number(9999)} 200 in {number(900)} ms",
                f"request {self._code().lower()} failed: {choice(why)}",
                f"evicted {number(5000)} entries",
                f"job {number(99999)} finished in {number(60)}.{number(9)} s",
                f"retrying {choice(CITIES).lower()}-{number(9)} (attempt {number(1, 5)})",
            ]
            return head + choice(events)

        return self._lines(line, words)

    def table(self, words: int = WORDS) -> str:
        """A table."""
        choice, number = self.draw.choice, self.draw.randrange

        def product() -> str:
            item = f"{choice(ITEMS)} {self._code()[:3]}"
            return f"| {item} | {number(500)} | {self._price()} | {choice(LAST)} |"

        def weather() -> str:
            where = f"{self._date()},{choice(CITIES)}"
            return f"{where},{number(-10, 38)}.{number(10)},{number(60)},{self._name()}"

        def city() -> str:
            facts = (choice(CITIES), number(20000, 4000000), number(800, 1900), self._name())
            return "\t".join(map(str, facts))

        tables = [
            ("| product | stock | price | supplier |\n|---|---|---|---|", product),
            ("date,station,temperature,rain_mm,observer", weather),
            ("city\tpopulation\tfounded\tmayor", city),
        ]
        head, line = choice(tables)
        return f"{head}\n{self._lines(line, words)}"

    def mixture(self, words: int = WORDS) -> str:
        """Five short documents of any kind."""
        kinds = self.available(KINDS)
        parts = [kind(words // 5) for kind in [self.draw.choice(kinds) for _ in range(5)]]
        return "\n\n".join(parts)

    def examples(self) -> tuple[str, list[Question]]:
        """Pieces of texts with a label for the kind of each, and some whose label is asked for."""
        kinds = self.available(KINDS)
        labels = self.draw.sample(ITEMS, len(kinds))
        drawn = [self.draw.randrange(len(kinds)) for _ in range(20 + QUESTIONS)]
        texts = [" ".join(kinds[kind](EXAMPLE_WORDS)[:160].split()) for kind in drawn]
        pairs = [
            (f"Text: {text}\nLabel:", labels[kind]) for text, kind in zip(texts, drawn, strict=True)
        ]
        shown = "\n\n".join(f"{text} {label}" for text, label in pairs[QUESTIONS:])
        return shown, pairs[:QUESTIONS]

    def conversation(self, kinds: Sequence[Kind]) -> dict[str, Any] | None:
        """A row: a document of one of `kinds` and questions; None where it gives too few."""
        draw = self.draw
        text = draw.choice(kinds)(WORDS).strip()[:CHARACTERS]
        asked = questions_about(text, draw)
        if draw.random() < 0.1:
            text, asked = self.examples()
        if len(asked) < QUESTIONS:
            return None
        head, word = "", draw.choice([self._code(), self._name(), draw.choice(ITEMS)])
        if draw.randrange(RULED) == 0:
            rule, reply = draw.choice(list(RULES.items()))
            head = draw.choice(HEADS).format(rule.format(word))
            asked = [
                (question, reply.format(answer=answer, word=word, capitals=answer.upper()))
                for question, answer in asked
            ]
        messages: list[dict[str, str]] = []
        for question, answer in asked:
            before = "" if messages else f"{head}{text}\n\n"
            messages += [
                {"role": "user", "content": before + question},
                {"role": "assistant", "content": answer},
            ]
        return {"prompt": messages[:-1], "answer": messages[-1]["content"]}

    def _cut(self, text: str, words: int) -> str:
        found = 0
        for place, character in enumerate(text):
            found += character in " \n"
            if found >= words:
                return text[:place]
        return text

    def _stretch(self, text: str, words: int = WORDS) -> str:
        start = self.draw.randrange(max(1, len(text) - words * 8))
        return self._cut(text[text.find("\n", start) + 1 :].strip(), words)

    def _lines(self, line: Callable[[], str], words: int) -> str:
        text = ""
        while len(text) < words * 5:
            text += line() + "\n"
        return text.strip()

    def _name(self) -> str:
        return f"{self.draw.choice(FIRST)} {self.draw.choice(LAST)}"

    def _code(self) -> str:
        length = self.draw.choice([4, 6, 8])
        return "".join(
            self.draw.choice("0123456789ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(length)
        )

    def _date(self) -> str:
        number = self.draw.randrange
        return f"20{number(10, 27)}-{number(1, 13):02}-{number(1, 29):02}"

    def _price(self) -> str:
        return f"{self.draw.randrange(1, 900)}.{self.draw.randrange(100):02}"


def _rows(texts: Path | None, name: str) -> list[dict[str, Any]]:
    if texts is None or not (file := texts / f"{name}.jsonl").exists():
        return []
    return list(map(json.loads, file.read_text(encoding="utf-8").splitlines()))


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows as JSON lines."""
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def questions_about(text: str, draw: random.Random) -> list[Question]:
    """Nine questions with their answers; fewer where a text has too few names and numbers."""
    entities = [
        match
        for match in ENTITY.finditer(text)
        if match.start() > 60
        and len(match.group()) < 40
        and text[match.start() - 2 : match.start() - 1] not in '.!?"\n'
    ]
    asked = []
    for number, match in enumerate(draw.sample(entities, min(QUESTIONS, len(entities)))):
        entity = match.group()
        quoted = line_around(text, match) if number % 3 == 2 and text.count(entity) == 1 else ""
        if 10 < len(quoted) < 260:
            asked.append((draw.choice(ABOUT).format(entity), quoted))
        else:
            before = text[: match.start()].rstrip().split(" ")[-draw.choice([5, 8, 12]) :]
            opening = " ".join(before).strip().replace("\n", " ")[-90:]
            asked.append((draw.choice(CLOZE).format(opening), entity))
    return asked


def line_around(text: str, match: re.Match[str]) -> str:
    """The line or sentence that a match stands in."""
    start = max(text.rfind("\n", 0, match.start()), text.rfind(". ", 0, match.start()) + 1) + 1
    ends = [end for end in (text.find("\n", match.end()), text.find(". ", match.end())) if end > 0]
    return text[start : min(ends, default=len(text))].strip()


def main(out: Path, texts: Path | None = None) -> None:
    """Write the conversations."""
    documents = Documents(texts)
    kinds = documents.available(DRAWN)
    missing = {*DRAWN.split()} - {kind.__name__ for kind in kinds}
    if missing:
        print(f"left out, since D lacks their files: {', '.join(sorted(missing))}")
    rows = [documents.conversation(kinds) for _ in range(CONVERSATIONS)]
    write_rows(out, filter(None, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="conversations, JSONL")
    parser.add_argument("texts", type=Path, nargs="?", metavar="D", help="folder of texts")
    main(**vars(parser.parse_args()))
