"""Which queries of a sequence write the assistant's replies, and what the others count."""

from __future__ import annotations

from collections.abc import Sequence

READING = 0.2
"""Weight of queries that write no reply in `max_reply_attention`; those that do have 1."""


def written_windows(
    spans: Sequence[tuple[int, int]], first: int, stop: int
) -> list[tuple[int, int]]:
    """Queries at `first` <= j < `stop` that write replies, as [first, last) windows.

    A reply of the tokens [a, b) is written by the queries of the token before it and of its own.
    """
    windows = [(max(a - 1, first), min(b, stop)) for a, b in spans]
    return [(a, b) for a, b in windows if a < b]


def reply_windows(spans: Sequence[tuple[int, int]], first: int, stop: int) -> list[tuple[int, int]]:
    """`written_windows`, and all queries where none of them writes a reply.

    In running text every token is what the model is to write.
    """
    return written_windows(spans, first, stop) or [(first, stop)]
