"""Committing a sequence and checking that a committed one is still there.

A record is written last and atomically; its presence commits the sequence. It holds the size of
every shard, so that what is missing or cut off is known before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from kvp.artifacts.addresses import ObjectPath, Place, files_below, size_of
from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.store.paths import SEQUENCES, record_path, shard_name, shard_path
from kvp.store.schema import SequenceRecord
from kvp.store.store_plan import StorePlan

_REQUESTS = 16
"""Records that are fetched from an object store at the same time."""


def commit_record(store: Place, record: SequenceRecord, sizes: Mapping[str, int]) -> None:
    """Make a sequence visible whose shards are there: bytes of each, by array."""
    shards = {array: {"bytes": size} for array, size in sizes.items()}
    content = {"record": record.to_dict(), "shards": shards}
    write_sealed_json(record_path(store, record.index), content)


def load_record(
    store: Place,
    plan: StorePlan,
    index: int,
    *,
    sizes: Mapping[str, int] | None = None,
) -> SequenceRecord:
    """Read the record of a committed sequence and check that its shards have their size.

    Args:
        store: store directory.
        plan: its plan.
        index: sequence.
        sizes: bytes of the shards that are there, by `array/name`; asked for each otherwise.

    Raises:
        StoreError: the sequence is not committed, its record is damaged, or a shard is missing
            or cut off; the message names the file.
    """
    path = record_path(store, index)
    try:
        content = read_sealed_json(path)
    except StoreError:
        if path.exists():
            raise
        raise StoreError(f"{store} has no sequence {index}: {path.name} is missing") from None
    try:
        record = SequenceRecord.from_dict(content["record"])
        written = {array: int(content["shards"][array]["bytes"]) for array in plan.arrays}
    except (KeyError, TypeError, ValueError) as problem:
        raise StoreError(f"{path} is damaged: {problem}") from None
    if record.index != index or index >= plan.sequences or record.length > plan.max_tokens:
        raise StoreError(f"{path} belongs to another store or sequence")
    for array, size in written.items():
        shard = shard_path(store, array, index)
        name = f"{array}/{shard_name(array, index)}"
        there = size_of(shard) if sizes is None else sizes.get(name)
        if there is None:
            raise StoreError(f"{shard} is missing; delete {path} to collect this sequence again")
        if there != size:
            raise StoreError(
                f"{shard} is damaged: {there} bytes instead of {size}; "
                f"delete {path} to collect this sequence again"
            )
    return record


def load_records(store: Place, plan: StorePlan, indices: Iterable[int]) -> list[SequenceRecord]:
    """`load_record` of several sequences; of an object store many at a time."""
    if not isinstance(store, ObjectPath):
        return [load_record(store, plan, index) for index in indices]
    sizes = {
        f"{array}/{name}": size
        for array in plan.arrays
        for name, size in files_below(store / array)
    }
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="records") as threads:
        return list(
            threads.map(lambda index: load_record(store, plan, index, sizes=sizes), indices)
        )


def has_no_sequence(store: Place) -> bool:
    """Whether a store that was begun can be begun anew without loss."""
    return not any(True for _ in files_below(store / SEQUENCES))


def committed(store: Place) -> list[int]:
    """Indices of the committed sequences, ascending; files of other names are not records."""
    names = (name for name, _ in files_below(store / SEQUENCES))
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{6,}\.json", name))
