"""Processes that share the contexts of every step: one per device, on one machine.

torchrun starts them, or the program itself does by torch's launcher; each runs the whole program on
its share of the contexts, and Lightning's DDP averages their gradients. What a run writes, and all
messages, are the first one's. What is left out: several machines.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kvp import errors
from kvp.config_groups import Rank
from kvp.errors import KvpError, UsageError

ConfigT = TypeVar("ConfigT")

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


def is_launched() -> bool:
    """Whether torchrun, or `launch`, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(devices: int, run: Callable[[ConfigT], None], config: ConfigT) -> None:
    """Call `run(config)` in `devices` processes, as torchrun would; both must be picklable.

    Raises:
        KvpError: a process failed with one, or died.
        KeyboardInterrupt: Ctrl-C; SystemExit(143) after SIGTERM.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=devices,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(settings, run)(config)
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + stopped.sigval) from None
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        message: Any = failure.message  # a mapping where the process left its exception
        message = message if isinstance(message, str) else message["message"]
        kind, _, text = message.partition(": ")
        if isinstance(getattr(errors, kind, None), type):  # one of ours
            raise getattr(errors, kind)(text) from None
        raise KvpError(
            f"--devices {devices}: process {rank} ended ({' '.join(message.split())}); memory may "
            'be short, and a script that trains needs if __name__ == "__main__"'
        ) from None


def this_worker(devices: int) -> Workers:
    """Which of `devices` processes this is; UsageError where torchrun started other than these."""
    if not is_launched():
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
