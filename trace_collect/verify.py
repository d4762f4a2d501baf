"""`kvp verify`: whether every byte of a trace store is as it was written, and in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from kvp.artifacts.addresses import place
from kvp.errors import StoreError
from kvp.program.progress import Progress
from kvp.store import TraceReader
from kvp.store.metadata import SEQUENCES, committed
from trace_collect.config import VerifyConfig


def run(config: VerifyConfig) -> None:
    """Print a line per damaged sequence, or what the store holds.

    Raises StoreError at the end where a sequence is damaged or missing, at once where the store's
    own metadata are damaged.
    """
    path = place(config.traces)
    reader = TraceReader(path)
    present = committed(path)
    damaged: list[int] = []
    with Progress("verifying", len(present)) as progress:
        for index in progress.over(present):
            try:
                reader.trace(index)
            except (StoreError, OSError) as problem:
                damaged.append(index)
                print(f"sequence {index}: {' '.join(str(problem).split())}")
    planned = reader.plan.sequences
    missing = sorted({*range(planned)} - {*present})
    if missing:
        print(f"missing: {ranges(missing)}")
    if not damaged and not missing:
        splits = Counter(record.split for record in reader.records())
        held = ", ".join(f"{count} {split}" for split, count in splits.items())
        print(
            f"{path}: {len(present)} of {planned} sequences ({held}) of {reader.geometry}, every "
            "byte as it was written and in its place, every number finite"
        )
        return
    parts = [f"{len(damaged)} damaged ({ranges(damaged)})"] if damaged else []
    parts += [f"{len(missing)} missing ({ranges(missing)})"] if missing else []
    delete = f"delete NNNNNN.json of the damaged ones in {path / SEQUENCES}, then "
    raise StoreError(
        f"{path}: of {planned} sequences {' and '.join(parts)}; to mend it "
        f"{delete if damaged else ''}repeat the command that made it (manifest.json has it)"
    )


def ranges(indices: Sequence[int]) -> str:
    """Ascending numbers in short, `0-4,7`."""
    breaks = [at for at, (low, high) in enumerate(pairwise(indices), 1) if high != low + 1]
    bounds = pairwise([0, *breaks, len(indices)])
    parts = [(indices[start], indices[stop - 1]) for start, stop in bounds]
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
