"""Settings of `kvp-train --source model`: kvp-collect's words for what to run, and the buffer's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvp.cli import split_list

Answers = Literal["model", "reference"]
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
    """Maximum prompt tokens, chat template included; the answer comes on top."""
    essays: str | None = None
    """Text file or folder for the essay haystack, instead of generated prose."""
    answers: Answers = "model"
    """What follows the prompt: model (the model's own greedy answer) or reference (the data's)."""
    max_new_tokens: int = 128
    """Maximum tokens of an answer; RULER tasks stop at their own number."""
    validation_sequences: int = 40
    """Sequences of the validation split, held in RAM all the time."""
    buffer: int = 64
    """Training sequences held in RAM at a time."""
    epochs_per_sequence: int = 8
    """Epochs that a training sequence takes part in until a new one replaces it."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the flag that cannot work."""
        for flag in (
            "length",
            "max_new_tokens",
            "validation_sequences",
            "buffer",
            "epochs_per_sequence",
        ):
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
