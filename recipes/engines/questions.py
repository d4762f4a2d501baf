"""Documents and questions about them that the demonstrations ask an engine: three, or own rows."""

import argparse
import random
from operator import attrgetter
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvp.data.metrics import score_answer
from kvp.data.synthetic.text import prose
from kvp.data.task import Sample, TaskSettings
from kvp.data.tasks import build_samples
from kvp.errors import UsageError
from kvp.grouping import group_by

THINGS = ["lazy-cat", "old-lamp", "red-boat", "tall-tree", "quiet-river", "green-door"]
THINGS += ["small-bird", "blue-stone", "warm-bread", "last-train"]
OPENING = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
ASKED = "What is the special magic number for {0} mentioned in the provided text?"
"""As RULER asks: the kind of task that the bundled policies were trained on."""
PREFIX = " The special magic number for {0} mentioned in the provided text is"

WORDS = 700
"""Words of each document."""
Document = tuple[str, list[Sample]]
"""A text, and the questions about it: each is fed as `question + answer_prefix`."""


def add_flags(parser: argparse.ArgumentParser, kept: str) -> None:
    """Give a parser the flags of both demonstrations; `kept` says what a budget keeps."""
    shown = "default: %(default)s"
    parser.add_argument("--budget", default="12.5%", help=f"{kept}; {shown}")
    parser.add_argument("--rows", help="a file of questions of your own (docs/data.md)")
    parser.add_argument(
        "--prompts", type=int, default=30, help=f"the first questions of --rows; {shown}"
    )


def documents(rows: str | None, prompts: int, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Those of the first `prompts` questions of a file (docs/data.md), or three of `WORDS` words.

    Raises UsageError where the file has no question with an answer.
    """
    if rows is None:
        return _needles()
    if not Path(rows).is_file():
        raise UsageError(f"--rows {rows}: no such file")
    settings = TaskSettings(split="all", length=100_000, count=prompts, data=rows)
    samples = build_samples("data", settings, tokenizer)
    return [*group_by(samples, attrgetter("context")).items()]


def _needles() -> list[Document]:
    """Three documents of prose with three or four numbers in each."""
    draw, made = random.Random(1), []
    numbers = {thing: str(draw.randrange(10**6, 10**7)) for thing in THINGS}
    for first, last in ((0, 3), (3, 6), (6, 10)):
        size, parts, asked = WORDS // (last - first + 1), [], []
        for place in range(first, last):
            thing = THINGS[place]
            parts.append(prose(100 + place, words=size, split="test"))
            parts.append(f"One of the special magic numbers for {thing} is: {numbers[thing]}.")
            asked.append(
                Sample(
                    id=thing, task="needles", split="test", question=ASKED.format(thing),
                    answer_prefix=PREFIX.format(thing), references=(numbers[thing],), metric="all",
                    max_new_tokens=12,
                )
            )  # fmt: skip
        parts.append(prose(200 + first // 3, words=size, split="test"))
        made.append((OPENING + " ".join(parts) + "\n", asked))
    return made


def print_and_score(sample: Sample, answer: str) -> float:
    """Print an answer beside what is right; its score, 0 to 1."""
    score = score_answer(answer, sample.metric, sample.references)
    right = ", ".join(sample.references)
    asked = f"... {sample.question.strip()[-60:].partition(' ')[2]}"
    print(f"  {asked} {answer.strip()[:30]!r}, right is {right!r}: {score:.0%}", flush=True)
    return score
