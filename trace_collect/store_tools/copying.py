"""Writing a new store out of sequences of others: whole sequences, continued after any kill."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.filesize import decimal
from torch import Tensor

from kvp.artifacts.addresses import Place, files_below, size_of
from kvp.artifacts.disk_space import check_disk
from kvp.progress import Progress
from kvp.store import SequenceRecord, StorePlan, Trace, TraceReader, TraceWriter
from kvp.store.paths import shard_path
from kvp.store.sequence_records import committed


@dataclass(frozen=True, kw_only=True)
class NewStore:
    """A store that is to be written."""

    out: Place
    plan: StorePlan
    manifest: Mapping[str, Any]
    sequences: Mapping[int, tuple[TraceReader, SequenceRecord]]
    """Index in the new store -> where the sequence is read."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Index in the new store -> the sequence's new id, where it is not the old one."""
    change: Callable[[Trace], Trace] = lambda trace: trace
    """What becomes of a trace on its way."""
    extra_bytes: Callable[[SequenceRecord], int] = lambda _: 0
    """Bytes of a sequence that its old store does not have, at most."""


def write_store(new: NewStore) -> None:
    """Write every sequence that is not there yet; prints what is there at the end.

    Raises StoreError where the folder holds something else, the disk is too small, or a sequence
    that is read is damaged.
    """
    there = set(committed(new.out))
    wanted = [index for index in sorted(new.sequences) if index not in there]
    check_disk(new.out, sum(_bytes(new, *new.sequences[index]) for index in wanted))
    gram = _output_gram(new)
    with TraceWriter.create_or_resume(new.out, new.plan, new.manifest, gram) as writer:
        missing = [index for index in writer.missing() if index in new.sequences]
        done = len(new.sequences) - len(missing)
        if done:
            print(f"{new.out}: {done} of {len(new.sequences)} sequences are there")
        with Progress("copying", len(new.sequences), completed=done) as progress:
            for index in missing:
                reader, record = new.sequences[index]
                trace = new.change(reader.trace(record.index))
                name = new.names.get(index, record.id)
                writer.write(replace(trace, record=replace(trace.record, index=index, id=name)))
                progress.advance()
    size = sum(size for _, size in files_below(new.out))
    print(f"{new.out}: {len(new.sequences)} sequences, {decimal(size)}")
    print(f"next: kvp store verify {shlex.quote(str(new.out))}")


def _bytes(new: NewStore, reader: TraceReader, record: SequenceRecord) -> int:
    """Bytes of one sequence on disk: of the arrays that are copied, and what is added."""
    copied = set(reader.plan.arrays) & set(new.plan.arrays)
    shards = (shard_path(reader.path, array, record.index) for array in copied)
    return sum(size_of(shard) or 0 for shard in shards) + new.extra_bytes(record)


def _output_gram(new: NewStore) -> Tensor | None:
    """Gram matrices of the first store that has them; all are of one model."""
    readers = {reader.path: reader for reader, _ in new.sequences.values()}
    grams = (reader.output_gram() for reader in readers.values())
    return next((gram for gram in grams if gram is not None), None)
