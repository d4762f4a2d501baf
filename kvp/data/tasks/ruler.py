"""RULER's generated tasks (`kvp.data.ruler`) for collecting and evaluating."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from kvp.data.encode import encode
from kvp.data.metrics import ScoredByMetric
from kvp.data.ruler import generate
from kvp.data.task import NoPromptError, Sample, Source, TaskSettings, blank_sample
from kvp.data.text_files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ATTEMPTS = 64
"""Needles that are drawn for a prompt before its length is refused."""


@dataclass(frozen=True)
class RulerTask(ScoredByMetric):
    """One of RULER's tasks; the metric is RULER's string match."""

    name: str

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples with as much haystack as fits; other needles are drawn while these do not."""
        essays = None if settings.essays is None else read_text(settings.essays, "essays")
        fitting = Fitting(self.name, settings, tokenizer)

        def drawn(index: int, attempt: int) -> Sample:
            return fitting.fitted(
                lambda limit: generate(
                    self.name,
                    count_tokens=fitting.count_tokens,
                    length=settings.length,
                    limit=limit,
                    seed=settings.seed,
                    index=index,
                    split=settings.split,
                    essays=essays,
                    attempt=attempt,
                )
            )

        @lru_cache(maxsize=1)
        def make(index: int) -> Sample:
            for attempt in range(_ATTEMPTS - 1):
                try:
                    return drawn(index, attempt)
                except NoPromptError:
                    continue
            return drawn(index, _ATTEMPTS - 1)

        if settings.count:
            make(0)  # a length too small shows now
        return Source(size=settings.count, make=make)


@dataclass(frozen=True)
class Fitting:
    """Fits one task's prompts to the tokens that a chat template leaves of `--length`."""

    task: str
    settings: TaskSettings
    tokenizer: PreTrainedTokenizerBase

    def fitted(self, make: Callable[[int], Sample]) -> Sample:
        """What `make` makes for the largest limit whose encoded prompt is within `--length`.

        `make` takes the most tokens that `count_tokens` may return for the prompt, and raises
        NoPromptError where it has no prompt so small.
        """
        limit = self.settings.length
        while True:
            sample = make(limit)
            # Pieces tokenised apart may have a token more than the whole.
            excess = encode(sample, self.tokenizer).prompt_length - self.settings.length
            if excess <= 0:
                return sample
            limit -= excess

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt's text, chat template included."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return self._around + len(ids)

    @cached_property
    def _around(self) -> int:
        """Tokens of the chat template."""
        # The question is not empty: running text would get no chat template. Some tokenizers have
        # no token for a space.
        question = " " if self.tokenizer.encode(" ", add_special_tokens=False) else "a"
        empty = replace(blank_sample(self.settings, self.task, ""), question=question)
        return encode(empty, self.tokenizer).prompt_length - 1
