"""What RULER hides in a text: words, numbers, uuids and names, drawn from disjoint splits.

A string belongs to exactly one split by a stable hash of its own characters, so a key or value of
the test split can never occur in training, whoever generates it and in whatever order. Templates
and prompts are in `kvp.data.ruler`; haystack text is split by `kvp.data.synthetic.prose`.
"""

from __future__ import annotations

import hashlib
import random
import string
import uuid
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Literal

from kvp.errors import UsageError

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def split_of(text: str) -> Split:
    """The split that owns `text`: train 80 %, validation 10 %, test 10 %, by a BLAKE2 hash."""
    bucket = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def generated_split(split: str) -> Split:
    """The split of generated prompts; UsageError for one that they cannot be of, such as `all`."""
    for known in SPLITS:
        if known == split:
            return known
    raise UsageError(f"--split {split}: generated prompts belong to one of {', '.join(SPLITS)}")


@cache
def words(kind: Literal["noun", "adjective", "verb"]) -> tuple[str, ...]:
    """The sorted word list of wonderwords for `kind`."""
    lines = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.strip() for line in lines.splitlines() if line.strip()}))


@cache
def word_pool(split: Split) -> tuple[str, ...]:
    """All single words (noun, adjective or verb) owned by `split`, sorted."""
    every = {word for kind in ("noun", "adjective", "verb") for word in words(kind)}
    return tuple(sorted(word for word in every if split_of(word) == split))


def distinct(draw: Callable[[], str], count: int) -> list[str]:
    """The first so many different strings that are drawn."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def draw_key(rng: random.Random, split: Split) -> str:
    """An `adjective-noun` key owned by `split`."""
    while True:
        key = f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
        if split_of(key) == split:
            return key


def draw_number(rng: random.Random, split: Split, digits: int = 7) -> str:
    """A number of exactly `digits` digits owned by `split`."""
    while True:
        number = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        if split_of(number) == split:
            return number


def draw_uuid(rng: random.Random, split: Split) -> str:
    """A version-4 uuid owned by `split`."""
    while True:
        value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if split_of(value) == split:
            return value


def draw_name(
    rng: random.Random, split: Split, letters: int, alphabet: str = string.ascii_uppercase
) -> str:
    """A name of `letters` letters of `alphabet` owned by `split`."""
    while True:
        name = "".join(rng.choices(alphabet, k=letters))
        if split_of(name) == split:
            return name
