"""`kvp store subset`: some sequences of a store as a store of their own, renumbered in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from kvp.artifacts.addresses import place
from kvp.errors import StoreError
from kvp.store import SequenceRecord
from trace_collect.store_tools.config import SubsetConfig
from trace_collect.store_tools.copying import NewStore, write_store
from trace_collect.store_tools.source_stores import (
    SourceStore,
    derived_identity,
    derived_manifest,
    open_source,
    ranges,
    split_counts,
)


def run(config: SubsetConfig) -> None:
    """Write the subset; raises StoreError as `open_source` and `write_store`."""
    whole = open_source(config.traces, config.out, allow_incomplete=config.allow_incomplete)
    records = chosen(whole.records, config)
    source = SourceStore(whole.reader, tuple(records))
    identity = source.identity
    if isinstance(identity.get("data"), dict):
        identity["data"] = {**identity["data"], "sequences": split_counts(records)}
    identity = derived_identity("subset", identity, [source])
    write_store(
        NewStore(
            out=place(config.out),
            plan=replace(whole.reader.plan, sequences=len(records)),
            manifest=derived_manifest(asdict(config), identity, [source]),
            sequences={at: (whole.reader, record) for at, record in enumerate(records)},
        )
    )


def chosen(records: Sequence[SequenceRecord], config: SubsetConfig) -> list[SequenceRecord]:
    """The records that the flags name, in order; StoreError where there are not as many."""
    if config.index_set is not None:
        absent = sorted(config.index_set - {record.index for record in records})
        if absent:
            raise StoreError(f"--indices: {config.traces} has no sequence {ranges(absent)}")
        records = [record for record in records if record.index in config.index_set]
    available = split_counts(records)
    for split, count in config.counts.items():
        if count is not None and count > available[split]:
            raise StoreError(
                f"--{split} {count}: {config.traces} has {available[split]} sequences of that split"
            )
    taken: Counter[str] = Counter()
    result = []
    for record in records:
        limit = config.counts.get(record.split)
        if limit is None or taken[record.split] < limit:
            taken[record.split] += 1
            result.append(record)
    if not result:
        raise StoreError(f"--train, --validation and --test leave no sequence of {config.traces}")
    return result
