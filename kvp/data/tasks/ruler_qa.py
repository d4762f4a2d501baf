"""RULER's qa_1 and qa_2: questions of SQuAD and HotpotQA about documents (`--squad`, `--hotpotqa`).

Template, document form, order of filling, references and metric are RULER's. Different on purpose:
questions of a split never show a document that answers a question of another split, and every
sample has its own order of documents. A document that answers a question belongs to one split with
all questions that it answers; other documents to none.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from kvp.data.encode import encode, find_largest
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.files import Tally, read_rows
from kvp.data.rows.values import RowError, text_of, texts_of
from kvp.data.synthetic.text import split_of
from kvp.data.task import ALL, NoPromptError, Sample, Source, TaskSettings
from kvp.data.tasks.ruler import PROBE
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAGS: Mapping[str, str] = {"qa_1": "squad", "qa_2": "hotpotqa"}
"""Flag that names the file of each task."""
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """A question, and the documents that it comes with."""

    text: str
    answers: tuple[str, ...]
    """Spellings of the answer, at least one."""
    documents: tuple[str, ...]
    """Documents that are always shown, those that answer it among them."""
    answering: tuple[str, ...]
    """Documents that answer it."""
    article: str | None = None
    """Article that the document is from; others of it are shown first."""


@dataclass(frozen=True)
class QuestionSet:
    """All questions of some data, and the documents they are about."""

    questions: tuple[DocumentQuestion, ...]
    documents: Mapping[str, str | None]
    """Every document and its article, in the order of their text."""
    owners: Mapping[str, str]
    """Split of every document that answers a question."""
    tally: Tally = field(default_factory=Tally)

    def of_split(self, split: str) -> list[DocumentQuestion]:
        """The questions of a split, in the order of the data; of `all` every one."""
        owned = ((self.owners[question.answering[0]], question) for question in self.questions)
        return [question for owner, question in owned if split in (owner, ALL)]

    def may_show(self, document: str, split: str) -> bool:
        """Whether a document may occur in a split: none that answers a question of another."""
        return split == ALL or self.owners.get(document, split) == split


Parsed = Iterator[DocumentQuestion | tuple[str, str | None]]
"""Questions, and documents (with their article) that nothing is asked about."""


def read_questions(data: str, flag: str) -> QuestionSet:
    """The questions of `--squad` or `--hotpotqa`; UsageError where no row can be used."""
    questions: list[DocumentQuestion] = []
    articles: dict[str, str | None] = {}
    tally = Tally()
    rows = read_rows(data, flag, tally.left_out)
    for _, made in tally.parse_rows(rows, lambda _, row: list(_READERS[flag](row))):
        for item in made:
            if isinstance(item, tuple):
                articles.setdefault(*item)
            else:
                questions.append(item)
                articles |= {text: item.article for text in item.documents}
    tally.check(f"--{flag} {data}", questions, "has a question with an answer")
    documents = {text: articles[text] for text in sorted(articles)}
    return QuestionSet(tuple(questions), documents, _owners(questions), tally)


def _owners(questions: Iterable[DocumentQuestion]) -> dict[str, str]:
    """Split of every answering document: of all that are joined by questions, by their first."""
    leads: dict[str, str] = {}

    def lead(text: str) -> str:
        while leads.setdefault(text, text) != text:
            leads[text] = leads[leads[text]]
            text = leads[text]
        return text

    for question in questions:
        roots = sorted({lead(text) for text in question.answering})
        leads.update(dict.fromkeys(roots, roots[0]))
    return {text: split_of(lead(text)) for text in list(leads)}


def _squad_row(row: Mapping[str, Any]) -> Parsed:
    """SQuAD: its own JSON (`data`, `paragraphs`, `qas`), or rows of context, question, answers.

    Questions without an answer (`is_impossible`, no `answers`) are left out, their paragraphs not.
    """
    if isinstance(row.get("data"), list):  # the whole file
        for article in row["data"]:
            yield from _squad_row(article)
        return
    paragraphs = row.get("paragraphs")
    if not isinstance(paragraphs, list):
        if not {"context", "question"} <= row.keys():
            raise RowError("has neither 'paragraphs' nor 'context' and 'question'")
        paragraphs = [{"context": row["context"], "qas": [row]}]
    title = str(row["title"]) if row.get("title") else None
    for paragraph in paragraphs:
        context = text_of(paragraph.get("context"), " in context")
        yield context, title
        for asked in paragraph.get("qas") or []:
            answers = () if asked.get("is_impossible") else _spellings(asked)
            if answers:
                yield DocumentQuestion(
                    text=text_of(asked.get("question"), " in question").strip(),
                    answers=answers,
                    documents=(context,),
                    answering=(context,),
                    article=title,
                )


def _spellings(row: Mapping[str, Any]) -> tuple[str, ...]:
    given = row.get("answers")
    return texts_of(row.get("answer") if given is None else given, " in an answer")


def _hotpotqa_row(row: Mapping[str, Any]) -> Parsed:
    """HotpotQA with distractors: its own JSON or rows of the hub.

    `context` is a list of [title, sentences], or lists `title` and `sentences`. Without
    `supporting_facts` all documents of a question count as answering it.
    """
    context = row["context"]
    if isinstance(context, Mapping):
        context = zip(context["title"], context["sentences"], strict=False)
    titled = [(title, text_of(list(parts), " in a document")) for title, parts in context]
    if not titled:
        raise RowError("has no context of titles and sentences")
    facts = row.get("supporting_facts") or []
    if isinstance(facts, Mapping):
        facts = facts.get("title") or []
    named = {str(fact) if isinstance(fact, str) else str(fact[0]) for fact in facts if fact}
    documents = tuple(dict.fromkeys(f"{title}\n{text}" for title, text in titled))
    answering = [f"{title}\n{text}" for title, text in titled if title in named]
    answers = _spellings(row)
    if not answers:
        raise RowError("has no answer")
    yield DocumentQuestion(
        text=text_of(row.get("question"), " in question").strip(),
        answers=answers,
        documents=documents,
        answering=tuple(dict.fromkeys(answering)) or documents,
    )


_READERS = {"squad": _squad_row, "hotpotqa": _hotpotqa_row}


@dataclass(frozen=True)
class RulerQaTask(ScoredByMetric):
    """One of RULER's two tasks with real documents; a right answer has any of the spellings."""

    name: str

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """The questions of the split that fit, in a seeded order, with documents until `length`."""
        flag = FLAGS[self.name]
        data: str | None = getattr(settings, flag)
        if data is None:
            raise NoPromptError(
                f"--tasks {self.name} needs --{flag} FILE (docs/data.md says what it may hold)",
                reason=f"it needs --{flag} FILE",
            )
        maker = _QuestionMaker(self.name, settings, tokenizer, read_questions(data, flag))
        asked = maker.data.of_split(settings.split)
        if not asked:
            raise UsageError(f"--{flag} {data}: no question of the {settings.split} split")
        random.Random(f"order/{settings.split}/{settings.seed}").shuffle(asked)
        too_long: list[int] = []
        fitting = list(islice(maker.fitting_ones(asked, too_long), settings.count))
        if settings.count and not fitting:
            raise NoPromptError(
                f"--length {settings.length}: the smallest {self.name} prompt already has "
                f"{min(too_long)} tokens"
            )
        notes = [*maker.data.tally.notes(what := f"--{flag} {data}")]
        if too_long:
            notes.append(
                f"{what}: {settings.split} split: left out {len(too_long)} of its questions, whose "
                f"own documents are longer than --length {settings.length}"
            )
        return Source(
            size=len(fitting),
            make=lambda index: maker.make(fitting[index], index),
            notes=tuple(notes),
        )


