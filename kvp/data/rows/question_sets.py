"""Questions about documents, from files of SQuAD and HotpotQA: what RULER's qa_1 and qa_2 read.

Both in their own JSON and as rows of the hub. A document that answers a question belongs to one
split with all questions that it answers; other documents to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvp.data.rows.cells import RowError, text_of
from kvp.data.rows.files import read_rows
from kvp.data.rows.tally import Tally, listed
from kvp.data.synthetic.text import split_of
from kvp.data.task import ALL
from kvp.errors import UsageError


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
        return [
            one for one in self.questions if split in (self.owners[one.answering[0]], ALL)
        ]  # fmt: skip

    def may_show(self, document: str, split: str) -> bool:
        """Whether a document may occur in a split: none that answers a question of another."""
        return split == ALL or self.owners.get(document, split) == split

    def note(self) -> str | None:
        """One line on the rows that were skipped, None without any."""
        return self.tally.note()


Parsed = Iterator[DocumentQuestion | tuple[str, str | None]]
"""Questions, and documents (with their article) that nothing is asked about."""


def read_squad(data: str) -> QuestionSet:
    """SQuAD: its own JSON (`data`, `paragraphs`, `qas`), or rows of context, question, answers.

    Questions without an answer (`is_impossible`, no `answers`) are left out, their paragraphs not.
    Raises UsageError naming --squad where no row can be used.
    """
    return _read(data, "squad", _squad_row)


def read_hotpotqa(data: str) -> QuestionSet:
    """HotpotQA with distractors: its own JSON or rows of the hub.

    `context` is a list of [title, sentences], or lists `title` and `sentences`. Without
    `supporting_facts` all documents of a question count as answering it. Raises UsageError naming
    --hotpotqa where no row can be used.
    """
    return _read(data, "hotpotqa", _hotpotqa_row)


READERS: Mapping[str, Callable[[str], QuestionSet]] = {
    "squad": read_squad,
    "hotpotqa": read_hotpotqa,
}
"""Readers by the flag that names the data."""


def _read(data: str, flag: str, parse: Callable[[Mapping[str, Any]], Parsed]) -> QuestionSet:
    questions: list[DocumentQuestion] = []
    articles: dict[str, str | None] = {}
    tally = Tally()
    for _, made in tally.parsed(read_rows(data, flag), lambda _, row: list(parse(row))):
        for one in made:
            if isinstance(one, tuple):
                articles.setdefault(*one)
            else:
                questions.append(one)
                articles |= {text: one.article for text in one.documents}
    tally.check(f"--{flag} {data}")
    if not questions:
        why = f": {listed(tally.skipped[:1])}" if tally.skipped else ""
        raise UsageError(
            f"--{flag} {data}: none of its {tally.rows} rows has a question with an answer{why} "
            "(docs/data.md says what it may hold)"
        )
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
    if isinstance(row.get("data"), list):  # the whole file
        for article in row["data"]:
            yield from _squad_row(article)
    elif isinstance(row.get("paragraphs"), list):
        title = row.get("title")
        for paragraph in row["paragraphs"]:
            yield from _paragraph(paragraph, title)
    elif row.get("context") is not None and row.get("question") is not None:
        yield from _paragraph({"context": row["context"], "qas": [row]}, row.get("title"))
    else:
        raise RowError("has neither 'paragraphs' nor 'context' and 'question'")


def _paragraph(paragraph: Mapping[str, Any], title: object) -> Parsed:
    context = text_of(paragraph.get("context"), " in context")
    article = str(title) if title else None
    yield context, article
    for asked in paragraph.get("qas") or []:
        answers = () if asked.get("is_impossible") else _spellings(asked)
        if answers:
            yield DocumentQuestion(
                text=text_of(asked.get("question"), " in question").strip(),
                answers=answers,
                documents=(context,),
                answering=(context,),
                article=article,
            )


def _spellings(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Answers: a text, texts, objects with `text`, or one object with a list of them."""
    given = row.get("answers", row.get("answer"))
    if isinstance(given, Mapping):
        given = given.get("text")
    if given is None or given == "":
        return ()
    every = [given] if isinstance(given, str) else given
    texts = [one.get("text") if isinstance(one, Mapping) else one for one in every]
    return tuple(dict.fromkeys(text_of(text, " in an answer") for text in texts))


def _hotpotqa_row(row: Mapping[str, Any]) -> Parsed:
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
