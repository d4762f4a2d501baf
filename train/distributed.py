"""Processes that share the contexts of every step: one per device, on one machine.

The first process starts the others, each of which runs the whole program on its share of the
contexts; or torchrun starts them all. Lightning's DDP averages their gradients. What a run writes,
and all messages, are the first one's. What is left out: several machines.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kvp.errors import KvpError, UsageError

ItemT = TypeVar("ItemT")

PATIENCE = timedelta(hours=2)
"""Longest wait for another process; the first one validates while the others wait."""
_PATIENCE_SECONDS = 10.0
"""Longest wait for a process that has nothing left to do."""
_PAUSE_SECONDS = 0.1
"""Between two looks at whether the other processes are there."""


@dataclass(frozen=True, kw_only=True)
class Workers:
    """One of the processes that train together; alone by default."""

    index: int = 0
    """Which process this is."""
    count: int = 1
    """Processes in all."""
    port: int | None = None
    """Where the first process waits for those it started; None elsewhere, also under torchrun."""

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.index == 0

    def share(self, items: Iterable[ItemT]) -> Iterator[ItemT]:
        """Every `count`-th of the items, from index `index` on; they may be made as they come."""
        return islice(items, self.index, None, self.count)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor, of one shape everywhere, over the processes; no gradient."""
        if self.count == 1:
            return tensor
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def weighted_sum(self, numbers: Mapping[str, float], weight: float) -> dict[str, float]:
        """Sum over processes of each number times the process's weight, of the same names."""
        if self.count == 1:
            return dict(numbers)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        total = torch.tensor(list(numbers.values()), device=device) * weight
        dist.all_reduce(total)
        return dict(zip(numbers, total.tolist(), strict=True))

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, of the same shape and dtype everywhere."""
        if self.count > 1:
            dist.broadcast(tensor, 0)
        return tensor


ALONE = Workers()
"""One process, which trains by itself."""


def this_worker(devices: int) -> Workers:
    """Which of `devices` processes this is; UsageError where torchrun started other than these."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Workers(count=devices)
    started = int(os.environ["WORLD_SIZE"])
    if started != devices:
        raise UsageError(
            f"--devices {devices}, but torchrun started {started} processes; "
            f"give --devices {started}"
        )
    return Workers(index=int(os.environ["RANK"]), count=devices)


def device_of_worker(device: torch.device, workers: Workers) -> torch.device:
    """The device of one process; UsageError where there are too few, or one was named."""
    if workers.count == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise UsageError(f"--device {device} names one device, --devices asks for {workers.count}")
    if torch.cuda.device_count() < workers.count:
        available = torch.cuda.device_count()
        raise UsageError(f"--devices {workers.count}: there are {available} CUDA devices here")
    return torch.device("cuda", workers.index)


@contextmanager
def together(
    workers: Workers, device: torch.device, follow: Callable[[Workers], None]
) -> Iterator[None]:
    """Let the processes talk to each other; the first starts those that torchrun has not.

    Args:
        workers: which process this is.
        device: device it computes on.
        follow: what every other process does, the block of this `with` included; picklable.

    Raises:
        KvpError: another process failed with one, or ended before it could take part.
    """
    if workers.count == 1:
        yield
        return
    store = None
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        store = TCPStore("127.0.0.1", workers.port or 0, None, workers.first, PATIENCE)
    with _others(workers, store, follow), _surroundings(workers):
        try:
            _connect(workers, device, store)
            yield
            dist.barrier()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _connect(workers: Workers, device: torch.device, store: TCPStore | None) -> None:
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=workers.index,
        world_size=workers.count,
        timeout=PATIENCE,
        device_id=device if on_gpu else None,
    )


@contextmanager
def _surroundings(workers: Workers) -> Iterator[None]:
    """A fair share of the cores, and the variable that keeps Lightning from starting processes."""
    threads, local_rank = torch.get_num_threads(), os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(workers.index)
    torch.set_num_threads(max(threads // workers.count, 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if local_rank is None:
            del os.environ["LOCAL_RANK"]


@contextmanager
def _others(
    workers: Workers, store: TCPStore | None, follow: Callable[[Workers], None]
) -> Iterator[None]:
    """All processes but the first, ready to connect, alive no longer than the block.

    Only the first one has others, and only where there is a `store`, which all meet at.
    """
    if store is None or not workers.first:
        if store is not None:
            store.set(_ready(workers.index), "")
        yield
        return
    context = multiprocessing.get_context("spawn")
    messages: SimpleQueue[str] = context.SimpleQueue()
    others = [
        context.Process(
            target=_other,
            args=(Workers(index=index, count=workers.count, port=store.port), follow, messages),
            daemon=True,
        )
        for index in range(1, workers.count)
    ]
    for other in others:
        other.start()
    try:
        _meet(others, store, messages)
        yield
        _wait(others)
    except KvpError:
        raise
    except Exception:  # perhaps because another process failed: that is what to tell
        _wait(others)
        if not messages.empty():
            raise KvpError(messages.get()) from None
        raise
    finally:
        for other in others:
            other.kill()  # Lightning catches the signal of terminate()
            other.join()


def _meet(others: Sequence[SpawnProcess], store: TCPStore, messages: SimpleQueue[str]) -> None:
    """Wait until every other process can connect; KvpError where one has ended instead."""
    waiting = dict(enumerate(others, start=1))
    while waiting:
        connection.wait([other.sentinel for other in waiting.values()], _PAUSE_SECONDS)
        waiting = {
            index: other for index, other in waiting.items() if not store.check([_ready(index)])
        }
        for index, other in waiting.items():
            if other.exitcode is None:
                continue
            if not messages.empty():
                raise KvpError(messages.get())
            raise KvpError(
                f"--devices {len(others) + 1}: process {index} ended before training began (exit "
                f"code {other.exitcode}); memory may be short, and a script that trains needs "
                'if __name__ == "__main__"'
            )


def _ready(index: int) -> str:
    """Key by which a process says that it is there."""
    return f"ready/{index}"


def _wait(others: Sequence[SpawnProcess]) -> None:
    for other in others:
        other.join(_PATIENCE_SECONDS)


def _other(workers: Workers, follow: Callable[[Workers], None], messages: SimpleQueue[str]) -> None:
    """Life of a process that the first one started; it ends with it, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the first one
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        follow(workers)
    except KvpError as error:
        messages.put(str(error))
        sys.exit(2)
