"""Samples of documents: dialogues packed into chats, questions, running text cut to a length."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvp.data.chat import Turn, pack
from kvp.data.encode import Encoded, content_ids, encode
from kvp.data.metrics import CHOICES, NONE, fault_of
from kvp.data.rows.documents import read_documents
from kvp.data.rows.forms import Document
from kvp.data.rows.questions import Question
from kvp.data.rows.tally import RowChoice, Skipped, listed
from kvp.data.task import (
    ALL,
    REPLY_TOKENS,
    Sample,
    Source,
    TaskSettings,
    blank_sample,
    context_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS = 40
"""More characters than a token of text has on average."""


def row_samples(
    data: str,
    settings: TaskSettings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    flag: str,
    task: str | None = None,
    dialogues: bool = False,
) -> Source:
    """The samples of a file, a folder or a hub data set in one split, in a seeded order.

    Rows that cannot be used are skipped; the source's notes count them. With
    `settings.needs_reply`, so are those without an answer or a reply. `task` names the samples,
    otherwise the data do; with `dialogues` rows of other forms are left out. The split `all` has
    every row. Where several questions have one context, the ids of their samples end with its name
    (`kvp.data.task.context_of`).
    Raises UsageError naming `flag` where no row can be used.
    """
    documents = read_documents(data, flag, settings.columns, RowChoice.of(settings))
    of_split = [one for one in documents.usable if settings.split in (one.split, ALL)]
    random.Random(f"order/{settings.split}/{settings.seed}").shuffle(of_split)
    name = name_of(data)
    maker = _Maker(settings, tokenizer, task or name, dialogues)
    first = islice(maker.samples(of_split), settings.count)
    asked = Counter(
        question.context for one in of_split for question in one.questions if question.context
    )
    samples = [
        replace(
            sample,
            id=f"{name}/{settings.split}/{settings.seed}/{number}"
            + (context_name(sample.context) if asked[sample.context] > 1 else ""),
        )
        for number, sample in enumerate(first)
    ]
    more = None
    trees = any(document.tree for document in of_split)
    if trees and len(samples) < settings.count and settings.tree_paths == "best":
        more = "one thread of each message tree is used; --tree_paths all takes every one"
    notes = [f"--{flag} {data}: {note}" for note in (documents.note(), maker.note(), more) if note]
    return Source(size=len(samples), make=samples.__getitem__, notes=tuple(notes))


def name_of(data: str) -> str:
    """What samples of `data` are called: the file's name without its suffix."""
    path = Path(data)
    return path.name.partition(".")[0] or path.name if path.exists() else data.rsplit("/", 1)[-1]


def _reply(question: Question, metric: str) -> str:
    """The reference answer: all that must be found, or the first of several spellings."""
    answers = question.answers if metric == "all" else question.answers[:1]
    space = "" if not answers or question.answer_prefix[-1:].isspace() else " "
    return space + ", ".join(answers)


