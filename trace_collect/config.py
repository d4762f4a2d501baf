"""Settings of kvp-collect and kvp store, and the checks that need no model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvp.config_groups import (
    AnswerConfig,
    DataConfig,
    DryRunConfig,
    Group,
    ModelConfig,
    RunConfig,
    WorkersConfig,
    split_list,
)

GRID_LABELS = ("future_attention", "max_future_attention", "max_reply_attention")
"""As `kvp.store.GRIDS`, without torch."""
SPLITS = ("train", "validation", "test")
STORED_LABELS = ("kvzip", "kvzip_plus")
"""As `kvp.store.STORED_LABELS`, without torch."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig(DataConfig, AnswerConfig, ModelConfig, RunConfig, WorkersConfig, DryRunConfig):
    """Which samples are collected, and which tensors are stored."""

    out: str
    """What is written. A trace store: new, empty, or an interrupted one of the same settings, which
    is continued. Several processes may write one store together. A folder, or an address such as
    s3://bucket/folder."""
    train: int = 200
    """Sequences of the train split."""
    validation: int = 40
    """Sequences of the validation split, which training is validated on."""
    test: int = 0
    """Sequences of the test split."""
    store: Literal["qkv", "kv", "importance"] = "qkv"
    """What to keep: queries, keys and values (qkv, for everything); `importance`, for training
    alone and a fraction of the bytes: in place of queries the label of --grid_labels, exact at the
    compression points of a grid; or keys and values (kv)."""
    grid: int = 48
    """Points of the importance grid of each sequence, both compression boundaries among them."""
    grid_labels: str = "max_reply_attention"
    """Labels that can be trained on the grid, comma separated, some of future_attention,
    max_future_attention and max_reply_attention, the default of kvp-train. Each takes its bytes;
    the grid holds the others at four points, for evaluation and calibration."""
    grid_dtype: Literal["float16", "float32"] = "float16"
    """Dtype of the grid; float16 keeps it to 1e-3 of each value."""
    labels: str = ""
    """What else to store for every prompt token, for `kvp-train --label`, comma separated: kvzip,
    kvzip_plus (each an extra pass over the prompt)."""
    batch_size: int | None = None
    """Prompts whose answers are decoded together; the traces do not depend on it. Without it as
    many as fit into 4 GiB with their queries, keys and values, at most 16."""

    VISIBLE: ClassVar[tuple[str, ...]] = (
        "out", "model", "dtype", "quantization", "device", "data", "where", "tasks",
        "length", "answers", "max_new_tokens", "train", "validation", "test", "store",
        "grid", "labels", "batch_size", "engine", "workers", "seed", "dry_run",
    )  # fmt: skip
    ADDRESSES: ClassVar[tuple[str, ...]] = ("out",)
    MINIMUMS: ClassVar[Mapping[str, float]] = {
        "train": 0,
        "validation": 0,
        "test": 0,
        "grid": 2,
        "batch_size": 1,
    }

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, on settings that cannot work."""
        super().__post_init__()
        if not self.sequences:
            raise ValueError("--train, --validation and --test are all 0: nothing to collect")
        for label in split_list(self.labels):
            if label not in STORED_LABELS:
                raise ValueError(f"--labels: no label {label!r}; use {', '.join(STORED_LABELS)}")
        for label in split_list(self.grid_labels) or ("",):
            if label not in GRID_LABELS:
                raise ValueError(
                    f"--grid_labels: no label {label!r}; use some of {', '.join(GRID_LABELS)}"
                )

    @property
    def label_list(self) -> tuple[str, ...]:
        """Labels of `--labels`, in the order of `STORED_LABELS`."""
        return tuple(label for label in STORED_LABELS if label in split_list(self.labels))

    @property
    def grid_points(self) -> int:
        """Points of the importance grid, 0 where none is stored."""
        return self.grid if self.store == "importance" else 0

    @property
    def trained_labels(self) -> tuple[str, ...]:
        """Labels at all points of the grid, none where no grid is stored."""
        named = split_list(self.grid_labels) if self.store == "importance" else ()
        return tuple(label for label in GRID_LABELS if label in named)

    @property
    def counts(self) -> dict[str, int]:
        """Requested sequences by split."""
        return {split: getattr(self, split) for split in SPLITS}

    @property
    def sequences(self) -> int:
        """Requested sequences."""
        return sum(self.counts.values())

    @property
    def max_tokens(self) -> int:
        """Longest sequence, tokens."""
        return self.length + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class InspectConfig(Group):
    """Inspect."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect. In a folder or at an address."""
    json: bool = False
    """Print one JSON object instead of YAML."""

    ADDRESSES: ClassVar[tuple[str, ...]] = ("traces",)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Group):
    """Verify."""

    traces: str = field(kw_only=False)
    """Trace store written by kvp-collect. In a folder or at an address."""
    allow_incomplete: bool = False
    """Use a store whose collection has not finished."""

    ADDRESSES: ClassVar[tuple[str, ...]] = ("traces",)
