"""Samples of documents: dialogues packed into chats, questions, running text cut to a length.

Single dialogues are too short to put a cache under pressure, so several of them become consecutive
turns of one chat, which ends with a reply of the assistant: that is what evaluation measures, and
the context ends before the final message of the user. One dialogue never serves two chats.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvp.data.encode import CHANGED, CHARACTERS, TokenCounter, count_prompt_tokens
from kvp.data.metrics import NONE, number_of_reference
from kvp.data.rows.documents import read_documents
from kvp.data.rows.files import Skipped, list_first
from kvp.data.rows.forms import Document
from kvp.data.splits import ALL
from kvp.data.task import (
    REPLY_TOKENS,
    Sample,
    Source,
    TaskSettings,
    Turn,
    blank_sample,
    context_name,
)
from kvp.names import plain_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

    Rows that cannot be used are skipped and counted in notes; with `settings.needs_reply`, so are
    those without an answer or a reply. Samples are of the task `task`, without it of one that is
    named as the data; with `dialogues` rows of other forms are left out. Ids of samples that share
    a context end with its name. Raises UsageError, naming `flag`, where no row can be used.
    """
    documents, tally = read_documents(data, flag, settings)
    of_split = [document for document in documents if settings.split in (document.split, ALL)]
    settings.shuffle_in_order(of_split)
    name = data_name(data)
    count = TokenCounter(tokenizer, settings.length)
    blank = blank_sample(settings, task or name, "")
    maker = _SampleMaker(settings, count, blank, dialogues)
    first = islice(maker.samples(of_split), settings.count)
    questions = (question for document in of_split for question in document.questions)
    counts = Counter(question.context for question in questions if question.context)
    samples = [
        replace(
            sample,
            id=settings.sample_id(name, number)
            + (context_name(sample.context) if counts[sample.context] > 1 else ""),
        )
        for number, sample in enumerate(first)
    ]
    notes = [*tally.notes(what := f"--{flag} {data}")]
    if skipped := maker.skipped:
        rows = "row" if len(skipped) == 1 else "rows"
        left_out = f"{what}: {settings.split} split: left out {len(skipped)} {rows}"
        unanswered = any(why.startswith("has no answer") for _, why in skipped)
        hint = "; add `answer` to each row (docs/data.md)" if unanswered else ""
        notes.append(f"{left_out}: {list_first(skipped)}{hint}")
    return Source.of(samples, notes)


def data_name(data: str) -> str:
    """What samples of `data` are called: the file's name without its suffix, or the folder's."""
    path = Path(data)
    if not path.exists():
        return data.rsplit("/", 1)[-1]
    return path.name if path.is_dir() else path.stem


@dataclass
class _SampleMaker:
    """Makes samples and remembers what it left out."""

    settings: TaskSettings
    count: TokenCounter
    """Counts the tokens of all samples: questions share contexts, which are tokenised once."""
    blank: Sample
    dialogues: bool
    skipped: list[Skipped] = field(default_factory=list)

    def samples(self, documents: Sequence[Document]) -> Iterator[Sample]:
        """Chats first, then single rows; data have one of the forms, as a rule."""
        yield from self._chats([document for document in documents if document.turns])
        for document in documents:
            if self.dialogues and not document.turns:
                self.skipped.append((document.location, "is not a dialogue"))
            elif document.text:
                yield from self._stretches(document)
            for asked in () if self.dialogues else document.questions:
                sample = self._with_reply(asked)
                if fault := self._fault(sample):
                    self.skipped.append((document.location, fault))
                else:
                    yield sample

    def _chats(self, dialogues: Sequence[Document]) -> Iterator[Sample]:
        metric, length = self.settings.metric or NONE, self.settings.length

        def prompt_tokens(turns: Sequence[Turn]) -> int:
            return self.count(replace(self.blank, messages=tuple(turns)))

        def too_long(dialogue: Document, tokens: int) -> None:
            self.skipped.append((dialogue.location, self._excess(tokens)))

        def too_short(tokens: int) -> None:
            why = f"of {tokens} tokens is shorter than half of --length {length}"
            self.skipped.append(("a chat", f"{why}; a smaller one keeps it"))

        for turns in pack(in_rounds(dialogues), prompt_tokens, length, too_long, too_short):
            references = () if metric == NONE else (turns[-1]["content"],)
            yield replace(self.blank, messages=turns, metric=metric, references=references)

    def _with_reply(self, asked: Sample) -> Sample:
        """The sample of a question: its reply is all that must be found, or the first spelling."""
        metric = self.settings.metric or asked.metric
        answers = asked.references if metric == "all" else asked.references[:1]
        space = "" if not answers or asked.answer_prefix[-1:].isspace() else " "
        reply, task = space + ", ".join(answers), asked.task or self.blank.task
        return replace(asked, split=self.settings.split, task=task, metric=metric, reply=reply)

    def _fault(self, sample: Sample) -> str | None:
        """Why a sample is left out; None where it can be used."""
        try:
            plain_name(sample.task)
        except ValueError as problem:
            return f"names a task that results cannot hold: {problem}"
        tokens = self.count(sample)
        if tokens > self.settings.length:
            return self._excess(tokens)
        if self.settings.needs_reply and not sample.references:
            return "has no answer to measure (answer or answers)"
        if sample.metric == "number" and None in map(number_of_reference, sample.references):
            return "has an answer without a number, for metric number"
        return None

    def _excess(self, tokens: int) -> str:
        if tokens == CHANGED:
            return "has text that the chat template changes"
        counted = "" if tokens >= self.settings.length * CHARACTERS else f"{tokens} prompt tokens, "
        return f"has {counted}more than --length {self.settings.length}"

    def _stretches(self, document: Document) -> Iterator[Sample]:
        """The start of a text with what follows as its reply; of a whole file all stretches."""
        text = document.text
        if (metric := self.settings.metric or NONE) != NONE:
            self.skipped.append((document.location, f"is running text, not for metric {metric}"))
            return
        while text:
            context = self._shorten_text(text)
            rest = text[len(context) :]
            reply = rest[: REPLY_TOKENS * CHARACTERS]
            if self.settings.needs_reply and not reply.strip():
                if not document.long:
                    reason = f"is no longer than --length {self.settings.length}"
                    self.skipped.append((document.location, reason))
                return
            yield replace(self.blank, context=context, reply=reply)
            text = rest.lstrip() if document.long else ""

    def _shorten_text(self, text: str) -> str:
        """The longest start of a text, cut before a word, that has at most `length` tokens."""
        low, high = 1, min(len(text), self.settings.length * CHARACTERS) + 1
        while high - low > 1:
            middle = (low + high) // 2
            start = replace(self.blank, context=text[:middle])
            tokens = count_prompt_tokens(start, self.count.tokenizer)
            low, high = (middle, high) if tokens <= self.settings.length else (low, middle)
        if low == len(text):
            return text
        return text[:low].rsplit(maxsplit=1)[0] if len(text[:low].split()) > 1 else text[:low]


