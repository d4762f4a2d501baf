"""Records of sequences: written last and atomically, so that their presence commits a sequence."""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from kvp.artifacts.addresses import ObjectPath, Place, files_below
from kvp.errors import StoreError
from kvp.manifest import read_sealed_json, write_sealed_json
from kvp.store.paths import SEQUENCES, record_path
from kvp.store.schema import SequenceRecord
from kvp.store.store_plan import StorePlan

_REQUESTS = 16
"""Records that are fetched from an object store at the same time."""


def commit_record(store: Place, record: SequenceRecord) -> None:
    """Make a sequence visible whose shards are there."""
    write_sealed_json(record_path(store, record.index), {"record": record.to_dict()})


def load_record(store: Place, plan: StorePlan, index: int) -> SequenceRecord:
    """Read the record of a committed sequence.

    Raises:
        StoreError: the sequence is not committed, or its record is damaged; names the file.
    """
    path = record_path(store, index)
    try:
        content = read_sealed_json(path)
    except StoreError:
        if path.exists():
            raise
        raise StoreError(f"{store} has no sequence {index}: {path.name} is missing") from None
    record = SequenceRecord.from_dict(content["record"])
    if record.index != index or index >= plan.sequences or record.length > plan.max_tokens:
        raise StoreError(f"{path} belongs to another store or sequence")
    return record


def load_records(store: Place, plan: StorePlan, indices: Iterable[int]) -> list[SequenceRecord]:
    """`load_record` of several sequences; of an object store many at a time."""
    if not isinstance(store, ObjectPath):
        return [load_record(store, plan, index) for index in indices]
    with ThreadPoolExecutor(_REQUESTS, thread_name_prefix="records") as threads:
        return list(threads.map(lambda index: load_record(store, plan, index), indices))


def has_no_sequence(store: Place) -> bool:
    """Whether a store that was begun can be begun anew without loss."""
    return not any(True for _ in files_below(store / SEQUENCES))


def committed(store: Place) -> list[int]:
    """Indices of the committed sequences, ascending; files of other names are not records."""
    names = (name for name, _ in files_below(store / SEQUENCES))
    return sorted(int(name[:-5]) for name in names if re.fullmatch(r"\d{6,}\.json", name))


def uncommitted(store: Place, indices: Iterable[int]) -> list[int]:
    """Those of some sequences that are not committed, in their order."""
    present = set(committed(store))
    return [index for index in indices if index not in present]
