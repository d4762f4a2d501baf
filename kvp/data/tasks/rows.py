"""The task `data`: a user's own rows, read and scored as their columns say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from kvp.data.rows.samples import row_samples
from kvp.data.sample import Sample, Source
from kvp.data.string_match import string_match
from kvp.data.task import TaskSettings
from kvp.errors import UsageError

DATA = "data"


@dataclass(frozen=True)
class RowsTask:
    """Rows of `--data`: questions are scored by string match, other rows by likelihood."""

    name: str = DATA

    def build(self, settings: TaskSettings, tokenizer: PreTrainedTokenizerBase) -> Source:
        """Samples of all rows that have an answer, or a reply, to measure."""
        if settings.data is None:
            raise UsageError("--tasks data needs --data FILE (docs/data.md says what it may hold)")
        measured = replace(settings, needs_reply=True)
        return row_samples(settings.data, measured, tokenizer, flag="data")

    def score(self, sample: Sample, answer: str) -> float:
        """Share of the references that the answer contains, or whether any is."""
        return string_match(answer, sample)
