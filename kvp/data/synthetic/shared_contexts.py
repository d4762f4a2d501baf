"""Contexts with several questions, after SCBench's synthetic tasks, of any size.

Each maker draws what is asked for first, so that questions and answers are the same for every
amount of what surrounds it. Keys, values, names and numbers belong to one split. The wording of
`kv` and `mf` is SCBench's (InfiniteBench's), that of `vt` RULER's; the others' is our own, since
SCBench publishes those as data alone.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from kvp.data.ruler import NOISE
from kvp.data.synthetic.lexicon import LISTS, people
from kvp.data.synthetic.text import SampleInputs, distinct, draw_name, draw_number, draw_uuid

TURNS = 5
"""Questions of one context."""
HOPS = 3
"""Assignments between the first and the last hash of a chain."""
VARIABLES = 5
"""Variables of a chain in variable tracking."""
_MIXED = string.ascii_letters + string.digits
_CLASSES = "ABCD"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One question of a context."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SharedContext:
    """A context with the questions that are asked about it."""

    context: str
    turns: tuple[Turn, ...]


ContextMaker = Callable[[int], SharedContext]
"""Makes one context with any amount, from 0 on, of what surrounds the answers."""


class _Drawn:
    """The first so many of an endless series, kept for the next, larger request."""

    def __init__(self, series: Iterator[str]) -> None:
        self._series = series
        self._kept: list[str] = []

    def first(self, count: int) -> list[str]:
        while len(self._kept) < count:
            self._kept.append(next(self._series))
        return self._kept[:count]


def _shuffled(
    inputs: SampleInputs,
    asked: Sequence[str],
    others: Iterator[str],
    turns: Sequence[Turn],
    frame: tuple[str, str, str],
) -> ContextMaker:
    """Lines in a random order, those asked for and an amount of `others`.

    `frame` is the text before, between and after lines.
    """
    drawn = _Drawn(others)
    before, between, after = frame

    def make(amount: int) -> SharedContext:
        parts = [*asked, *drawn.first(amount)]
        lines = [line for part in parts for line in part.splitlines()]
        inputs.rng("order").shuffle(lines)
        return SharedContext(context=before + between.join(lines) + after, turns=tuple(turns))

    return make


def key_value(inputs: SampleInputs) -> ContextMaker:
    """A JSON object of uuids, and the values of some keys; the amount is the other keys."""

    def pairs(part: str) -> Iterator[str]:
        rng = inputs.rng(part)
        while True:
            key, value = draw_uuid(rng, inputs.split), draw_uuid(rng, inputs.split)
            yield f"{json.dumps(key)}: {json.dumps(value)}"

    asked = _Drawn(pairs("asked")).first(TURNS)
    turns = []
    for pair in asked:
        key, value = pair.split(": ")
        question = f"Key: {key}\nThe value associated with the specified key is: "
        turns.append(Turn(question=question, answers=(json.loads(value),)))
    return _shuffled(inputs, asked, pairs("others"), turns, ("JSON data:\n{", ",\n", "}"))


def prefix_suffix(inputs: SampleInputs) -> ContextMaker:
    """A list of random strings, some asked for by prefix and suffix; the amount is the others.

    Each string that is asked for has a neighbour of the same prefix and one of the same suffix.
    """
    size, ends = 24, 6
    rng = inputs.rng("asked")
    asked, near = [], []
    for _ in range(TURNS):
        word = draw_name(rng, inputs.split, size, _MIXED)
        asked.append(word)
        middles = [draw_name(rng, inputs.split, size - ends, _MIXED) for _ in range(2)]
        near += [word[:ends] + middles[0], middles[1] + word[-ends:]]

    def others() -> Iterator[str]:
        rng = inputs.rng("others")
        while True:
            yield draw_name(rng, inputs.split, size, _MIXED)

    turns = tuple(
        Turn(
            question=f"Which string of the list begins with {word[:ends]} and ends with "
            f"{word[-ends:]}? Write the whole string.",
            answers=(word,),
        )
        for word in asked
    )

    header = "Here is a list of strings, one per line.\n\n"
    return _shuffled(inputs, [*asked, *near], others(), turns, (header, "\n", ""))


def variable_tracking(inputs: SampleInputs) -> ContextMaker:
    """Chains of variable assignments in RULER's noise; the amount is the lines of noise."""
    rng = inputs.rng("chains")
    names = distinct(lambda: draw_name(rng, inputs.split, 5), TURNS * VARIABLES)
    values = distinct(lambda: draw_number(rng, inputs.split, digits=5), TURNS)
    chains = [names[turn * VARIABLES : (turn + 1) * VARIABLES] for turn in range(TURNS)]
    statements = []
    for chain, value in zip(chains, values, strict=True):
        steps = [f"VAR {new} = VAR {old}" for old, new in pairwise(chain)]
        statements.append([f"VAR {chain[0]} = {value}", *steps])
    turns = tuple(
        Turn(
            question=f"Question: Find all variables that are assigned the value {value} in the "
            f"text above.\nAnswer: {VARIABLES} variables are assigned the value {value}, they are:",
            answers=tuple(chain),
        )
        for chain, value in zip(chains, values, strict=True)
    )

    def make(amount: int) -> SharedContext:
        rng = inputs.rng("places")
        lines: list[tuple[float, str]] = [(place, NOISE) for place in range(amount)]
        for chain in statements:  # in their order, each among others
            places = sorted(rng.uniform(0, amount) for _ in chain)
            lines += zip(places, chain, strict=True)
        text = "\n".join(line for _, line in sorted(lines, key=lambda placed: placed[0]))
        header = (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
        )
        return SharedContext(context=f"{header}\n\n{text}", turns=turns)

    return make