def pack(
    dialogues: Sequence[Document],
    prompt_tokens: Callable[[Sequence[Turn]], int],
    length: int,
    too_long: Callable[[Document, int], None],
    too_short: Callable[[int], None],
) -> Iterator[tuple[Turn, ...]]:
    """Chats of at most `length` prompt tokens, filled with one exchange after the other.

    A dialogue that does not fit to its end is cut there and its rest dropped; the next one goes on
    in the same chat where that is below half of `length`, else opens a new one. One whose first
    exchange is too long for a chat of its own is left out, and `too_long` gets it and its tokens;
    of a chat of less than half of `length`, such as a last one, `too_short` gets the tokens.
    Dialogues of one tree have a beginning in common and never share a chat: the next one of another
    tree comes first, and where there is none the chat ends.
    """

    def with_exchanges(chat: list[Turn], turns: Sequence[Turn]) -> list[Turn]:
        """The chat with as many exchanges of a dialogue as fit."""
        for start in range(0, len(turns), 2):
            longer = [*chat, *turns[start : start + 2]]
            if prompt_tokens(longer) > length:
                break
            chat = longer
        return chat

    chat: list[Turn] = []
    inside: set[object] = set()
    trees = [dialogue.tree or number for number, dialogue in enumerate(dialogues)]
    waiting = OrderedDict(enumerate(dialogues))  # a dict is slow to lose its first entries
    while waiting or chat:
        index = next((number for number in waiting if trees[number] not in inside), None)
        turns = () if index is None else waiting.pop(index).turns
        if index is not None and (tokens := prompt_tokens(turns[:2])) > length:
            too_long(dialogues[index], tokens)
            continue
        longer = with_exchanges(chat, turns)
        added = len(longer) - len(chat)
        if index is not None and (
            added == len(turns) or (added and 2 * prompt_tokens(longer) < length)
        ):
            chat = longer
            inside.add(trees[index])
            continue
        if 2 * (tokens := prompt_tokens(longer)) >= length:
            yield tuple(longer)
        else:
            too_short(tokens)
        # A dialogue that has not begun in the chat just filled opens the next one.
        chat = [] if added else with_exchanges([], turns)
        inside = set() if added or index is None else {trees[index]}


def in_rounds(dialogues: Sequence[Document]) -> list[Document]:
    """The first thread of every message tree, then the second ones: chats have one of each tree."""
    met: Counter[str] = Counter()
    rounds = []
    for dialogue in dialogues:
        rounds.append(met[dialogue.tree])
        met[dialogue.tree] += bool(dialogue.tree)
    return [dialogues[index] for index in sorted(range(len(dialogues)), key=rounds.__getitem__)]
