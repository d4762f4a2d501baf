"""Paths in a trace store (`docs/formats.md`)."""

from __future__ import annotations

from kvp.artifacts.addresses import Place
from kvp.store.schema import is_label

MANIFEST = "manifest.json"
SEQUENCES = "sequences"
OUTPUT = "output_gram.safetensors"


def shard_name(array: str, index: int) -> str:
    """Name of the file that holds one sequence of an array."""
    axes = {"q": 6}.get(array, 4 if is_label(array) else 5)
    return ".".join(["c", str(index), *["0"] * (axes - 1)])


def shard_path(store: Place, array: str, index: int) -> Place:
    """File that holds one sequence of an array."""
    return store / array / shard_name(array, index)


def record_path(store: Place, index: int) -> Place:
    """File whose presence commits a sequence."""
    return store / SEQUENCES / f"{index:06d}.json"