def hash_hop(inputs: SampleInputs) -> ContextMaker:
    """Assignments of hashes to hashes in any order; the amount is the chains not asked for."""

    def chains(part: str) -> Iterator[str]:
        rng = inputs.rng(part)
        while True:
            hashes = [
                draw_name(rng, inputs.split, 8, string.ascii_letters) for _ in range(HOPS + 1)
            ]
            yield "\n".join(f"{one} = {other}" for one, other in pairwise(hashes))

    asked = _Drawn(chains("asked")).first(TURNS)
    turns = tuple(
        Turn(
            question=f"Start at {chain.split()[0]} and follow {HOPS} assignments. Which hash do "
            "you arrive at?",
            answers=(chain.split()[-1],),
        )
        for chain in asked
    )

    header = "Each line assigns one hash to another one.\n\n"
    return _shuffled(inputs, asked, chains("others"), turns, (header, "\n", ""))


_EXTREMES: Mapping[str, Callable[[list[int]], int]] = {
    "largest number": lambda ranked: ranked[-1],
    "second largest number": lambda ranked: ranked[-2],
    "third largest number": lambda ranked: ranked[-3],
    "smallest number": lambda ranked: ranked[0],
    "second smallest number": lambda ranked: ranked[1],
    "third smallest number": lambda ranked: ranked[2],
}
"""What is asked of a list, from its distinct numbers in ascending order."""


def math_find(inputs: SampleInputs) -> ContextMaker:
    """A list of numbers and which of them is largest, smallest or the median.

    The amount is the numbers above seven, an odd count of them in all. A number may occur twice:
    only the median counts it twice.
    """
    rng = inputs.rng("range")
    low = rng.randrange(1000, 5000)
    high = low + rng.randrange(1000, 4900)
    kinds = rng.sample([*_EXTREMES, "median"], TURNS)

    def numbers() -> Iterator[str]:
        rng = inputs.rng("numbers")
        while True:
            number = draw_number(rng, inputs.split, digits=4)
            if low <= int(number) < high:
                yield number

    drawn = _Drawn(numbers())

    def make(amount: int) -> SharedContext:
        values = [int(number) for number in drawn.first((amount + 7) // 2 * 2 + 1)]
        ranked = sorted(set(values))
        found = {kind: rank(ranked) for kind, rank in _EXTREMES.items()}
        found["median"] = median_low(values)
        turns = tuple(
            Turn(question=f"The {kind} of the list is: ", answers=(str(found[kind]),))
            for kind in kinds
        )
        return SharedContext(context=str(values), turns=turns)

    return make


def many_shot(inputs: SampleInputs) -> ContextMaker:
    """Sentences that are classified by what they are about; the amount is the examples above four.

    The letter of each class is drawn anew for every context, and no example has the word that a
    question is about, so it can only be learned from the examples what a letter means.
    """
    topics = ("food", "animal", "tool", "job")
    rng = inputs.rng("classes")
    letters = rng.sample(_CLASSES, len(_CLASSES))
    words = []
    for topic in topics:
        every = list(LISTS[topic])
        rng.shuffle(every)
        words.append(every)
    names = people(inputs.split)

    def sentence(rng: random.Random, word: str) -> str:
        return f"Sentence: {rng.choice(names)} {rng.choice(_VERBS)} the {word}.\nClass:"

    def examples() -> Iterator[str]:
        rng = inputs.rng("examples")
        while True:
            order = rng.sample(range(len(topics)), len(topics))
            for kind in order:
                text = sentence(rng, rng.choice(words[kind][TURNS:]))
                yield f"{text} ({letters[kind]})"

    drawn = _Drawn(examples())
    turns = []
    for turn in range(TURNS):
        kind = rng.randrange(len(topics))
        text = sentence(rng, words[kind][turn])
        turns.append(Turn(question=text, answers=(f"({letters[kind]})",)))

    def make(amount: int) -> SharedContext:
        header = "Each sentence belongs to one of the classes (A), (B), (C) and (D)."
        text = "\n\n".join([header, *drawn.first(len(topics) + amount)])
        return SharedContext(context=text, turns=tuple(turns))

    return make


_VERBS = ("thinks of", "looks for", "remembers", "talks about", "paints", "waits for", "describes")


CONTEXTS: Mapping[str, Callable[[SampleInputs], ContextMaker]] = {
    "scbench_kv": key_value,
    "scbench_prefix_suffix": prefix_suffix,
    "scbench_vt": variable_tracking,
    "scbench_hashhop": hash_hop,
    "scbench_mf": math_find,
    "scbench_many_shot": many_shot,
}
"""The maker of each task that is generated."""
