"""Text from a seed: keys, numbers, names and prose, each owned by one split.

A string belongs to exactly one split by a stable hash of its own characters, so a key or value of
the test split can never occur in training, whoever generates it and in whatever order.

Prose is little stories, written by templates over word lists of our own (`lexicon.json`). Plain
enough for a small model to learn, varied enough that it cannot be memorised. It has no digits and
no hyphens, so it never collides with RULER's needles, and no word that matters in its templates
("magic", "variable", "chain"). Names of people and towns are split-specific, common words shared.

A slot of a template, in braces, is fixed for the whole story (people, towns, what the story is
about) or drawn afresh from the word list of its name; `{a x}` comes with its article. Every step of
a plot is a list of alternatives, at least one of them with a name of a person or town.
"""

import json
import random
import re
import string
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import cycle, islice
from typing import Literal, TypeVar

from kvp.data.splits import SHARES, Split, split_of
from kvp.errors import UsageError

T = TypeVar("T")
_SLOT = re.compile(r"\{([a-z0-9 ]+)\}")
_NAMED = frozenset({"hero", "pal", "town", "town2"})
_PROSE_SHARES = {"train": (0, 6), "validation": (6, 8), "test": (8, 10)}
LEXICON = json.loads((files("kvp.data") / "synthetic/lexicon.json").read_text(encoding="utf-8"))
"""`openings`, `asides` and `plots` of stories; names of `women` and `men`, and `town_heads`, with
which names of towns begin, by split."""
LISTS: Mapping[str, list[str]] = LEXICON["lists"]
"""Words by what they are, those of prose by their slots."""


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


def draw_distinct(draw: Callable[[], str], count: int) -> list[str]:
    """The first so many different strings that are drawn."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw()] = None
    return list(drawn)


def keep_drawn(series: Iterator[str]) -> Callable[[int], list[str]]:
    """The first so many of an endless series, which are kept for the next, larger request."""
    drawn: list[str] = []

    def take_first(count: int) -> list[str]:
        drawn.extend(islice(series, max(0, count - len(drawn))))
        return drawn[:count]

    return take_first


def draw_own(split: Split, draw: Callable[[], str]) -> str:
    """The first string drawn that belongs to `split`."""
    return next(text for text in iter(draw, None) if split_of(text) == split)


def draw_key(rng: random.Random, split: Split) -> str:
    """An `adjective-noun` key owned by `split`."""
    return draw_own(split, lambda: f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}")


def draw_number(rng: random.Random, split: Split, digits: int = 7) -> str:
    """A number of exactly `digits` digits owned by `split`."""
    return draw_own(split, lambda: str(rng.randint(10 ** (digits - 1), 10**digits - 1)))


def draw_uuid(rng: random.Random, split: Split) -> str:
    """A version-4 uuid owned by `split`."""
    return draw_own(split, lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))


def draw_name(
    rng: random.Random, split: Split, letters: int, alphabet: str = string.ascii_uppercase
) -> str:
    """A name of `letters` letters of `alphabet` owned by `split`."""
    return draw_own(split, lambda: "".join(rng.choices(alphabet, k=letters)))


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
    yield _sentence(LEXICON["openings"], rng, fixed, split)
    for step in _pick(rng, LEXICON["plots"]):
        yield _sentence(step, rng, fixed, split)
        if rng.random() < 0.45:
            yield _sentence(LEXICON["asides"], rng, fixed, split)


def _cast(rng: random.Random, split: str) -> dict[str, str]:
    """The people, the places and the things of one story, by slot."""
    women, men = LEXICON["women"][split], LEXICON["men"][split]
    female = rng.random() < 0.5
    hero = _pick(rng, women if female else men)
    pal = hero
    while pal == hero:
        pal = _pick(rng, women + men)
    pronouns = ("she", "her", "her") if female else ("he", "him", "his")
    fixed = dict(zip(("he", "him", "his"), pronouns, strict=True))
    fixed |= {"hero": hero, "pal": pal}
    fixed |= {slot: draw_town(rng, split) for slot in ("town", "town2")}
    lists = _lists()
    for slot in ("tool", "beast", "spot", "job", "job2", "visitor", "build", "material", "colour"):
        word = _pick(rng, lists[slot.rstrip("2")])
        fixed[slot], fixed[f"a {slot}"] = word, _with_article(word)
    return fixed


def list_people(split: str) -> list[str]:
    """Names of people of a split."""
    return [*LEXICON["women"][split], *LEXICON["men"][split]]


def draw_town(rng: random.Random, split: str) -> str:
    """The name of a made-up town of `split`."""
    head: str = _pick(rng, LEXICON["town_heads"][split])
    return head + _pick(rng, _lists()["tail"])


def _sentence(step: Sequence[str], rng: random.Random, fixed: dict[str, str], split: str) -> str:
    """Fill a template, again while another split has the sentence; each step has names to draw."""
    low, high = _PROSE_SHARES[split]
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
def _lists() -> dict[str, list[str]]:
    """Word list of every slot, with and without article."""
    lists = {**LISTS, "noun": LISTS["tool"] + LISTS["furniture"], "beast": LISTS["animal"]}
    return lists | {f"a {slot}": [*map(_with_article, lists[slot])] for slot in lists}


def _with_article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


@dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """The randomness and the text one sample is made from."""

    name: str
    """Identifies the sample: task, split, seed, index."""
    split: Split
    length: int
    """Tokens the prompt may have: an upper bound of the words ever needed."""
    essays: str | None = None
    """Real running text, or None for the generated prose."""

    def rng(self, part: str) -> random.Random:
        """A fresh generator for one part of the sample, independent of the other parts."""
        return random.Random(f"{self.name}/{part}")

    def essay(self) -> list[str]:
        """Running text of this split as words, at least `length` of them.

        Given essays are shared out by position (the first 80 % of the words train, then 10 % and
        10 %) and read from a random word on, round their share's end.
        """
        if self.essays is None:
            return prose(self.rng("essay").getrandbits(32), self.length, self.split).split()
        words = _share(self.essays, self.split)
        if not words:
            raise UsageError(f"--essays: no words left for the {self.split} split")
        start = self.rng("essay").randrange(len(words))
        return list(islice(cycle(words), start, start + self.length))


@lru_cache(maxsize=4)
def _share(essays: str, split: Split) -> list[str]:
    words = essays.split()
    low, high = (round(share * len(words)) for share in SHARES[split])
    return words[low:high]
