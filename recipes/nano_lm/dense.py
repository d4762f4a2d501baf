"""Training sequences with many supervised look-ups each: loops and dense key-value recall.

Every function returns token ids and one loss weight per token (0 = given, not predicted). The
exact RULER prompts are in `prompts.py`; these sequences only teach the skills those need.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvp.data.synthetic.text import Split, draw_key, draw_name, draw_number, draw_uuid, words
from kvp.data.tasks.ruler import NEEDLE, wording

Sequence_ = tuple[list[int], list[float]]
Haystack = Callable[[random.Random, int], list[int]]
"""(rng, tokens) -> that many ids of running text."""

FIRST_WEIGHT = 3.0
"""Loss weight of a value's first token, where the look-up is decided."""
TEXT_WEIGHT = 0.3
"""Loss weight of running text."""
TRAIN: Split = "train"


@dataclass
class Encoder:
    """Turns text into ids with loss weights."""

    tokenizer: Tokenizer
    stops: frozenset[int] = field(init=False)
    """Tokens after which a needle may stand in a text."""

    def __post_init__(self) -> None:
        self.stops = frozenset(i for mark in ".!?" for i in self.ids(mark))

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens written in it recognised."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def given(self, text: str) -> Sequence_:
        """`text` as a prompt: nothing supervised."""
        ids = self.ids(text)
        return ids, [0.0] * len(ids)

    def answer(self, values: Sequence[str], end: str = ".<|im_end|>") -> Sequence_:
        """` V1, V2` and `end`, all supervised, the first token of each value most."""
        parts = []
        for number, value in enumerate(values):
            ids = self.ids(f" {value}")
            parts.append((ids, [FIRST_WEIGHT] + [1.0] * (len(ids) - 1)))
            ids = self.ids("," if number + 1 < len(values) else end)
            parts.append((ids, [1.0] * len(ids)))
        return join(parts)

    def text(self, text: str) -> Sequence_:
        """`text` supervised throughout as running text."""
        return running(self.ids(text))


def running(ids: Sequence[int]) -> Sequence_:
    """Running text, supervised with `TEXT_WEIGHT`."""
    return list(ids), [TEXT_WEIGHT] * len(ids)


def join(parts: Sequence[Sequence_]) -> Sequence_:
    """Concatenates parts of one sequence."""
    return [i for ids, _ in parts for i in ids], [w for _, ws in parts for w in ws]


