"""Bytes of a store, and of the memory that collecting it takes, before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.filesize import decimal
from transformers import PreTrainedConfig

from kvp.config_groups import split_list
from kvp.costs import AT_WORK, COMPRESSED
from kvp.geometry import Geometry
from kvp.hf import geometry_of
from kvp.hf.model_size import running_bytes
from kvp.store import GridDtype, StoreKind, planned_bytes
from trace_collect.collection import batch_size_of
from trace_collect.config import CollectConfig


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
    grid: int = CollectConfig.grid
    """Compression points of an importance grid, in a store with one."""
    grid_dtype: GridDtype = "float16"
    grid_labels: int = 1
    """Labels that the grid holds at all of its points."""
    labels: int = 0
    """Labels kept per token."""

    @property
    def raw_bytes(self) -> int:
        """Bytes of all tensors, grids and labels before compression."""
        return planned_bytes(
            self.geometry,
            dtype=self.dtype,
            tokens=self.tokens,
            store=self.store,
            grid=self.grid,
            grid_dtype=self.grid_dtype,
            grid_labels=self.grid_labels,
            labels=self.labels,
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes expected on disk."""
        return round(self.raw_bytes * COMPRESSED[self.dtype])

    def lines(self) -> list[str]:
        """What to tell the user: bytes of this store, and of the others with the same sequences."""
        stores: tuple[StoreKind, ...] = ("qkv", "importance", "kv")
        others = [replace(self, store=store) for store in stores if store != self.store]
        named = ", ".join(f"{decimal(one.disk_bytes)} with --store {one.store}" for one in others)
        lines = [
            f"{self.sequences} sequences, at most {self.tokens} tokens; {self.geometry}, "
            f"{self.dtype}",
            f"at most {decimal(self.raw_bytes)}, about {decimal(self.disk_bytes)} on disk after "
            f"lossless compression ({named})",
        ]
        if self.store == "importance" and self.raw_bytes > others[0].raw_bytes:
            lines.append(
                "warning: --store importance is larger than --store qkv for this model; take qkv, "
                "fewer --grid_labels, or a smaller --grid"
            )
        return lines


def estimate(config: CollectConfig, model: PreTrainedConfig, sequences: int) -> StoreEstimate:
    """Estimate the bytes of `sequences` sequences of a configuration."""
    return StoreEstimate(
        geometry=geometry_of(model),
        dtype=config.dtype,
        sequences=sequences,
        tokens=sequences * config.max_tokens,
        store=config.store,
        grid=config.grid,
        grid_dtype=config.grid_dtype,
        grid_labels=len(split_list(config.grid_labels)),
        labels=len(config.label_list),
    )


def collecting_bytes(config: CollectConfig, model: PreTrainedConfig) -> tuple[int, int]:
    """Peak bytes where the model runs, and of RAM beside it.

    Queries of prompts that are being answered wait in RAM, or where the model runs if a grid needs
    them; two sequences are on their way to the disk.
    """
    one = estimate(config, model, 1)
    together = batch_size_of(config, model) if config.answers == "model" else 0
    kv, qkv = (replace(one, store=store, labels=0).raw_bytes for store in ("kv", "qkv"))
    waiting = together * (qkv - kv)
    running = running_bytes(
        model,
        dtype=config.dtype,
        quantization=config.quantization,
        tokens=config.max_tokens,
        together=together,
    )
    beside = 2 * one.raw_bytes + AT_WORK
    if config.store == "importance":
        return running + waiting + 2 * (one.raw_bytes - kv), beside
    return running, beside + waiting
