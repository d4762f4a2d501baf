"""What dry runs count and measure with: a clock, time spans for people, what compression leaves."""

from __future__ import annotations

import time

import torch

COMPRESSED = {"float32": 0.9, "float16": 0.7, "bfloat16": 0.7}
"""Share of the raw bytes that compression leaves, cautiously; 16-bit traces measured 0.69."""


def read_clock(device: torch.device) -> float:
    """Seconds on a clock: processor time of this process on a CPU, wall time on a GPU.

    Other programs make processor time longer by a little; wall time grows with what they do. A GPU
    ends first what it was given.
    """
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def in_words(seconds: float, device: torch.device) -> str:
    """Seconds between two times of `read_clock`, for people: `12 min (processor time)`."""
    return f"{span(seconds)} ({'processor' if device.type == 'cpu' else 'wall'} time)"


def span(seconds: float) -> str:
    """A time span for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"