def loop(
    rng: random.Random, length: int, text_ids: NDArray[np.uint16], vocab_size: int
) -> Sequence_:
    """A span repeated up to `length` tokens, supervised from its second turn on."""
    period = rng.randint(4, max(4, min(48, length // 3)))
    if rng.random() < 0.6:
        span = [rng.randrange(3, vocab_size) for _ in range(period)]
    else:
        start = rng.randrange(len(text_ids) - period)
        span = [int(i) for i in text_ids[start : start + period]]
    ids = (span * (length // period + 1))[:length]
    return ids, [0.0] * period + [1.0] * (length - period)


LINKS = (
    " is:", " is", " text is", " provided text is", " in the provided text is",
    " mentioned in the provided text is",
)  # fmt: skip
"""What may stand between a key and its value where it is asked, up to the end of RULER's prefix."""


def pairs(rng: random.Random, length: int, encoder: Encoder) -> Sequence_:
    """Bare keys with values, ` KEY is: VALUE.`, and all of them asked in another order.

    The question is the key and one of `LINKS`, the same throughout the sequence.
    """
    link = rng.choice(LINKS)
    cost = 18 + len(encoder.ids(link)) - 1
    told = [(key, draw_number(rng, TRAIN)) for key in related_keys(rng, max(2, length // cost))]
    return _told_and_asked(rng, length, encoder, told, link)


def uuid_pairs(rng: random.Random, length: int, encoder: Encoder) -> Sequence_:
    """As `pairs`, with uuids as keys, as values or as both."""
    link = rng.choice(LINKS)
    long_keys, long_values = rng.choice([(True, False), (True, False), (False, True), (True, True)])
    cost = 16 + len(encoder.ids(link)) + 46 * long_keys + 46 * long_values
    told = [
        (
            draw_uuid(rng, TRAIN) if long_keys else draw_key(rng, TRAIN),
            draw_uuid(rng, TRAIN) if long_values else draw_number(rng, TRAIN),
        )
        for _ in range(max(2, length // cost))
    ]
    return _told_and_asked(rng, length, encoder, told, link)


def _told_and_asked(
    rng: random.Random, length: int, encoder: Encoder, told: list[tuple[str, str]], link: str
) -> Sequence_:
    """Bare keys with values, then every key with `link` and its value, in another order."""
    parts = [encoder.given(f" {key} is: {value}.") for key, value in told]
    rng.shuffle(told)
    for key, value in told:
        parts += [encoder.given(f" {key}{link}"), encoder.answer([value], ".")]
    return cut(join(parts), length)


def series(rng: random.Random, length: int, encoder: Encoder, haystack: Haystack) -> Sequence_:
    """One key with two to four values, asked in the order of the text; again, up to `length`.

    In half of the sequences bare pairs, in the others RULER's needles, question and prefix with
    running text between the needles.
    """
    link = rng.choice(LINKS[1:]).replace(" is", " are")
    bare = rng.random() < 0.5
    parts: list[Sequence_] = []
    made = 0
    while made == 0 or (bare and made < length - 60):
        key = draw_key(rng, TRAIN)
        values = [draw_number(rng, TRAIN) for _ in range(rng.choice([2, 3, 4, 4]))]
        if bare:
            told = [encoder.given(f" {key} is: {value}.") for value in values]
            asked = f" {key}{link}"
        else:
            needles = [NEEDLE.format(kind="numbers", key=key, value=value) for value in values]
            _, question, prefix = wording("numbers", [key], several=True)
            asked = f"\n{question}<|im_end|>\n<|im_start|>assistant\n{prefix}"
            spare = length - 24 * len(values) - len(encoder.ids(asked)) - 8
            text = haystack(rng, spare) if spare > 8 else []
            told = [encoder.given("<|im_start|>user\n"), woven(rng, encoder, text, needles)]
        parts += [*told, encoder.given(asked)]
        parts.append(encoder.answer(values, "." if bare else ".<|im_end|>"))
        made = sum(len(ids) for ids, _ in parts)
    return cut(join(parts), length)


def groups(rng: random.Random, length: int, encoder: Encoder) -> Sequence_:
    """Bare keys with values as in `pairs`, two to four values asked at once.

    Either keys have several values, told in the order of the text, or several keys are asked.
    """
    link = rng.choice(LINKS[1:]).replace(" is", " are")
    cost = 16 + len(encoder.ids(link)) // 2
    one_key = rng.random() < 0.5
    keys = related_keys(rng, max(2, length // cost))
    told, asked = [], []
    while keys:
        count = rng.randint(2, 4)
        some, keys = keys[:count], keys[count:]
        queries = some[:1] if one_key else some
        values = [draw_number(rng, TRAIN) for _ in some]
        asked.append((queries, values))
        told.append(list(zip(queries * len(some) if one_key else queries, values, strict=True)))
    where = [number for number, some in enumerate(told) for _ in some]
    rng.shuffle(where)
    parts = []
    for number in where:
        key, value = told[number].pop(0)
        parts.append(encoder.given(f" {key} is: {value}."))
    rng.shuffle(asked)
    for queries, values in asked:
        parts += [encoder.given(f" {listed(queries)}{link}"), encoder.answer(values, ".")]
    return cut(join(parts), length)


ASSIGNED = (
    " {value}, they are: ", " are assigned the value {value}, they are: ",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: ",
)  # fmt: skip
"""How a chain of variables is asked, up to RULER's whole prefix."""


def chains(rng: random.Random, length: int, encoder: Encoder) -> Sequence_:
    """Chains of one to five variables as RULER's variable tracking assigns them, all asked.

    The lines of the chains are mixed, those of a chain in order. The question is one of `ASSIGNED`,
    the same throughout the sequence.
    """
    asked = rng.choice(ASSIGNED)
    cost = 17 + (len(encoder.ids(asked)) + 4) // 3
    left = max(2, length // cost)
    told: list[tuple[str, list[str]]] = []
    while left > 0:
        names = [draw_name(rng, TRAIN, 5) for _ in range(min(left, rng.randint(1, 5)))]
        told.append((draw_number(rng, TRAIN, digits=5), names))
        left -= len(names)
    order = [number for number, (_, names) in enumerate(told) for _ in names]
    rng.shuffle(order)
    done = [0] * len(told)
    parts = []
    for number in order:
        value, names = told[number]
        at = done[number]
        right = f"VAR {names[at - 1]} " if at else value
        parts.append(encoder.given(f"VAR {names[at]} = {right}\n"))
        done[number] += 1
    rng.shuffle(told)
    for value, names in told:
        ids = encoder.ids(" ".join(names) + "\n")
        weights: list[float] = []
        for token in ids:
            opens = not weights or encoder.tokenizer.decode([token]).startswith(" ")
            weights.append(FIRST_WEIGHT if opens else 1.0)
        parts += [encoder.given(asked.format(value=value, count=len(names))), (ids, weights)]
    return cut(join(parts), length)


def related_keys(rng: random.Random, count: int) -> list[str]:
    """Distinct training keys; in a quarter of the draws some share an adjective or a noun."""
    keys: dict[str, None] = {}
    similar = rng.random() < 0.25
    while len(keys) < count:
        key = draw_key(rng, TRAIN)
        if similar and keys and rng.random() < 0.5:
            adjective, noun = rng.choice(list(keys)).split("-", 1)
            other = rng.choice(words("adjective")), rng.choice(words("noun"))
            key = rng.choice([f"{adjective}-{other[1]}", f"{other[0]}-{noun}"])
        keys[key] = None
    return list(keys)


def listed(queries: Sequence[str]) -> str:
    """Keys as RULER lists them in a question."""
    return ", ".join(queries[:-1]) + ", and " + queries[-1] if len(queries) > 1 else queries[0]


@dataclass(frozen=True, kw_only=True)
class Recall:
    """What a sequence of dense recall is made of, each a share of the sequences."""

    brief: float
    """Ask nothing, repeat RULER's answer prefix for every key."""
    shared: float = 0.3
    """Have two to four times as many values as keys, told in the text's order."""
    uuids: float = 0.12
    """Have uuids as values; half of them have uuids as keys, too."""
    bare: float = 0.4
    """Consist of needles alone; the others have running text between them."""


def recall(
    rng: random.Random, length: int, encoder: Encoder, haystack: Haystack, shares: Recall
) -> Sequence_:
    """Needles (some keys with several values), then everything asked, up to `length` tokens.

    Keys are asked as RULER does, one or several at a time, values of a key told in the order of the
    text.
    """
    brief = rng.random() < shares.brief
    long = rng.random() < shares.uuids
    kind, draw = ("uuids", draw_uuid) if long else ("numbers", draw_number)
    long_keys = long and rng.random() < 0.5
    cost = 36 + 16 * (not brief) + 48 * long + 48 * long_keys
    room = length if rng.random() < shares.bare else round(length * rng.uniform(0.3, 0.9))
    total = max(1, round(room / cost * rng.uniform(0.75, 1.0)))
    keys = [draw_uuid(rng, TRAIN) for _ in range(total)] if long_keys else related_keys(rng, total)
    if rng.random() < shares.shared:
        keys = keys[: max(1, total // rng.randint(2, 4))]
    told = [(key, draw(rng, TRAIN)) for key in keys]
    told += [(rng.choice(keys), draw(rng, TRAIN)) for _ in range(total - len(keys))]
    rng.shuffle(told)
    needles = [NEEDLE.format(kind=kind, key=key, value=value) for key, value in told]
    spare = length - cost * total - 16
    if room < length and spare > 16:
        context = woven(rng, encoder, haystack(rng, spare), needles)
    else:
        separator = "\n" if rng.random() < 0.6 else " "
        context = encoder.given(separator.join(needles))
    parts = [encoder.given("<|im_start|>user\n"), context]
    queue = list(keys)
    rng.shuffle(queue)
    first = True
    while queue:
        at_once = rng.randint(2, 4) if rng.random() < 0.4 else 1
        asked = [queue.pop() for _ in range(min(len(queue), at_once))]
        answers = [value for query in asked for key, value in told if key == query]
        _, question, prefix = wording(kind, asked, several=len(answers) > 1)
        if brief:
            if first:
                parts.append(encoder.given("<|im_end|>\n<|im_start|>assistant\n"))
            parts += [encoder.given(prefix), encoder.answer(answers, ".")]
        else:
            opened = "" if first else "\n<|im_start|>user"
            turn = f"{opened}\n{question}<|im_end|>\n<|im_start|>assistant\n{prefix}"
            parts += [encoder.given(turn), encoder.answer(answers)]
        first = False
    return cut(join(parts), length)


def woven(
    rng: random.Random, encoder: Encoder, text: list[int], needles: Sequence[str]
) -> Sequence_:
    """`text` as running text with the needles in order, each behind the end of a sentence."""
    ends = [at + 1 for at, token in enumerate(text) if token in encoder.stops] or [len(text)]
    places = sorted(rng.choice(ends) for _ in needles)
    parts, done = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [running(text[done:place]), encoder.given(f" {needle}")]
        done = place
    return join([*parts, running(text[done:])])


def cut(sequence: Sequence_, length: int) -> Sequence_:
    """The first `length` tokens."""
    return sequence[0][:length], sequence[1][:length]
