"""Tasks of a user's own files: `data`, rows scored as their columns say; `chat`; and `text`.

A prompt of `text` is a stretch of running text: its first tokens are the cache, the following ones
are given and their likelihood is measured. There is no question, so both protocols are the same.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvp.data.encode import CHARACTERS, count_prompt_tokens, opening_ids
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.documents import read_documents
from kvp.data.rows.files import READERS, files_of, read_text
from kvp.data.rows.samples import row_samples
from kvp.data.splits import ALL, generated_split, share_of
from kvp.data.synthetic.dialogues import generated_chat
from kvp.data.task import Sample, Source, TaskSettings, Turn, blank_sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA, CHAT, TEXT = "data", "chat", "text"


class RowsTask(ScoredByMetric):
    """Rows of `--data`, scored by their metric; dialogues and texts without one by likelihood."""

    name = DATA
    flags = ("data", "metric")

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of all rows that have an answer, or a reply, to measure."""
        if settings.data is None:
            raise UsageError("--tasks data needs --data FILE (docs/data.md says what it may hold)")
        measured = replace(settings, needs_reply=True)
        return row_samples(settings.data, measured, tokenizer, flag="data")


class DialogueTask(ScoredByMetric):
    """Dialogues of `--chat`, packed into chats of the requested length, or generated ones."""

    name = CHAT
    flags = ("chat",)

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Chats whose last turn is the assistant's reply."""
        if settings.chat is not None:
            measured = replace(settings, needs_reply=True, metric=None)
            return row_samples(
                settings.chat, measured, tokenizer, flag="chat", task=self.name, dialogues=True
            )

        split = generated_split(settings.split)

        def prompt_tokens(turns: Sequence[Turn]) -> int:
            chat = replace(blank_sample(settings, CHAT, ""), messages=tuple(turns))
            return count_prompt_tokens(chat, tokenizer)

        def make(index: int) -> Sample:
            seed = random.Random(f"chat/{settings.seed}/{index}").getrandbits(48)
            turns = generated_chat(
                seed=seed, split=split, prompt_tokens=prompt_tokens, length=settings.length
            )
            if (smallest := prompt_tokens(turns)) > settings.length:
                raise UsageError(
                    f"--length {settings.length}: the smallest chat already has {smallest} tokens"
                )
            return replace(blank_sample(settings, CHAT, str(index)), messages=turns)

        return Source(size=settings.count, make=make)


class TextTask(ScoredByMetric):
    """Stretches of `--text` of exactly `--length` tokens, context and continuation together."""

    name = TEXT
    flags = ("text",)

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Stretches of a split, in a seeded order.

        Rows belong to splits by their content, a plain text by position (80 %, 10 %, 10 %). Every
        row gives its first stretch before any row gives its second.
        """
        if settings.text is None:
            raise UsageError("--tasks text needs --text FILE_OR_FOLDER (plain text or rows)")
        if settings.length <= settings.continuation_tokens + 1:
            raise UsageError(
                f"--length {settings.length} leaves no context before --continuation_tokens "
                f"{settings.continuation_tokens}: raise one or lower the other"
            )
        texts, notes = _texts(settings.text, settings)
        settings.shuffle_in_order(texts)
        enough = settings.count * settings.length * CHARACTERS
        given = stretches([text[:enough] for text in texts], tokenizer, settings.length)
        pieces = list(islice(given, settings.count))
        if not pieces:
            why = f"--text {settings.text}: no text of {settings.length} tokens in the "
            why += f"{settings.split} split; lower --length or take another --split"
            raise UsageError("; ".join((why, *notes)))
        continuation = settings.continuation_tokens
        blank = replace(blank_sample(settings, TEXT, ""), max_new_tokens=continuation)
        samples = [
            replace(
                blank,
                id=settings.sample_id(Path(settings.text).stem, number),
                token_ids=ids[:-continuation],
                reply_token_ids=ids[-continuation:],
            )
            for number, ids in enumerate(pieces)
        ]
        return Source.of(samples, notes)


def stretches(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[int, ...]]:
    """Token ids of disjoint stretches of exactly `length` tokens, text by text, in rounds.

    Each begins with the token that the tokenizer itself puts before a text, if it does.
    """
    opening = opening_ids(tokenizer)
    size = length - len(opening)

    def pieces(text: str) -> Iterator[tuple[int, ...]]:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
        for start in range(0, len(ids) - size + 1, size):
            yield (*opening, *ids[start : start + size])

    waiting = deque(map(pieces, texts))
    while waiting:
        if (piece := next(waiting[0], None)) is None:
            waiting.popleft()
        else:
            yield piece
            waiting.rotate(-1)


def _texts(data: str, settings: TaskSettings) -> tuple[list[str], tuple[str, ...]]:
    """Texts of one split, and a note on rows that were skipped."""
    path, split = Path(data), settings.split
    if (path.is_file() and path.suffix.lower() not in READERS) or files_of(data, "--text")[1]:
        text, tally = read_text(data, "--text")
        return [share_of(text, split)], tally.notes(f"--text {data}")
    documents, tally = read_documents(data, "text", settings)
    texts = [row.text for row in documents if row.text and split in (row.split, ALL)]
    tally.skipped += [(row.location, "has no text") for row in documents if not row.text]
    return texts, tally.notes(f"--text {data}")
