"""RULER prompts fitted to the tokens that a chat template leaves of `--length`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvp.data.encode import encode
from kvp.data.sample import Sample
from kvp.data.task import TaskSettings, blank_sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Fitting:
    """Counts the tokens of one task's prompts."""

    task: str
    settings: TaskSettings
    tokenizer: PreTrainedTokenizerBase

    def fitted(self, make: Callable[[int], Sample]) -> Sample:
        """What `make` makes for the largest limit whose encoded prompt is within `--length`.

        `make` takes the most tokens that `count_tokens` may return for the prompt, and raises
        NoPromptError where it has no prompt so small.
        """
        limit = self.settings.length
        while True:
            sample = make(limit)
            # Pieces tokenised apart may have a token more than the whole.
            excess = encode(sample, self.tokenizer).prompt_length - self.settings.length
            if excess <= 0:
                return sample
            limit -= excess

    def count_tokens(self, text: str) -> int:
        """Tokens of a prompt's text, chat template included."""
        ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return self._around + len(ids)

    @cached_property
    def _around(self) -> int:
        """Tokens of the chat template."""
        # The question is not empty: running text would get no chat template. Some tokenizers have
        # no token for a space.
        question = " " if self.tokenizer.encode(" ", add_special_tokens=False) else "a"
        empty = replace(blank_sample(self.settings, self.task, ""), question=question)
        return encode(empty, self.tokenizer).prompt_length - 1
