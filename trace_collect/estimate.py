"""Bytes of a store, and of the memory that collecting it takes, before any work."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

from rich.filesize import decimal
from transformers import PreTrainedConfig

from kvp.artifacts.addresses import ObjectPath, Place
from kvp.costs import AT_WORK, COMPRESSED
from kvp.errors import StoreError
from kvp.geometry import Geometry
from kvp.hf import geometry_of
from kvp.hf.model_size import running_bytes
from kvp.store import StoreKind, planned_bytes
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
            labels=self.labels,
        )

    @property
    def disk_bytes(self) -> int:
        """Bytes expected on disk."""
        return round(self.raw_bytes * COMPRESSED[self.dtype])

    def lines(self) -> list[str]:
        """What to tell the user: bytes of this store, and of the others with the same sequences."""
        stores: tuple[StoreKind, ...] = ("qkv", "kv")
        others = [replace(self, store=store) for store in stores if store != self.store]
        named = ", ".join(f"{decimal(one.disk_bytes)} with --store {one.store}" for one in others)
        return [
            f"{self.sequences} sequences, at most {self.tokens} tokens; {self.geometry}, "
            f"{self.dtype}",
            f"at most {decimal(self.raw_bytes)}, about {decimal(self.disk_bytes)} on disk after "
            f"lossless compression ({named})",
        ]


def estimate(config: CollectConfig, model: PreTrainedConfig, sequences: int) -> StoreEstimate:
    """Estimate the bytes of `sequences` sequences of a configuration."""
    return StoreEstimate(
        geometry=geometry_of(model),
        dtype=config.dtype,
        sequences=sequences,
        tokens=sequences * config.max_tokens,
        store=config.store,
        labels=len(config.label_list),
    )


def collecting_bytes(config: CollectConfig, model: PreTrainedConfig) -> tuple[int, int]:
    """Peak bytes where the model runs, and of RAM beside it, where four sequences wait."""
    running = running_bytes(
        model,
        dtype=config.dtype,
        quantization=config.quantization,
        tokens=config.max_tokens,
        together=batch_size_of(config, model) if config.answers == "model" else 0,
    )
    return running, 4 * estimate(config, model, 1).raw_bytes + AT_WORK


def check_disk(path: Place, needed: int) -> None:
    """Raise StoreError when the disk that `path` will be on has fewer than `needed` bytes left.

    An object store has no such limit.
    """
    if isinstance(path, ObjectPath):
        return
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"--out {path}: about {decimal(needed)} to write, {decimal(free)} free on that disk"
        )
