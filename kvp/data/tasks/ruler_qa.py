"""RULER's qa_1 and qa_2: questions of SQuAD and HotpotQA about documents (`--squad`, `--hotpotqa`).

Template, document form, order of filling, references and metric are RULER's. Different on purpose:
questions of a split never show a document that answers a question of another split, and every
sample has its own order of documents.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from kvp.data.encode import encode
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.question_sets import READERS, DocumentQuestion, QuestionSet
from kvp.data.ruler import Fitting, fit
from kvp.data.task import NoPromptError, Sample, Source, TaskSettings
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAGS: Mapping[str, str] = {"qa_1": "squad", "qa_2": "hotpotqa"}
"""Flag that names the file of each task."""
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True)
class RulerQaTask(ScoredByMetric):
    """One of RULER's two tasks with real documents; a right answer has any of the spellings."""

    name: str

    @property
    def flag(self) -> str:
        """The flag that names its data, without dashes."""
        return FLAGS[self.name]

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """The questions of the split that fit, in a seeded order, with documents until `length`."""
        data: str | None = getattr(settings, self.flag)
        if data is None:
            raise NoPromptError(
                f"--tasks {self.name} needs --{self.flag} FILE (docs/data.md says what it may "
                "hold)",
                reason=f"it needs --{self.flag} FILE",
            )
        maker = _Maker(Fitting(self.name, settings, tokenizer), READERS[self.flag](data))
        asked = maker.data.of_split(settings.split)
        if not asked:
            raise UsageError(f"--{self.flag} {data}: no question of the {settings.split} split")
        random.Random(f"order/{settings.split}/{settings.seed}").shuffle(asked)
        too_long: list[int] = []
        fitting = list(islice(maker.fitting_ones(asked, too_long), settings.count))
        if settings.count and not fitting:
            raise NoPromptError(
                f"--length {settings.length}: the smallest {self.name} prompt already has "
                f"{min(too_long)} tokens"
            )
        notes = [maker.data.note()]
        if too_long:
            notes.append(
                f"{settings.split} split: left out {len(too_long)} of its questions, whose own "
                f"documents are longer than --length {settings.length}"
            )
        return Source(
            size=len(fitting),
            make=lambda index: maker.make(fitting[index], index),
            notes=tuple(f"--{self.flag} {data}: {note}" for note in notes if note),
        )


@dataclass(frozen=True)
class _Maker:
    """Makes the samples of one task."""

    fitting: Fitting
    data: QuestionSet

    def fitting_ones(
        self, asked: list[DocumentQuestion], too_long: list[int]
    ) -> Iterator[DocumentQuestion]:
        """Questions that fit with their own documents; the tokens of others go to `too_long`."""
        length = self.fitting.settings.length
        around = self.fitting.count_tokens("")
        for question in asked:
            sample = document_prompt(
                "smallest", self.fitting.settings.split, question, self._own(question)
            )
            # A token is a byte at least, so a short text need not be tokenised.
            if around + len(sample.text.encode()) > length:
                tokens = encode(sample, self.fitting.tokenizer).prompt_length
                if tokens > length:
                    too_long.append(tokens)
                    continue
            yield question

    def make(self, question: DocumentQuestion, index: int) -> Sample:
        """The sample of a question with as many documents as fit."""
        settings, task = self.fitting.settings, self.fitting.task
        name = f"{task}/{settings.split}/{settings.seed}/{index}"
        own, filling = self._own(question), self._filling(question, name)

        def prompt(amount: int) -> Sample:
            missing = amount - len(own)
            rounds = -(-missing // len(filling)) if filling else 0
            shown = [*own, *(filling * rounds)[:missing]]
            return document_prompt(name, settings.split, question, shown)

        def make(limit: int) -> Sample:
            most = None if filling else len(own)
            try:
                return fit(prompt, self.fitting.count_tokens, limit, len(own), task, most)
            except NoPromptError:  # the limit of pieces tokenised apart; the smallest prompt fits
                return prompt(len(own))

        return self.fitting.fitted(make)

    def _own(self, question: DocumentQuestion) -> list[str]:
        """Documents that are always shown."""
        split = self.fitting.settings.split
        return [
            text
            for text in question.documents
            if text in question.answering or self.data.may_show(text, split)
        ]

    def _filling(self, question: DocumentQuestion, name: str) -> list[str]:
        """Documents that fill the prompt, again and again: those of the same article first."""
        related: list[str] = []
        others: list[str] = []
        for text, article in self._shown:
            if text not in question.documents:
                same = article is not None and article == question.article
                (related if same else others).append(text)
        rng = random.Random(f"{name}/documents")
        return [*rng.sample(related, len(related)), *rng.sample(others, len(others))]

    @cached_property
    def _shown(self) -> list[tuple[str, str | None]]:
        """Documents that the split may show, with their articles."""
        split = self.fitting.settings.split
        return [one for one in self.data.documents.items() if self.data.may_show(one[0], split)]


def document_prompt(
    name: str, split: str, question: DocumentQuestion, documents: Sequence[str]
) -> Sample:
    """A question about documents, whose order its `name` and their number draw."""
    shown = list(documents)
    random.Random(f"{name}/order").shuffle(shown)
    texts = (f"Document {number}:\n{text}" for number, text in enumerate(shown, start=1))
    return Sample(
        id=name,
        task=name.partition("/")[0],
        split=split,
        messages=None,
        context=f"{INSTRUCTION}The following are given documents.\n\n"
        + "\n\n".join(texts)
        + "\n\n",
        question=f"{INSTRUCTION}Question: {question.text}",
        answer_prefix=" Answer:",
        references=question.answers,
        reply=f" {question.answers[0]}",
        max_new_tokens=32,
        metric="part",
    )
