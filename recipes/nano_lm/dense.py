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

from kvp.data.synthetic.needles import draw_key, draw_number, draw_uuid, words
from kvp.data.synthetic.niah import NEEDLE, reply, wording

Sequence_ = tuple[list[int], list[float]]
Haystack = Callable[[random.Random, int], str]
"""(rng, words) -> that many words of running text."""

FIRST_DIGIT_WEIGHT = 3.0


@dataclass
class Encoder:
    """Turns text into ids with loss weights; digits that start a number weigh more."""

    tokenizer: Tokenizer
    digits: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.digits = frozenset(self.ids("0123456789"))

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens written in it recognised."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def given(self, text: str) -> Sequence_:
        """`text` as a prompt: nothing supervised."""
        ids = self.ids(text)
        return ids, [0.0] * len(ids)

    def answer(self, text: str, weight: float = 1.0) -> Sequence_:
        """`text` supervised; the first digit of each number weighs `FIRST_DIGIT_WEIGHT`."""
        ids = self.ids(text)
        previous = [-1, *ids[:-1]]
        weights = [
            FIRST_DIGIT_WEIGHT if now in self.digits and before not in self.digits else weight
            for now, before in zip(ids, previous, strict=True)
        ]
        return ids, weights


def join(parts: Sequence[Sequence_]) -> Sequence_:
    """Concatenates parts of one sequence."""
    return [i for ids, _ in parts for i in ids], [w for _, ws in parts for w in ws]


def loop(
    rng: random.Random, length: int, text_ids: NDArray[np.uint16], vocab_size: int
) -> Sequence_:
    """A span repeated up to `length` tokens, supervised from its second turn on."""
    period = rng.randint(4, max(4, min(32, length // 3)))
    if rng.random() < 0.5:
        span = [rng.randrange(3, vocab_size) for _ in range(period)]
    else:
        start = rng.randrange(len(text_ids) - period)
        span = [int(i) for i in text_ids[start : start + period]]
    ids = (span * (length // period + 1))[:length]
    return ids, [0.0] * period + [1.0] * (length - period)


def related_keys(rng: random.Random, count: int) -> list[str]:
    """Distinct training keys; in a quarter of the draws some share an adjective or a noun."""
    keys: dict[str, None] = {}
    similar = rng.random() < 0.25
    while len(keys) < count:
        key = draw_key(rng, "train")
        if similar and keys and rng.random() < 0.5:
            adjective, noun = rng.choice(list(keys)).split("-", 1)
            other = rng.choice(words("adjective")), rng.choice(words("noun"))
            key = rng.choice([f"{adjective}-{other[1]}", f"{other[0]}-{noun}"])
        keys[key] = None
    return list(keys)


def recall(
    rng: random.Random,
    length: int,
    encoder: Encoder,
    haystack: Haystack,
    *,
    brief: float,
    shared: float = 0.35,
    uuids: float = 0.0,
) -> Sequence_:
    """Needles (some keys with several values), then questions for them, up to `length` tokens.

    A share `brief` of the sequences asks nothing and lists every key in shuffled order; the others
    ask as RULER does, for one key or several, in as many turns as fit. In a share `shared` there
    are two to four times as many values as keys; those of a key are given in ascending order.
    """
    listed = rng.random() < brief
    kind = "uuids" if rng.random() < uuids else "numbers"
    draw = draw_uuid if kind == "uuids" else draw_number
    per_needle = (70 if kind == "uuids" else 40) if listed else (100 if kind == "uuids" else 60)
    maximum = max(1, (length - 30) // per_needle)
    total = rng.randint(max(1, maximum // 2), maximum)
    keys = related_keys(rng, total)
    if rng.random() < shared:
        keys = keys[: max(1, total // rng.randint(2, 4))]
    values: dict[str, list[str]] = {key: [draw(rng, "train")] for key in keys}
    for _ in range(total - len(keys)):
        values[rng.choice(keys)].append(draw(rng, "train"))
    pairs = [(key, value) for key, several in values.items() for value in several]
    rng.shuffle(pairs)
    ordered = {key: sorted(several) for key, several in values.items()}
    lines = [NEEDLE.format(kind=kind, key=key, value=value) for key, value in pairs]
    if rng.random() < 0.5:
        spare = length - 30 - per_needle * total
        for _ in range(max(0, spare // 14)):
            lines.insert(rng.randint(0, len(lines)), haystack(rng, rng.randint(5, 12)))
    separator = "\n" if rng.random() < 0.5 else " "
    parts = [encoder.given(f"<|im_start|>user\n{separator.join(lines)}")]
    queue = list(values)
    rng.shuffle(queue)
    if listed:
        parts.append(encoder.given("<|im_end|>\n<|im_start|>assistant\n"))
        for key in queue:
            for value in ordered[key]:
                parts.append(encoder.given(f" {key}"))
                parts.append(encoder.answer(f" is: {value}"))
                parts.append(encoder.given(","))
        return _truncated(join(parts), length)
    first = True
    while queue:
        several = rng.random() < 0.5
        keys = [queue.pop() for _ in range(min(len(queue), rng.randint(2, 6) if several else 1))]
        answers = [(key, value) for key in keys for value in ordered[key]]
        _, question, prefix = wording(kind, keys, several=len(answers) > 1)
        parts.append(encoder.given(f"\n{question}" if first else f"\n<|im_start|>user\n{question}"))
        parts.append(encoder.given(f"<|im_end|>\n<|im_start|>assistant\n{prefix}"))
        parts.append(encoder.answer(reply(answers) + "<|im_end|>"))
        first = False
    return _truncated(join(parts), length)


def _truncated(sequence: Sequence_, length: int) -> Sequence_:
    return sequence[0][:length], sequence[1][:length]
