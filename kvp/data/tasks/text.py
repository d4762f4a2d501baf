"""The task `text`: running text, for models without a chat template, too.

A prompt is a stretch of text: its first tokens are the cache, the following ones are given and
their likelihood is measured. There is no question, so both protocols are the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvp.data.encode import opening_ids
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.documents import read_documents
from kvp.data.rows.files import read_text, reader_of, share_of
from kvp.data.rows.tally import RowChoice
from kvp.data.task import ALL, Sample, Source, TaskSettings, blank_sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "text"


@dataclass(frozen=True)
class TextTask(ScoredByMetric):
    """Stretches of `--text` of exactly `--length` tokens, context and continuation together."""

    name: str = TEXT

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
        random.Random(f"order/{settings.split}/{settings.seed}").shuffle(texts)
        pieces = list(islice(stretches(texts, tokenizer, settings.length), settings.count))
        if not pieces:
            raise UsageError(
                f"--text {settings.text}: no text of {settings.length} tokens in the "
                f"{settings.split} split; lower --length or take another --split"
            )
        source = Path(settings.text).stem
        samples = [
            _sample(f"{source}/{settings.split}/{settings.seed}/{number}", ids, settings)
            for number, ids in enumerate(pieces)
        ]
        return Source(size=len(samples), make=samples.__getitem__, notes=notes)


def stretches(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[int, ...]]:
    """Token ids of disjoint stretches of exactly `length` tokens, text by text, in rounds.

    Each begins with the token that the tokenizer itself puts before a text, if it does.
    """
    opening = opening_ids(tokenizer)
    size = length - len(opening)
    encoded: list[list[int]] = []
    for round_ in count():
        ended = True
        for index, text in enumerate(texts):
            if round_ == 0:
                ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
                encoded.append(list(ids))
            part = encoded[index][round_ * size : (round_ + 1) * size]
            if len(part) == size:
                ended = False
                yield (*opening, *part)
        if ended:
            return


def _texts(data: str, settings: TaskSettings) -> tuple[list[str], tuple[str, ...]]:
    """Texts of one split, and a note on rows that were skipped."""
    path, split = Path(data), settings.split
    if (path.is_file() and reader_of(path) is None) or (path.is_dir() and any(path.glob("*.txt"))):
        return [share_of(read_text(data, "text"), split)], ()
    documents = read_documents(data, "text", choice=RowChoice.of(settings))
    texts = [one.text for one in documents.usable if one.text and split in (one.split, ALL)]
    if not texts:
        raise UsageError(f"--text {data}: no row with a 'text' column in the {split} split")
    skipped = [(one.location, "has no text") for one in documents.usable if not one.text]
    note = replace(documents.tally, skipped=[*documents.skipped, *skipped]).note()
    return texts, () if note is None else (f"--text {data}: {note}",)


def _sample(name: str, ids: tuple[int, ...], settings: TaskSettings) -> Sample:
    context = len(ids) - settings.continuation_tokens
    return replace(
        blank_sample(settings, TEXT, ""),
        id=name,
        max_new_tokens=settings.continuation_tokens,
        token_ids=ids[:context],
        reply_token_ids=ids[context:],
    )
