"""Settings of `kvp-train --source model`: kvp-collect's words for what to run, and the buffer's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvp.cli import split_list

Continuation = Literal["model", "reference"]
DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """What runs through the model, and how much of it is held."""

    model: str = "nano"
    """`nano` (bundled), a local folder or a hub id."""
    revision: str | None = None
    """Hub revision of the model."""
    dtype: DtypeName = "float32"
    """Dtype of the model and of what the buffer holds."""
    data: str = "ruler"
    """`ruler`, `chat`, a file ending in `.jsonl` or a hub data set."""
    tasks: str = "ruler"
    """RULER tasks, comma separated, taken in turn; `ruler` for all that fit into `length`."""
    length: int = 512
    """Most prompt tokens, chat template included; the continuation comes on top."""
    essays: str | None = None
    """Text file or folder for the essay haystack, instead of generated prose."""
    continuation: Continuation = "model"
    """What follows the prompt: the model's own greedy answer, or the data's."""
    max_new_tokens: int = 128
    """Most tokens of a continuation."""
    validation: int = 40
    """Sequences of the validation split, held all the time."""
    buffer: int = 64
    """Training sequences held at a time."""
    visits: int = 8
    """Visits of a sequence until a new one takes its place."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        for flag in ("length", "max_new_tokens", "validation", "buffer", "visits"):
            if getattr(self, flag) < 1:
                raise ValueError(f"--{flag} must be at least 1, got {getattr(self, flag)}")
        if not self.task_list:
            raise ValueError("--tasks is empty")

    @property
    def task_list(self) -> tuple[str, ...]:
        """Task names in order, without repeats."""
        return split_list(self.tasks)

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        return asdict(self)
