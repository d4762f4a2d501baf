"""One prompt with its reference answers: what data sources hand to collection and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt, either as a chat (`messages`) or as context, question and answer prefix."""

    id: str
    """Unique within a run: task, split, seed and index."""
    task: str
    """Task name, for example `niah_single_1` or `chat`."""
    split: str
    """`train`, `validation` or `test`."""
    messages: tuple[Mapping[str, str], ...] | None
    """Chat samples: turns with `role` and `content`, the last one the assistant's reply; else
    None."""
    context: str
    """First part of the user turn; ends exactly where the question starts."""
    question: str
    """Rest of the user turn."""
    answer_prefix: str
    """First text of the assistant turn, given to the model."""
    references: tuple[str, ...]
    """Strings a right answer contains."""
    max_new_tokens: int
    """Tokens to generate."""
    metric: str
    """`all` (fraction of references contained), `part` (any of them) or `none`."""
    reply: str
    """Reference continuation after `answer_prefix`; empty when unknown."""
