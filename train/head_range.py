"""Which KV heads of a model a job trains: `--heads START:STOP`, counted layer by layer.

Heads are independent, so jobs that each train some of them, joined by `kvp merge`, give what one
job would have given. No torch here.
"""

from __future__ import annotations

from kvp.errors import UsageError
from kvp.geometry import Geometry

AUTO = "auto"
"""`--heads` that every process of a job finds out for itself (`train.own_heads`)."""
SHARD_FOLDER = "heads-{start}-{stop}"
"""Folder of such a process in `--out`."""


def parse_heads(text: str) -> range:
    """Heads of a flag: "0:56" -> range(0, 56); ValueError that shows the form."""
    start, colon, stop = text.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise ValueError(f"--heads must be START:STOP, as in 0:56, got {text}")
    return range(int(start), int(stop))


def heads_within(heads: range, geometry: Geometry) -> range:
    """The same heads; UsageError where the model has fewer."""
    if heads.stop > geometry.total_kv_heads:
        raise UsageError(
            f"--heads {heads.start}:{heads.stop}: the model has {geometry.total_kv_heads} KV heads"
        )
    return heads
