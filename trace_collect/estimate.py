"""Bytes and hours of a store before any work."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal
from transformers import PreTrainedConfig

from kvp.geometry import Geometry
from kvp.hf import geometry_of
from kvp.store import GridDtype, StoreKind, planned_bytes
from trace_collect.config import CollectConfig

_COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""


@dataclass(frozen=True, kw_only=True)
class StoreEstimate:
    """Upper bounds: every prompt as long as allowed, every continuation too."""

    geometry: Geometry
    dtype: str
    sequences: int
    tokens: int
    """Tokens of all sequences."""
    store: StoreKind = "qkv"
    """Tensors kept next to keys and values."""
    grid: int = 0
    """Compression points of an importance grid, 0 in a store without."""
    grid_dtype: GridDtype = "float16"
    grid_labels: int = 1
    """Labels that the grid holds at all of its points."""
    labels: int = 0
    """Labels kept per token."""

    @property
    def key_bytes(self) -> int:
        """Bytes of all keys; the values have as many."""
        return planned_bytes(self.geometry, dtype=self.dtype, tokens=self.tokens, store="kv") // 2

    @property
    def query_bytes(self) -> int:
        """Bytes of all queries, whether or not they are kept."""
        return self.key_bytes * self.geometry.group

    @property
    def grid_bytes(self) -> int:
        """Bytes of all importance grids, 0 in a store without."""
        if self.store != "importance":
            return 0
        return self._planned(self.store) - self._planned("kv")

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors, grids and labels before compression."""
        return self._planned(self.store)

    @property
    def share(self) -> float:
        """Raw bytes over those of a store with queries."""
        return self.raw_bytes / self._planned("qkv")

    def _planned(self, store: StoreKind) -> int:
        return planned_bytes(
            self.geometry,
            dtype=self.dtype,
            tokens=self.tokens,
            store=store,
            grid=self.grid,
            grid_dtype=self.grid_dtype,
            grid_labels=self.grid_labels,
            labels=self.labels,
        )

    @property
    def label_bytes(self) -> int:
        """Bytes of all labels."""
        return self.tokens * self.geometry.total_kv_heads * 4 * self.labels

    @property
    def disk_bytes(self) -> int:
        """Bytes expected on disk."""
        return round(self.raw_bytes * _COMPRESSED[self.dtype])

    def lines(self, rate: float | None) -> list[str]:
        """What to tell the user; `rate` in tokens per second, if known."""
        parts = {"queries": self.query_bytes} if self.store == "qkv" else {}
        parts |= {"keys": self.key_bytes, "values": self.key_bytes}
        parts |= {"importance": self.grid_bytes} if self.store == "importance" else {}
        parts |= {"labels": self.label_bytes} if self.labels else {}
        named = ", ".join(f"{name} {decimal(count)}" for name, count in parts.items())
        lines = [
            f"{self.sequences} sequences, at most {self.tokens} tokens; {self.geometry}, "
            f"{self.dtype}",
            f"at most {decimal(self.raw_bytes)}: {named}; about "
            f"{decimal(self.disk_bytes)} on disk after lossless compression",
        ]
        if self.store != "qkv":
            floor = 2 / (self.geometry.group + 2)
            lines.append(
                f"{self.share:.3f} of the bytes with queries (keys and values alone: {floor:.3f})"
            )
        if self.share > 1:
            lines.append(
                f"warning: --store {self.store} is larger than --store qkv for this model; take "
                "qkv, fewer --grid_labels, or a smaller --grid"
            )
        if rate is not None:
            lines.append(f"about {duration(self.tokens / rate)} at {rate:.0f} tokens/s")
        return lines


def estimate(config: CollectConfig, model: PreTrainedConfig, sequences: int) -> StoreEstimate:
    """Estimate the bytes of `sequences` sequences of a configuration."""
    return StoreEstimate(
        geometry=geometry_of(model),
        dtype=config.dtype,
        sequences=sequences,
        tokens=sequences * config.max_tokens,
        store=config.store,
        grid=config.grid_points,
        grid_dtype=config.grid_dtype,
        grid_labels=len(config.trained_labels),
        labels=len(config.label_list),
    )


def duration(seconds: float) -> str:
    """A time span for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
