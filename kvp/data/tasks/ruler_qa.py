"""RULER's qa_1 and qa_2: questions of SQuAD and HotpotQA about documents (`--squad`, `--hotpotqa`).

Template, document form, order of filling, references and metric are RULER's. Different on purpose:
questions of a split never show a document that answers a question of another split, and every
sample has its own order of documents. A document that answers a question belongs to one split with
all questions that it answers; other documents to none.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from kvp.data.encode import CountTokens, count_prompt_tokens, find_largest
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.files import Tally, read_rows
from kvp.data.rows.values import RowError, text_of, texts_of
from kvp.data.splits import ALL, split_of
from kvp.data.task import NoPromptError, Sample, Source, TaskSettings, blank_sample
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

    def own_documents(self, question: DocumentQuestion, split: str) -> list[str]:
        """Documents that a question is always shown with in a split."""
        return [
            text
            for text in question.documents
            if text in question.answering or self.may_show(text, split)
        ]

    def may_show(self, document: str, split: str) -> bool:
        """Whether a document may occur in a split: none that answers a question of another."""
        return split == ALL or self.owners.get(document, split) == split


QuestionsAndDocuments = Iterator[DocumentQuestion | tuple[str, str | None]]
"""Questions, and documents (with their article) that nothing is asked about."""


def read_questions(data: str, flag: str) -> QuestionSet:
    """The questions of `--squad` or `--hotpotqa`; UsageError where no row can be used."""
    questions: list[DocumentQuestion] = []
    articles: dict[str, str | None] = {}
    tally = Tally()
    rows = read_rows(data, f"--{flag}", tally.left_out)
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


def _squad_row(row: Mapping[str, Any]) -> QuestionsAndDocuments:
    """SQuAD's own JSON, or rows; questions without an answer are left out, their texts stay."""
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
    answers = row.get("answers")
    return texts_of(row.get("answer") if answers is None else answers, " in an answer")


def _pairs(given: Any, first: str, second: str) -> Any:  # noqa: ANN401
    """Pairs as they are; the hub has an object of two lists."""
    return zip(given[first], given[second], strict=True) if isinstance(given, Mapping) else given


def _hotpotqa_row(row: Mapping[str, Any]) -> QuestionsAndDocuments:
    """HotpotQA with distractors: its own JSON or rows of the hub."""
    named = {title for title, _ in _pairs(row["supporting_facts"], "title", "sent_id")}
    texts = {
        f"{title}\n{text_of([*parts], ' in a document')}": title
        for title, parts in _pairs(row["context"], "title", "sentences")
    }
    answers = _spellings(row)
    if not answers or not texts:
        raise RowError("has no answer or no documents")
    yield DocumentQuestion(
        text=text_of(row.get("question"), " in question").strip(),
        answers=answers,
        documents=tuple(texts),
        answering=tuple(text for text, title in texts.items() if title in named) or (*texts,),
    )


_READERS = {"squad": _squad_row, "hotpotqa": _hotpotqa_row}


@dataclass(frozen=True)
class RulerQaTask(ScoredByMetric):
    """One of RULER's two tasks with real documents; a right answer has any of the spellings."""

    name: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flag that names the task's file."""
        return (FLAGS[self.name],)

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """The questions of the split that fit, in a seeded order, with documents until `length`."""
        flag = FLAGS[self.name]
        data: str | None = getattr(settings, flag)
        if data is None:
            raise NoPromptError(
                f"--tasks {self.name} needs --{flag} FILE (docs/data.md says what it may hold)",
                reason=f"it needs --{flag} FILE",
            )
        questions, split, length = read_questions(data, flag), settings.split, settings.length
        of_split = questions.of_split(split)
        if not of_split:
            raise UsageError(f"--{flag} {data}: no question of the {split} split")
        settings.shuffle_in_order(of_split)
        count_tokens: CountTokens = partial(count_prompt_tokens, tokenizer=tokenizer)
        too_long: list[int] = []
        smallest = replace(blank_sample(settings, self.name, ""), id="smallest")

        def fits(question: DocumentQuestion) -> bool:
            documents = questions.own_documents(question, split)
            tokens = count_tokens(document_prompt(smallest, question, documents))
            if tokens > length:
                too_long.append(tokens)
            return tokens <= length

        fitting = list(islice(filter(fits, of_split), settings.count))
        if settings.count and not fitting:
            raise NoPromptError(
                f"--length {length}: the smallest {self.name} prompt already has "
                f"{min(too_long)} tokens"
            )
        notes = [*questions.tally.notes(what := f"--{flag} {data}")]
        if too_long:
            notes.append(
                f"{what}: {split} split: left out {len(too_long)} of its questions, whose "
                f"own documents are longer than --length {length}"
            )
        pool = [pair for pair in questions.documents.items() if questions.may_show(pair[0], split)]

        def make(index: int) -> Sample:
            question, blank = fitting[index], blank_sample(settings, self.name, str(index))
            documents = questions.own_documents(question, split)
            filling = _filling_documents(question, pool, random.Random(f"{blank.id}/documents"))

            def prompt(amount: int) -> Sample:
                shown = [*documents, *islice(cycle(filling), amount - len(documents))]
                return document_prompt(blank, question, shown)

            return find_largest(
                prompt, count_tokens, limit=length, smallest=len(documents), what=self.name,
                most=max(length, len(documents)) if filling else len(documents),
            )  # fmt: skip

        return Source(size=len(fitting), make=make, notes=tuple(notes))


def _filling_documents(
    question: DocumentQuestion, pool: Iterable[tuple[str, str | None]], rng: random.Random
) -> list[str]:
    """Documents that fill the prompt, again and again: those of the same article first."""
    others = [(text, article) for text, article in pool if text not in question.documents]
    related = [text for text, article in others if article and article == question.article]
    far = [text for text, article in others if not article or article != question.article]
    return [*rng.sample(related, len(related)), *rng.sample(far, len(far))]


def document_prompt(blank: Sample, question: DocumentQuestion, documents: Sequence[str]) -> Sample:
    """A question about documents, whose order the id of `blank` and their number draw."""
    shown = list(documents)
    random.Random(f"{blank.id}/order").shuffle(shown)
    texts = (f"Document {number}:\n{text}" for number, text in enumerate(shown, start=1))
    return replace(
        blank,
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
