"""English-like prose from a seed: the haystack and reading matter that kvp has without any file.

Little stories of people, towns and lost things, written by templates (`kvp.data.synthetic.plots`)
over word lists of our own (`kvp.data.synthetic.lexicon`). Plain enough for a small model to learn,
varied enough that it cannot be memorised. No digits and no hyphens, so it never collides with
RULER's needles. It has no meaning beyond a story: real text is a flag away (`--essays`).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TypeVar

from kvp.data.synthetic import lexicon
from kvp.data.synthetic.plots import ASIDES, OPENINGS, PLOTS, Step

T = TypeVar("T")
_SLOT = re.compile(r"\{([a-z0-9 ]+)\}")
_NAMED = frozenset({"hero", "pal", "town", "town2"})
_SHARES = {"train": (0, 6), "validation": (6, 8), "test": (8, 10)}
_ASIDE = 0.45
"""Chance of a sentence off the story after each of its steps."""


def prose(seed: int, words: int, split: str) -> str:
    """Paragraphs of prose with at least `words` words, ending with a sentence.

    A pure function of its arguments; a longer text of the same seed begins with the shorter one,
    up to the paragraph break. No sentence occurs in two splits: those with a name of a person or
    town have names of their split, the others belong to the split their CRC-32 says.
    """
    rng = random.Random(f"prose/{split}/{seed}")
    text: list[str] = []
    count = 0
    while count < words:
        paragraph: list[str] = []
        for sentence in _story(rng, split):
            paragraph.append(sentence)
            count += sentence.count(" ") + 1
            if count >= words:
                break
        text.append(" ".join(paragraph))
    return "\n\n".join(text)


def _story(rng: random.Random, split: str) -> Iterator[str]:
    fixed = _cast(rng, split)
    yield _sentence(OPENINGS, rng, fixed, split)
    for step in _pick(rng, PLOTS):
        yield _sentence(step, rng, fixed, split)
        if rng.random() < _ASIDE:
            yield _sentence(ASIDES, rng, fixed, split)


def _cast(rng: random.Random, split: str) -> dict[str, str]:
    """The people, the places and the things of one story, by slot."""
    women, men = lexicon.WOMEN[split].split(), lexicon.MEN[split].split()
    female = rng.random() < 0.5
    hero = _pick(rng, women if female else men)
    pal = hero
    while pal == hero:
        pal = _pick(rng, women + men)
    pronouns = ("she", "her", "her") if female else ("he", "him", "his")
    fixed = dict(zip(("he", "him", "his"), pronouns, strict=True))
    fixed |= {"hero": hero, "pal": pal, "town": town(rng, split), "town2": town(rng, split)}
    lists = _lists()
    for slot in ("tool", "beast", "spot", "job", "job2", "visitor", "build", "material", "colour"):
        word = _pick(rng, lists[slot.rstrip("2")])
        fixed[slot], fixed[f"a {slot}"] = word, _with_article(word)
    return fixed


def town(rng: random.Random, split: str) -> str:
    """The name of a made-up town of `split`."""
    return _pick(rng, lexicon.TOWN_HEADS[split].split()) + _pick(rng, _lists()["tail"])


def _sentence(step: Step, rng: random.Random, fixed: dict[str, str], split: str) -> str:
    """Fill one of the templates; draw again while the sentence belongs to another split.

    This ends because every step has a template with a name in it.
    """
    low, high = _SHARES[split]
    lists = _lists()
    while True:
        literals, slots, named = _compile(_pick(rng, step))
        parts = [literals[0]]
        for slot, literal in zip(slots, literals[1:], strict=True):
            parts.append(fixed.get(slot) or _pick(rng, lists[slot.rstrip("23")]))
            parts.append(literal)
        sentence = "".join(parts)
        first = 1 if sentence[0] == '"' else 0
        sentence = sentence[:first] + sentence[first].upper() + sentence[first + 1 :]
        if named or low <= zlib.crc32(sentence.encode()) % 10 < high:
            return sentence


@cache
def _compile(template: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    parts = _SLOT.split(template)
    slots = tuple(parts[1::2])
    return tuple(parts[::2]), slots, not _NAMED.isdisjoint(slots)


@cache
def _lists() -> dict[str, tuple[str, ...]]:
    """Word list of every slot, with and without article."""
    things = lexicon.words(lexicon.TOOLS)
    lists = {
        "noun": things + lexicon.words(lexicon.FURNITURE),
        "tool": things,
        "beast": lexicon.words(lexicon.ANIMALS),
        "animal": lexicon.words(lexicon.ANIMALS),
        "spot": lexicon.words(lexicon.SPOTS),
        "job": lexicon.words(lexicon.JOBS),
        "visitor": lexicon.words(lexicon.VISITORS),
        "build": lexicon.words(lexicon.BUILDS),
        "material": lexicon.words(lexicon.MATERIALS),
        "colour": lexicon.words(lexicon.COLOURS),
        "food": lexicon.words(lexicon.FOODS),
        "adj": lexicon.words(lexicon.ADJECTIVES),
        "mood": lexicon.words(lexicon.MOODS),
        "manner": lexicon.words(lexicon.MANNERS),
        "time": lexicon.words(lexicon.TIMES),
        "weather": lexicon.words(lexicon.WEATHERS),
        "reason": lexicon.words(lexicon.REASONS),
        "virtue": lexicon.words(lexicon.VIRTUES),
        "subject": lexicon.words(lexicon.SUBJECTS),
        "room": lexicon.words(lexicon.ROOMS),
        "furniture": lexicon.words(lexicon.FURNITURE),
        "deed": lexicon.words(lexicon.DEEDS),
        "past": lexicon.words(lexicon.PASTS),
        "tail": lexicon.words(lexicon.TOWN_TAILS),
    }
    return lists | {f"a {slot}": tuple(map(_with_article, lists[slot])) for slot in lists}


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]
