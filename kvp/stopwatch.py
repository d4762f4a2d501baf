"""Seconds of a piece of work as it would take without other work beside it.

On a CPU that is processor time of one thread: wall time grows with what other programs do, and
threads that wait for each other spin beside them. On a GPU it is wall time. What is left out: the
speed-up by threads, which is assumed (`speedup`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_SERIAL = 0.15
"""Assumed share of the work that further threads do not shorten."""


def now(device: torch.device) -> float:
    """A clock, s: of all threads of this process on a CPU, of the wall on a GPU."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(call: Callable[[], object], device: torch.device, rounds: int = 1) -> float:
    """Seconds of a call, the fastest of `rounds`: others were disturbed.

    What calls return is kept until the end, so that each touches memory of its own, as in a run.
    """
    found, kept = [], []
    for _ in range(rounds):
        start = now(device)
        kept.append(call())
        found.append(now(device) - start)
    return min(found)


@contextmanager
def one_thread() -> Iterator[int]:
    """Let torch use one thread inside the block; yields how many it uses otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def speedup(threads: int) -> float:
    """How many times faster than one thread so many are, assumed."""
    return 1 / (_SERIAL + (1 - _SERIAL) / threads)


def how_measured(device: torch.device, threads: int) -> str:
    """Where seconds come from, for people."""
    if device.type != "cpu":
        return f"wall time on {device}"
    text = "processor time of one thread on cpu"
    if threads == 1:
        return text
    return f"{text}, divided by {speedup(threads):.2g} for {threads} threads (assumed)"
