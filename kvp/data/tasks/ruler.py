"""RULER's generated tasks (`kvp.data.ruler`) for collecting and evaluating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvp.data import ruler
from kvp.data.answer_metrics import score_answer
from kvp.data.sample import Sample, Source
from kvp.data.task import NoPromptError, TaskSettings
from kvp.data.tasks.fitting import Fitting
from kvp.data.text_files import read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        maker = _Maker(Fitting(self.name, settings, tokenizer), essays)
        source = Source(size=settings.count, make=maker.make)
        if settings.count and maker.tight():
            list(source)  # prompts this short are made at once
        return source

    def score(self, sample: Sample, answer: str) -> float:
        """Share of the references that the answer contains."""
        return score_answer(answer, sample.metric, sample.references)


@dataclass(frozen=True)
class _Maker:
    """Makes the samples of one task."""

    fitting: Fitting
    essays: str | None

    @property
    def settings(self) -> TaskSettings:
        """The settings of the task."""
        return self.fitting.settings

    def make(self, index: int) -> Sample:
        """The sample of an index; other needles are drawn while these are too long."""
        for attempt in range(_ATTEMPTS - 1):
            try:
                return self._fitted(index, attempt)
            except NoPromptError:
                continue
        return self._fitted(index, _ATTEMPTS - 1)

    def tight(self) -> bool:
        """Whether the smallest prompt takes most of the length."""
        maker = ruler.prompt_maker(
            self.fitting.task,
            f"{self.fitting.task}/{self.settings.split}/{self.settings.seed}/0",
            count_tokens=self.fitting.count_tokens,
            length=self.settings.length,
            split=self.settings.split,
            essays=self.essays,
        )
        smallest = self.fitting.count_tokens(maker.make(maker.smallest).text)
        return smallest > round(_TIGHT * self.settings.length)

    def _fitted(self, index: int, attempt: int) -> Sample:
        def make(limit: int) -> Sample:
            return ruler.generate(
                self.fitting.task,
                count_tokens=self.fitting.count_tokens,
                length=self.settings.length,
                limit=limit,
                seed=self.settings.seed,
                index=index,
                split=self.settings.split,
                essays=self.essays,
                attempt=attempt,
            )

        return self.fitting.fitted(make)
