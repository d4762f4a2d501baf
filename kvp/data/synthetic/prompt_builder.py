"""A RULER prompt before it is fitted to a length: its parts, and where its haystack comes from."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvp.data.synthetic.needles import Split
from kvp.data.text_files import SHARES
from kvp.errors import UsageError

CountTokens = Callable[[str], int]
"""Tokens of a text."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""One line of RULER's repeated haystack."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, kw_only=True)
class RulerPrompt:
    """A prompt with its answers, as `kvp.data.task.Sample` has them."""

    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    reply: str
    max_new_tokens: int
    """RULER's number of tokens to generate."""
    metric: str = "all"
    """RULER's metric: `all` answers must be found, or any of them (`part`)."""

    @property
    def text(self) -> str:
        """Everything given to the model, without a chat template."""
        return self.context + self.question + self.answer_prefix


@dataclass(frozen=True, kw_only=True)
class PromptMaker:
    """Makes one sample's prompt with any amount of haystack, from `smallest` on."""

    make: Callable[[int], RulerPrompt]
    """From an amount to the prompt; the same needles and answers for every amount."""
    smallest: int
    """Least amount of haystack: lines, words or entries, as the task counts them."""
    largest: int | None = None
    """Most haystack there is; None where it never ends."""


@dataclass(frozen=True, kw_only=True)
class SampleInputs:
    """The randomness and the text one sample is made from."""

    name: str
    """Identifies the sample: task, split, seed, index."""
    split: Split
    """Whose keys, values and text to use."""
    length: int
    """Tokens the prompt may have: an upper bound of the words ever needed."""
    essays: str | None
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
            from kvp.data.synthetic.prose import prose

            return prose(self.rng("essay").getrandbits(32), self.length, self.split).split()
        words = _share(self.essays, self.split)
        if not words:
            raise UsageError(f"--essays: no words left for the {self.split} split")
        start = self.rng("essay").randrange(len(words))
        drawn = words[start : start + self.length]
        while len(drawn) < self.length:
            drawn += words[: self.length - len(drawn)]
        return drawn


@lru_cache(maxsize=4)
def _share(essays: str, split: Split) -> list[str]:
    """The words of `essays` that belong to `split`."""
    words = essays.split()
    low, high = (round(share * len(words)) for share in SHARES[split])
    return words[low:high]


def sentences(text: str) -> list[str]:
    """`text` cut after each full stop, question mark or exclamation mark before a space."""
    return _SENTENCE_END.split(text) if text else []
