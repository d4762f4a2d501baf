"""`kvp store verify`: every check of docs/formats.md on every byte, and how to mend what failed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvp.artifacts.addresses import Place, place
from kvp.errors import StoreError
from kvp.progress import Progress
from kvp.store import GRIDS, SequenceRecord, Trace, TraceReader
from kvp.store.paths import record_path
from kvp.store.sequence_records import committed, load_record
from trace_collect.store_tools.config import SPLITS, VerifyConfig
from trace_collect.store_tools.inspection import ranges

_FIRST = 3
"""Records that the last message names."""


@dataclass
class Findings:
    """What is wrong with a store, by sequence."""

    damaged: dict[int, str] = field(default_factory=dict)
    """Index -> what is wrong, in one line."""
    missing: list[int] = field(default_factory=list)
    """Planned sequences that are not committed."""


def run(config: VerifyConfig) -> None:
    """Print a line per damaged sequence.

    Raises StoreError at the end where a sequence is damaged, or missing without
    `allow_incomplete`; at once where the store's own metadata are damaged.
    """
    path = place(config.traces)
    try:
        reader = TraceReader(path)
        reader.output_gram()
    except StoreError as problem:
        raise StoreError(f"{problem}{_unreadable(path)}") from None
    found = verify(reader)
    for index, damage in found.damaged.items():
        print(f"sequence {index}: {damage}")
    if found.missing:
        print(f"missing: {ranges(found.missing)}")
    if found.damaged or (found.missing and not config.allow_incomplete):
        raise StoreError(_summary(reader, found))
    good = len(committed(path))
    print(f"{path}: {good} of {reader.plan.sequences} sequences, every byte as it was written")


def verify(reader: TraceReader) -> Findings:
    """Read all of a store whose metadata are good."""
    found, ids = Findings(), dict[str, int]()
    present = committed(reader.path)
    with Progress("verifying", len(present)) as progress:
        for index in present:
            try:
                _check_sequence(reader, index, ids)
            except (StoreError, OSError) as problem:
                found.damaged[index] = " ".join(str(problem).split())
            progress.advance()
    found.missing = [at for at in range(reader.plan.sequences) if at not in set(present)]
    return found


def _check_sequence(reader: TraceReader, index: int, ids: dict[str, int]) -> None:
    """Raise StoreError unless a sequence is what its record and the format say."""
    record = load_record(reader.path, reader.plan, index)
    path = record_path(reader.path, index)
    other = ids.setdefault(record.id, index)
    if other != index:
        raise StoreError(f"{path} has the id {record.id} of sequence {other}")
    for problem in _record_problems(record, reader):
        raise StoreError(f"{path}: {problem}")
    for array, tensor in _tensors(reader.trace(index)):
        if not bool(tensor.isfinite().all()):
            raise StoreError(f"{array} of sequence {index} ({record.id}) is not finite")


def _record_problems(record: SequenceRecord, reader: TraceReader) -> Iterator[str]:
    """Where a record contradicts docs/formats.md, beyond what reading it checks."""
    if record.split not in SPLITS:
        yield f"split {record.split!r} is none of {', '.join(SPLITS)}"
    points = reader.plan.grid
    if bool(record.edges) != bool(points) or len(record.edges) > points + 1:
        yield f"{len(record.edges)} edges for {points} compression points"
    boundaries = {record.prompt_length - 1, record.context_length}
    inside = {boundary for boundary in boundaries if 0 < boundary < record.length}
    if points and not inside <= set(record.common_edges):
        yield f"the boundaries {sorted(inside)} are not among the points of every label"


def _tensors(trace: Trace) -> Iterator[tuple[str, Any]]:
    tensors = {
        "q": trace.queries,
        "k": trace.keys,
        "v": trace.values,
        **{GRIDS[label]: grid for label, grid in trace.grids.items()},
        **trace.labels,
    }
    return ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _summary(reader: TraceReader, found: Findings) -> str:
    """What is wrong with the store as a whole, and how to mend it."""
    damaged, missing = list(found.damaged), len(found.missing)
    parts = [f"{len(damaged)} damaged ({ranges(damaged)})"] if damaged else []
    parts += [f"{missing} missing ({ranges(found.missing)})"] if missing else []
    text = f"{reader.path}: of {reader.plan.sequences} sequences {' and '.join(parts)}; to mend it "
    if damaged:
        named = [str(record_path(reader.path, index)) for index in damaged[:_FIRST]]
        more = f" and {len(damaged) - _FIRST} more" if len(damaged) > _FIRST else ""
        text += f"delete {', '.join(named)}{more}, then "
    return text + f"repeat, with the paths of this machine, {command(reader)}"


def command(reader: TraceReader) -> str:
    """The command that made a store and writes its missing sequences, with the store's own path."""
    manifest = reader.manifest
    words = [str(word) for word in manifest.get("command") or ()]
    if words[:1] and not words[0].startswith("kvp-") and words[0].endswith(".py"):
        words[0] = "kvp store" if "sources" in manifest else "kvp-collect"  # by python -m
    if not words or not words[0].startswith("kvp-"):
        return "the collection that made it (manifest.json has its settings)"
    out = str(manifest.get("config", {}).get("out"))
    given = {out: str(reader.path), f"--out={out}": f"--out={reader.path}"}
    return shlex.join([given.get(word, word) for word in words])


def _unreadable(path: Place) -> str:
    """What to do about a store without good metadata; nothing where there is no store."""
    if not (path / "manifest.json").exists():
        return ""
    return "; without it no sequence can be read: restore that file from a copy, or collect anew"
