"""The device of one of several processes that share a machine's devices."""

from __future__ import annotations

import torch

from kvp.config_groups import Rank, local_rank


def device_of_rank(device: str, rank: Rank) -> str:
    """`cuda` as the one of this process, by its number on its machine; any other as it is.

    Where a launcher shows each process its own device alone, there is only one to choose.
    """
    if device != "cuda" or not rank.shared or torch.cuda.device_count() < 2:
        return device
    return f"cuda:{local_rank() % torch.cuda.device_count()}"
