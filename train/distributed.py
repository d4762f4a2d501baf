"""Processes that share the contexts of every step: one per device, on one machine.

torchrun starts them; each runs the whole program on its share of the contexts, and Lightning's DDP
averages their gradients. What a run writes, and all messages, are the first one's. What is left
out: several machines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kvp.errors import UsageError
from kvp.program.settings import Rank, rank_of

PATIENCE = timedelta(hours=2)
"""Longest wait for another process; the first one validates while the others wait."""


@dataclass(frozen=True, kw_only=True)
class Workers(Rank):
    """One of the processes that train together; alone by default."""

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.index == 0

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
        total = self.sum(torch.tensor(list(numbers.values()), device=device) * weight)
        return dict(zip(numbers, total.tolist(), strict=True))

    def from_first(self, tensor: Tensor) -> Tensor:
        """The first process's tensor, of the same shape and dtype everywhere."""
        if self.count > 1:
            dist.broadcast(tensor, 0)
        return tensor


ALONE = Workers()
"""One process, which trains by itself."""


def this_worker(contexts: int) -> Workers:
    """Which of torchrun's processes this is, one that is alone without it.

    Raises UsageError where there are more processes than `contexts` of a step, which they share.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ALONE
    rank = rank_of(None, None)
    workers = Workers(index=rank.index, count=rank.count)
    if workers.count > contexts:
        raise UsageError(
            f"--contexts {contexts}: torchrun started {workers.count} processes, which share them; "
            "start fewer, or give --heads auto"
        )
    return workers


def device_of_worker(device: torch.device, workers: Workers) -> torch.device:
    """The device of one process; UsageError where there are too few, or one was named."""
    if workers.count == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise UsageError(f"--device {device} names one device for {workers.count} processes")
    if torch.cuda.device_count() < workers.count:
        available = torch.cuda.device_count()
        raise UsageError(f"torchrun started {workers.count} processes for {available} CUDA devices")
    return torch.device("cuda", workers.index)


@contextmanager
def together(workers: Workers, device: torch.device) -> Iterator[None]:
    """Let the processes talk to each other inside the block, each with its share of the cores."""
    if workers.count == 1:
        yield
        return
    torch.set_num_threads(max(torch.get_num_threads() // workers.count, 1))
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=PATIENCE, device_id=device if on_gpu else None
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
