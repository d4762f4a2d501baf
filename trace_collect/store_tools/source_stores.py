"""Stores that others are made of: opened, checked, and described in what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvp.artifacts.addresses import place
from kvp.errors import StoreError
from kvp.manifest import digest_json, read_json, run_manifest
from kvp.store import SequenceRecord, TraceReader
from kvp.store.paths import record_path

DERIVED = "derived"
"""Entry of an identity: which tool made the store, and a digest of what it was made of."""


@dataclass(frozen=True)
class SourceStore:
    """A store and the sequences of it that are copied."""

    reader: TraceReader
    records: tuple[SequenceRecord, ...]

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the store's content."""
        return dict(self.reader.manifest["identity"])

    def digest(self) -> str:
        """Digest of the store's identity and of every byte of the sequences that are copied."""
        reader, indices = self.reader, [record.index for record in self.records]
        seals = [read_json(record_path(reader.path, index))["sha256"] for index in indices]
        return digest_json([self.identity, reader.plan.to_dict(), seals])

    def description(self) -> dict[str, Any]:
        """What a store made of this one says about it; JSON."""
        kept = ("identity", "command", "created", "kvp", "sources")
        manifest = self.reader.manifest
        return {
            "path": str(self.reader.path),
            "sequences": ranges([record.index for record in self.records]),
            **{name: manifest[name] for name in kept if name in manifest},
        }


def open_source(path: str, out: str, *, allow_incomplete: bool) -> SourceStore:
    """A store with all of its sequences.

    Raises StoreError where it is damaged, holds nothing, is incomplete without `allow_incomplete`,
    or is the folder that is to be written.
    """
    if place(path).resolve() == place(out).resolve():
        raise StoreError(f"--out {out} is the store that is read; name a new folder")
    reader = TraceReader(path)
    records = reader.records()
    if not records:
        raise StoreError(f"{path} holds no sequence")
    if not reader.complete and not allow_incomplete:
        missing = reader.plan.sequences - len(records)
        raise StoreError(
            f"{path} lacks {missing} of {reader.plan.sequences} sequences; let kvp-collect finish, "
            "or pass --allow_incomplete"
        )
    return SourceStore(reader, records)


def derived_manifest(
    settings: Mapping[str, Any], identity: Mapping[str, Any], sources: Sequence[SourceStore]
) -> dict[str, Any]:
    """Manifest of a store made of others, of which the first names the model.

    `settings` are those of the tool, `identity` is that of the new store.
    """
    first = sources[0].reader.manifest
    shared = {name: first[name] for name in ("model", "rope_frequencies") if name in first}
    manifest = run_manifest(
        settings,
        seed=first.get("seed", 0),
        identity=dict(identity),
        sources=[source.description() for source in sources],
        **shared,
    )
    return manifest | {"seed": identity.get("seed", manifest["seed"])}


def derived_identity(
    tool: str, identity: Mapping[str, Any], sources: Sequence[SourceStore]
) -> dict[str, Any]:
    """`identity` with the name of the tool and a digest of all that it reads."""
    made_of = digest_json([source.digest() for source in sources])
    return {**identity, DERIVED: {"by": tool, "of": made_of}}


def split_counts(records: Sequence[SequenceRecord]) -> dict[str, int]:
    """Sequences of each split."""
    splits = [record.split for record in records]
    return {split: splits.count(split) for split in ("train", "validation", "test")}


def ranges(indices: Sequence[int]) -> str:
    """Ascending numbers in short, `0-4,7`."""
    if not indices:
        return ""
    breaks = [at for at, (low, high) in enumerate(pairwise(indices), 1) if high != low + 1]
    bounds = pairwise([0, *breaks, len(indices)])
    parts = [(indices[start], indices[stop - 1]) for start, stop in bounds]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
