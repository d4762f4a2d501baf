"""RULER's generated tasks (`kvp.data.ruler`) for collecting and evaluating."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from kvp.data import ruler
from kvp.data.encode import encode
from kvp.data.sample import Sample, Source
from kvp.data.string_match import string_match
from kvp.data.task import TaskSettings, blank_sample
from kvp.data.text_files import read_text
from kvp.errors import UsageError

_TIGHT = 0.8
"""Share of the length that the smallest prompt may take before all prompts are tried first."""
_ATTEMPTS = 64
"""Needles that are drawn for a prompt before its length is refused."""


@dataclass(frozen=True)
class RulerTask:
    """One of RULER's tasks; the metric is RULER's string match."""

    name: str

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples with as much haystack as fits; a length too small for any of them is refused."""
        essays = None if settings.essays is None else read_text(settings.essays, "essays")
        maker = _Maker(self.name, settings, tokenizer, essays)
        source = Source(size=settings.count, make=maker.make)
        if settings.count and maker.tight():
            list(source)  # prompts this short are made at once
        return source

    def score(self, sample: Sample, answer: str) -> float:
        """Share of the references that the answer contains."""
        return string_match(answer, sample)


@dataclass(frozen=True)
class _Maker:
    """Makes the samples of one task."""

    task: str
    settings: TaskSettings
    tokenizer: PreTrainedTokenizerBase
    essays: str | None

    def make(self, index: int) -> Sample:
        """The sample of an index; other needles are drawn while these are too long."""
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._fitted(index, attempt)
            except UsageError as error:
                if not str(error).startswith("--length"):
                    raise
        return self._fitted(index, _ATTEMPTS - 1)

    def tight(self) -> bool:
        """Whether the smallest prompt takes most of the length."""
        try:
            self._generate(0, 0, round(_TIGHT * self.settings.length))
        except UsageError as error:
            if not str(error).startswith("--length"):
                raise
            return True
        return False

    def _fitted(self, index: int, attempt: int) -> Sample:
        limit = self.settings.length
        while True:
            sample = self._generate(index, attempt, limit)
            # Pieces tokenised apart may have a token more than the whole.
            excess = encode(sample, self.tokenizer).prompt_length - self.settings.length
            if excess <= 0:
                return sample
            limit -= excess

    def _generate(self, index: int, attempt: int, limit: int) -> Sample:
        return ruler.generate(
            self.task,
            count_tokens=self._count_tokens,
            length=self.settings.length,
            limit=limit,
            seed=self.settings.seed,
            index=index,
            split=self.settings.split,
            essays=self.essays,
            attempt=attempt,
        )

    def _count_tokens(self, text: str) -> int:
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
