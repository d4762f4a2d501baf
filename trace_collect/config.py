"""Settings of kvp-collect and the checks that need no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvp.cli import split_list

SPLITS = ("train", "validation", "test")
LABELS = ("kvzip", "kvzip_plus")
"""As `kvp.store.LABELS`, without torch."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """Settings of one collection."""

    out: str
    """Trace store: new, empty, or an interrupted one of the same settings, which is continued."""
    model: str = "nano"
    """`nano` (bundled), a local folder or a hub id."""
    revision: str | None = None
    """Hub revision of the model."""
    data: str = "ruler"
    """`ruler`, `chat` (generated dialogues), a file ending in `.jsonl` or a hub data set (`NAME` or
    `NAME:CONFIGURATION`), with a column `text` or `messages`."""
    tasks: str = "ruler"
    """RULER tasks, comma separated, taken in turn; `ruler` for all that fit into `length`."""
    length: int = 512
    """Most prompt tokens, chat template included; the continuation comes on top."""
    train: int = 200
    """Sequences of the train split."""
    validation: int = 40
    """Sequences of the validation split, which training measures itself on."""
    test: int = 0
    """Sequences of the test split."""
    essays: str | None = None
    """Text file or folder of `.txt` files for the essay haystack, instead of generated prose."""
    continuation: Literal["model", "reference"] = "model"
    """What follows the prompt: the model's own greedy answer, or the data's."""
    max_new_tokens: int = 128
    """Most tokens of a continuation; RULER tasks stop at their own number."""
    store: Literal["qkv", "kv", "importance"] = "qkv"
    """What to keep: queries, keys and values (qkv, for everything); for training alone `importance`
    in place of queries: the attention that tokens receive, exact at the cuts of a grid, for a
    fraction of the bytes (kvp-train then needs --label future_attention); or keys and values
    (kv)."""
    grid: int = 48
    """Cuts of the importance grid of each sequence, both compression boundaries among them."""
    grid_dtype: Literal["float16", "float32"] = "float16"
    """What the grid is stored in; float16 keeps it to 1e-3 of each value."""
    labels: str = ""
    """What else to store for every prompt token, for `kvp-train --label`, comma separated: kvzip,
    kvzip_plus (each an extra pass over the prompt)."""
    seed: int = 0
    """Seed of everything that is generated and of the order of a file."""
    device: str = "cpu"
    """Torch device."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Model and trace dtype."""
    dry_run: bool = False
    """Print what would be written, and how long it would take, from the model's configuration."""
    rate: float | None = None
    """Tokens per second for the dry run's time; measured on a sequence where weights are local."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, on settings that cannot work."""
        for flag in SPLITS:
            if getattr(self, flag) < 0:
                raise ValueError(f"--{flag} must not be negative, got {getattr(self, flag)}")
        for flag, least in {"length": 1, "max_new_tokens": 1, "grid": 2}.items():
            if getattr(self, flag) < least:
                raise ValueError(f"--{flag} must be at least {least}, got {getattr(self, flag)}")
        if not self.sequences:
            raise ValueError("--train, --validation and --test are all 0: nothing to collect")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"--rate must be positive, got {self.rate}")
        if not self.task_list:
            raise ValueError("--tasks is empty")
        for label in self.label_list:
            if label not in LABELS:
                raise ValueError(f"--labels: no label {label!r}; use {', '.join(LABELS)}")

    @property
    def task_list(self) -> tuple[str, ...]:
        """Task names in order, without repeats."""
        return split_list(self.tasks)

    @property
    def label_list(self) -> tuple[str, ...]:
        """Labels in the order of `LABELS`; unknown ones last."""
        named = split_list(self.labels)
        known = tuple(label for label in LABELS if label in named)
        return (*known, *(label for label in named if label not in LABELS))

    @property
    def cuts(self) -> int:
        """Cuts of the importance grid, 0 where none is stored."""
        return self.grid if self.store == "importance" else 0

    @property
    def counts(self) -> dict[str, int]:
        """Sequences asked for, by split."""
        return {split: getattr(self, split) for split in SPLITS}

    @property
    def sequences(self) -> int:
        """Sequences asked for."""
        return sum(self.counts.values())

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens
