"""Settings of `kvp-train --source model`: kvp-collect's groups, and the buffer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvp.config_groups import AnswerConfig, DataConfig, Group, ModelConfig


@dataclass(frozen=True, kw_only=True)
class BufferConfig(Group):
    """Online collection."""

    validation_sequences: int = 40
    """Sequences of the validation split, kept for the whole run."""
    buffer: int = 100
    """Training sequences held in RAM at a time, by each of several --devices."""
    epochs_per_sequence: int = 0
    """Epochs that a training sequence takes part in until a new one replaces it; 0: none is
    replaced, so that each runs through the model once."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "validation_sequences": 1,
        "buffer": 1,
        "epochs_per_sequence": 0,
    }


@dataclass(frozen=True, kw_only=True)
class OnlineSettings(ModelConfig, DataConfig, AnswerConfig, BufferConfig):
    """Prompts, model and buffer of online collection."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens
