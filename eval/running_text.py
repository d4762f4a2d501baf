"""Running text for the task `text`: what a model without a chat template can be measured on.

A prompt is a stretch of text: its first tokens are the cache, the following ones are given and
their likelihood is measured. Nothing is asked, so both protocols would do the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eval.config import EvalConfig
from kvp.data.encode import Encoded
from kvp.data.sample import Sample
from kvp.data.text_files import documents, read_text
from kvp.errors import UsageError

TEXT = "text"

_SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}


def text_prompts(
    config: EvalConfig, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Sample, Encoded]]:
    """The first `--prompts` stretches of `--length` tokens of a split, in a seeded order.

    JSONL rows belong to splits by their content, as in kvp-collect; a plain text by position
    (80 %, 10 %, 10 %). Every row gives its first stretch before any row gives its second.
    Raises UsageError where there is no text or it is too short.
    """
    if config.text is None:
        raise UsageError("--tasks text needs --text FILE_OR_FOLDER (plain text or JSONL)")
    if config.length <= config.continuation_tokens + 1:
        raise UsageError(
            f"--length {config.length} leaves no context before --continuation_tokens "
            f"{config.continuation_tokens}: raise one or lower the other"
        )
    rows = _rows(config.text, config.split)
    random.Random(f"order/{config.split}/{config.seed}").shuffle(rows)
    name = Path(config.text).stem
    found = list(islice(stretches(rows, tokenizer, config.length), config.prompts))
    if not found:
        raise UsageError(
            f"--text {config.text}: no text of {config.length} tokens in the {config.split} split; "
            "lower --length or take another --split"
        )
    return [
        _prompt(f"{name}/{config.split}/{config.seed}/{number}", ids, config)
        for number, ids in enumerate(found)
    ]


def stretches(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[int, ...]]:
    """Token ids of disjoint stretches of exactly `length` tokens, text by text, in rounds.

    Each begins with the token that the tokenizer itself puts before a text, if it does.
    """
    opening = _opening(tokenizer)
    size = length - len(opening)
    encoded: list[list[int]] = []
    for round_ in count():
        shorter = True
        for place, text in enumerate(texts):
            if round_ == 0:
                ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
                encoded.append(list(ids))
            part = encoded[place][round_ * size : (round_ + 1) * size]
            if len(part) == size:
                shorter = False
                yield (*opening, *part)
        if shorter:
            return


def _rows(text: str, split: str) -> list[str]:
    """Texts of one split."""
    if text.endswith(".jsonl"):
        found = [row.text for row in documents(text) if row.split == split and row.text]
        if not found:
            raise UsageError(f"--text {text}: no row with a 'text' column in the {split} split")
        return found
    whole = read_text(text, "text")
    low, high = (round(share * len(whole)) for share in _SHARES[split])
    return [_whole_words(whole, low, high)]


def _whole_words(text: str, low: int, high: int) -> str:
    """Characters low..high of a text without the words that reach over an end."""
    part = text[low:high]
    if low > 0 and not text[low - 1].isspace():
        part = "".join(part.partition(" ")[1:])
    if high < len(text) and not text[high].isspace():
        part = part.rpartition(" ")[0]
    return part.strip()


def _opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    added = tokenizer.encode("")
    return tuple(added[:1]) if added[:1] == [tokenizer.bos_token_id] else ()


def _prompt(name: str, ids: tuple[int, ...], config: EvalConfig) -> tuple[Sample, Encoded]:
    context = len(ids) - config.continuation_tokens
    sample = Sample(
        id=name,
        task=TEXT,
        split=config.split,
        messages=None,
        context="",
        question="",
        answer_prefix="",
        references=(),
        max_new_tokens=config.continuation_tokens,
        metric="none",
        reply="",
    )
    encoded = Encoded(
        ids=ids[:context], context_length=context - 1, reply_ids=ids[context:], reply_spans=()
    )
    return sample, encoded
