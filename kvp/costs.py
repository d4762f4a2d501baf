"""What dry runs count and measure with: a clock, time spans for people, what compression leaves."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""
AT_WORK = 100_000_000
"""Bytes that a program loads and its allocators keep once it works, next to what is counted
(measured on models of 6 and 29 million weights); its imports, about 1 GB, are not in it."""


def now(device: torch.device) -> float:
    """A clock, s: processor time of this process on a CPU, wall time on a GPU.

    Other programs make processor time longer by a little; wall time grows with what they do.
    """
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call."""
    start = now(device)
    call()
    return now(device) - start


def span(seconds: float) -> str:
    """A time span for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def how_measured(device: torch.device) -> str:
    """Which time `now` tells, for people."""
    if device.type != "cpu":
        return f"wall time on {device}"
    threads = torch.get_num_threads()
    return f"processor time of {'one thread' if threads == 1 else f'{threads} threads together'}"
