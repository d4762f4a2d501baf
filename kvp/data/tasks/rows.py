"""The task `data`: a user's own rows, read and scored as their columns say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvp.data.chat import Turn, generated_chat
from kvp.data.encode import encode
from kvp.data.metrics import ScoredByMetric
from kvp.data.rows.samples import row_samples
from kvp.data.synthetic.text import SPLITS
from kvp.data.task import Sample, Source, TaskSettings, blank_sample
from kvp.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA = "data"


@dataclass(frozen=True)
class RowsTask(ScoredByMetric):
    """Rows of `--data`, scored by their metric; dialogues and texts without one by likelihood."""

    name: str = DATA

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of all rows that have an answer, or a reply, to measure."""
        if settings.data is None:
            raise UsageError("--tasks data needs --data FILE (docs/data.md says what it may hold)")
        measured = replace(settings, needs_reply=True)
        return row_samples(settings.data, measured, tokenizer, flag="data")


CHAT = "chat"


@dataclass(frozen=True)
class DialogueTask(ScoredByMetric):
    """Dialogues of `--chat`, packed into chats of the requested length, or generated ones."""

    name: str = CHAT

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Chats whose last turn is the assistant's reply."""
        if settings.chat is not None:
            measured = replace(settings, needs_reply=True, columns=None, metric=None)
            return row_samples(
                settings.chat, measured, tokenizer, flag="chat", task=self.name, dialogues=True
            )

        if settings.split not in SPLITS:
            raise UsageError(f"--split {settings.split}: generated chats belong to one split each")

        def prompt_tokens(turns: Sequence[Turn]) -> int:
            chat = replace(blank_sample(settings, CHAT, ""), messages=tuple(turns))
            return encode(chat, tokenizer).prompt_length

        def make(index: int) -> Sample:
            seed = random.Random(f"chat/{settings.seed}/{index}").getrandbits(48)
            turns = generated_chat(
                seed=seed,
                split=settings.split,
                prompt_tokens=prompt_tokens,
                length=settings.length,
            )
            if (smallest := prompt_tokens(turns)) > settings.length:
                raise UsageError(
                    f"--length {settings.length}: the smallest chat already has {smallest} tokens"
                )
            return replace(blank_sample(settings, CHAT, str(index)), messages=turns)

        return Source(size=settings.count, make=make)