def _counted(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _tokens(lengths: Sequence[int]) -> str:
    named = ", ".join(map(str, lengths[:3])) + (", ..." if len(lengths) > 3 else "")
    return f"{named} tokens"


@dataclass
class _Maker:
    """Makes samples and remembers what it left out."""

    settings: TaskSettings
    tokenizer: PreTrainedTokenizerBase
    name: str
    dialogues: bool
    skipped: list[Skipped] = field(default_factory=list)
    short_chats: list[int] = field(default_factory=list)

    def note(self) -> str | None:
        """One line on rows left out of this split, None without any."""
        split = self.settings.split
        parts = []
        if self.skipped:
            parts.append(f"left out {_counted(self.skipped, 'row')}: {listed(self.skipped)}")
        if self.short_chats:
            parts.append(
                f"left out {_counted(self.short_chats, 'chat')} shorter than half of --length "
                f"{self.settings.length} ({_tokens(self.short_chats)}): a smaller one keeps them"
            )
        return f"{split} split: {'; '.join(parts)}" if parts else None

    def samples(self, documents: Sequence[Document]) -> Iterator[Sample]:
        """Chats first, then single rows; data have one of the forms, as a rule."""
        yield from self._chats([one for one in documents if one.turns and not one.alone])
        for document in documents:
            if self.dialogues and not document.turns:
                self.skipped.append((document.location, "is not a dialogue"))
            elif document.text:
                yield from self._stretches(document)
            elif document.alone or document.questions:
                for sample in self._asked(document):
                    if self._usable(sample, document):
                        yield sample

    def _blank(self) -> Sample:
        return blank_sample(self.settings, self.name, "")

    def _encode(self, sample: Sample) -> Encoded:
        return encode(sample, self.tokenizer)

    def _chats(self, dialogues: Sequence[Document]) -> Iterator[Sample]:
        metric = self.settings.metric or NONE
        if metric in CHOICES:
            self.skipped += [(one.location, "has no choices") for one in dialogues]
            return
        dialogues = in_rounds(dialogues)
        prompt_tokens = ChatTokens(self._blank(), self.tokenizer)

        def too_long(index: int, tokens: int) -> None:
            self.skipped.append((dialogues[index].location, self._excess(tokens)))

        for turns in pack(
            [document.turns for document in dialogues],
            prompt_tokens,
            self.settings.length,
            trees=[document.tree or number for number, document in enumerate(dialogues)],
            too_long=too_long,
            too_short=self.short_chats.append,
        ):
            references = () if metric == NONE else (turns[-1]["content"],)
            yield replace(self._blank(), messages=turns, metric=metric, references=references)

    def _asked(self, document: Document) -> Iterator[Sample]:
        """The samples of a row's questions, or of its prompt."""
        if not document.questions:
            reply = document.turns[-1]["content"]
            references = (reply,) if reply and self.settings.metric else ()
            metric = self.settings.metric or NONE
            blank = replace(self._blank(), metric=metric, references=references)
            yield replace(blank, messages=document.turns)
        for question in document.questions:
            sample = self._question(question)
            yield replace(sample, messages=document.turns) if document.turns else sample

    def _question(self, question: Question) -> Sample:
        metric = self.settings.metric or question.metric
        return replace(
            self._blank(),
            task=question.task or self.name,
            context=question.context if question.question else "",
            question=question.question or question.context,
            answer_prefix=question.answer_prefix or self.settings.answer_prefix or "",
            references=question.answers,
            max_new_tokens=question.max_new_tokens or REPLY_TOKENS,
            metric=metric,
            reply=_reply(question, metric),
            choices=question.choices if metric in CHOICES else (),
            gold=question.gold if metric in CHOICES else None,
        )

    def _usable(self, sample: Sample, document: Document) -> bool:
        tokens = self._encode(sample).prompt_length
        if tokens > self.settings.length:
            self.skipped.append((document.location, self._excess(tokens)))
        elif self.settings.needs_reply and not sample.references:
            self.skipped.append((document.location, "has no answer to measure"))
        elif fault := fault_of(sample.metric, sample.references, sample.choices):
            self.skipped.append((document.location, fault))
        else:
            return True
        return False

    def _excess(self, tokens: int) -> str:
        return f"has {tokens} prompt tokens, more than --length {self.settings.length}"

    def _stretches(self, document: Document) -> Iterator[Sample]:
        """The start of a text with what follows as its reply; of a whole file all stretches."""
        text = document.text
        if (metric := self.settings.metric or NONE) != NONE:
            self.skipped.append((document.location, f"is running text, not for metric {metric}"))
            return
        while text:
            context = self._shortened(text)
            rest = text[len(context) :]
            reply = rest[: REPLY_TOKENS * _CHARACTERS]
            if self.settings.needs_reply and not reply.strip():
                if not document.long:
                    reason = f"is no longer than --length {self.settings.length}"
                    self.skipped.append((document.location, reason))
                return
            yield replace(self._blank(), context=context, reply=reply)
            text = rest.lstrip() if document.long else ""

    def _shortened(self, text: str) -> str:
        """The longest start of a text, cut before a word, that has at most `length` tokens."""
        length = self.settings.length

        def fits(characters: int) -> bool:
            start = replace(self._blank(), context=text[:characters])
            return self._encode(start).prompt_length <= length

        low, high = 1, min(len(text), length * _CHARACTERS) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        if low == len(text):
            return text
        return text[:low].rsplit(maxsplit=1)[0] if len(text[:low].split()) > 1 else text[:low]


@dataclass
class ChatTokens:
    """Prompt tokens of a chat, as `kvp.data.encode` gives it; each turn is tokenised once.

    Contents are tokenised apart from the template, so that their tokens add up.
    """

    blank: Sample
    tokenizer: PreTrainedTokenizerBase
    _contents: dict[str, int] = field(default_factory=dict)
    _frames: dict[int, int] = field(default_factory=dict)

    def __call__(self, turns: Sequence[Turn]) -> int:
        """Tokens of the chat without its final reply, chat template included."""
        if len(turns) not in self._frames:
            empty = tuple({**turn, "content": "a"} for turn in turns)
            framed = encode(replace(self.blank, messages=empty), self.tokenizer).prompt_length
            self._frames[len(turns)] = framed - (len(turns) - 1) * self._of("a")
        return self._frames[len(turns)] + sum(self._of(turn["content"]) for turn in turns[:-1])

    def _of(self, content: str) -> int:
        if content not in self._contents:
            self._contents[content] = len(content_ids(content, self.tokenizer))
        return self._contents[content]


def in_rounds(dialogues: Sequence[Document]) -> list[Document]:
    """The first thread of every message tree, then the second ones, and so on.

    So that chats, which have one thread of a tree at most, find many trees to choose from.
    """
    met: Counter[str] = Counter()
    rounds = []
    for dialogue in dialogues:
        rounds.append(met[dialogue.tree])
        met[dialogue.tree] += bool(dialogue.tree)
    return [dialogues[index] for index in sorted(range(len(dialogues)), key=rounds.__getitem__)]
