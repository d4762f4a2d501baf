"""Torch devices: which one a flag names, and which one a process of a job takes."""

import torch

from kvp.errors import UsageError, first_line
from kvp.processes import Rank, local_rank


def torch_device(device: str) -> torch.device:
    """Parse `device`; UsageError naming --device when it is unknown or not there."""
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"--device {device} is not available here ({first_line(error)}): use --device cpu"
        ) from error
    return target


def device_of_rank(device: str, rank: Rank) -> str:
    """`cuda` as the one of this process, by its number on its machine; any other as it is.

    Where a launcher shows each process its own device alone, there is only one to choose.
    """
    if device != "cuda" or not rank.shared or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"
