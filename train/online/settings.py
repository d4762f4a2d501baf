"""Settings of `kvp-train --source model`: kvp-collect's groups, and the buffer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kvp.config_groups import AnswerConfig, DataConfig, Group, ModelConfig

RECORDED_AS = {
    "answers": "continuation",
    "validation_sequences": "validation",
    "epochs_per_sequence": "visits",
}
"""Setting -> its key in the files of a run, where that is an earlier name."""


@dataclass(frozen=True, kw_only=True)
class BufferConfig(Group):
    """Online collection."""

    validation_sequences: int = 40
    """Sequences of the validation split, held all the time."""
    buffer: int = 64
    """Training sequences held in RAM at a time."""
    epochs_per_sequence: int = 8
    """Passes over a training sequence until a new one takes its place."""

    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "validation_sequences": 1,
        "buffer": 1,
        "epochs_per_sequence": 1,
    }


@dataclass(frozen=True, kw_only=True)
class OnlineSettings(ModelConfig, DataConfig, AnswerConfig, BufferConfig):
    """What runs through the model, and how much of it is held."""

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON, with the names that files keep."""
        return {RECORDED_AS.get(name, name): value for name, value in asdict(self).items()}