@dataclass(frozen=True)
class _QuestionMaker:
    """Makes the samples of one task."""

    task: str
    settings: TaskSettings
    tokenizer: PreTrainedTokenizerBase
    data: QuestionSet

    def fitting_ones(
        self, asked: list[DocumentQuestion], too_long: list[int]
    ) -> Iterator[DocumentQuestion]:
        """Questions that fit with their own documents; the tokens of others go to `too_long`."""
        for question in asked:
            own = self._own_documents(question)
            sample = document_prompt("smallest", self.settings.split, question, own)
            if (tokens := self._prompt_tokens(sample)) > self.settings.length:
                too_long.append(tokens)
            else:
                yield question

    def make(self, question: DocumentQuestion, index: int) -> Sample:
        """The sample of a question with as many documents as fit."""
        split, length = self.settings.split, self.settings.length
        name = f"{self.task}/{split}/{self.settings.seed}/{index}"
        own, filling = self._own_documents(question), self._filling_documents(question, name)

        def prompt(amount: int) -> Sample:
            shown = [*own, *islice(cycle(filling), amount - len(own))]
            return document_prompt(name, split, question, shown)

        return find_largest(
            prompt, self._prompt_tokens,
            limit=length, smallest=len(own), what=self.task, probe=PROBE,
            most=max(length, len(own)) if filling else len(own),
        )  # fmt: skip

    def _prompt_tokens(self, sample: Sample) -> int:
        return encode(sample, self.tokenizer).prompt_length

    def _own_documents(self, question: DocumentQuestion) -> list[str]:
        """Documents that are always shown."""
        return [
            text
            for text in question.documents
            if text in question.answering or self.data.may_show(text, self.settings.split)
        ]

    def _filling_documents(self, question: DocumentQuestion, name: str) -> list[str]:
        """Documents that fill the prompt, again and again: those of the same article first."""
        rng, own = random.Random(f"{name}/documents"), question.article
        pool = [document for document in self._shown if document[0] not in question.documents]
        related = [text for text, article in pool if article and article == own]
        others = [text for text, article in pool if not article or article != own]
        return [*rng.sample(related, len(related)), *rng.sample(others, len(others))]

    @cached_property
    def _shown(self) -> list[tuple[str, str | None]]:
        """Documents that the split may show, with their articles."""
        split = self.settings.split
        return [pair for pair in self.data.documents.items() if self.data.may_show(pair[0], split)]


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
