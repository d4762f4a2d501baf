"""Committing a sequence and checking that a committed one is still there.

A record is written last and atomically; its presence commits the sequence. It holds the size and
the SHA-256 of every shard, because zarr reads a missing shard as zeros without an error.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.store.paths import record_path, shard_path
from kvp.store.schema import SequenceRecord
from kvp.store.store_plan import StorePlan


def commit_record(store: Path, plan: StorePlan, record: SequenceRecord) -> None:
    """Make a sequence visible whose shards are on disk."""
    shards = {}
    for array in plan.arrays:
        path = shard_path(store, array, record.index)
        shards[array] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    content = {"record": record.to_dict(), "shards": shards}
    write_sealed_json(record_path(store, record.index), content)


def load_record(
    store: Path, plan: StorePlan, index: int, *, checksums: bool = False
) -> SequenceRecord:
    """Read the record of a committed sequence and check that its shards have their size.

    Args:
        store: store directory.
        plan: its plan.
        index: sequence.
        checksums: also compare every shard's SHA-256 (reads all bytes).

    Raises:
        StoreError: the sequence is not committed, its record is damaged, or a shard is missing,
            truncated or (with `checksums`) altered; the message names the file.
    """
    path = record_path(store, index)
    if not path.exists():
        raise StoreError(f"{store} has no sequence {index}: {path.name} is missing")
    content = read_sealed_json(path)
    try:
        record = SequenceRecord.from_dict(content["record"])
        facts = {
            array: (int(content["shards"][array]["bytes"]), str(content["shards"][array]["sha256"]))
            for array in plan.arrays
        }
    except (KeyError, TypeError, ValueError) as problem:
        raise StoreError(f"{path} is damaged: {problem}") from None
    if record.index != index or index >= plan.sequences or record.length > plan.max_tokens:
        raise StoreError(f"{path} belongs to another store or sequence")
    for array, (size, digest) in facts.items():
        shard = shard_path(store, array, index)
        if not shard.is_file():
            raise StoreError(f"{shard} is missing; delete {path} to collect this sequence again")
        if shard.stat().st_size != size:
            raise StoreError(
                f"{shard} is damaged: {shard.stat().st_size} bytes instead of {size}; "
                f"delete {path} to collect this sequence again"
            )
        if checksums and sha256_file(shard) != digest:
            raise StoreError(f"{shard} is damaged: its checksum does not match its record")
    return record


def has_no_sequence(store: Path) -> bool:
    """Whether a store that was begun can be begun anew without loss."""
    return not any(record_path(store, 0).parent.glob("*"))


def committed(store: Path) -> list[int]:
    """Indices of the committed sequences, ascending; files of other names are not records."""
    names = (path.name for path in record_path(store, 0).parent.glob("*.json"))
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{6,}\.json", name))
