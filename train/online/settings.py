"""Settings of `kvp-train --source model`: kvp-collect's groups, and the number of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvp.config_groups import AnswerConfig, DataConfig, Group, ModelConfig

SEQUENCES = 100
"""Training sequences where `--sequences` names no number: learning curves are flat from twenty on
(docs/results/training.md)."""


@dataclass(frozen=True, kw_only=True)
class OnlineConfig(Group):
    """Online collection."""

    validation_sequences: int = 40
    """Sequences of the validation split. Those of the training split are --sequences, 100 where it
    names no number; each runs through the model once, and all stay in RAM."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {"validation_sequences": 1}


@dataclass(frozen=True, kw_only=True)
class OnlineSettings(ModelConfig, DataConfig, AnswerConfig, OnlineConfig):
    """Prompts and model of online collection."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens
