"""Feature statistics that `fourier` rankers standardise keys and values with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvp.store import SequenceRecord
from train.traces import Traces

_SEQUENCES = 64
"""Sequences the statistics are taken over: thousands of tokens per channel are plenty."""


def feature_statistics(reader: Traces, records: Sequence[SequenceRecord]) -> dict[str, Tensor]:
    """Mean and standard deviation of every channel over training tokens.

    Takes at most 64 of `records`, evenly spread. Returns `key_mean`, `key_std`, `value_mean` and
    `value_std`, each [A, D] float32 (sums in float64). Raises StoreError on damaged sequences.
    """
    spread = records[:: -(-len(records) // _SEQUENCES)]
    tokens = 0
    sums: list[Tensor] = []
    for record in spread:
        parts = [part.flatten(0, 1).double() for part in reader.kv(record.index)]
        moments = torch.stack([*(p.sum(1) for p in parts), *(p.square().sum(1) for p in parts)])
        sums.append(moments)
        tokens += record.length
    keys, values, key_squares, value_squares = (torch.stack(sums).sum(0) / tokens).unbind(0)
    return {
        "key_mean": keys.float(),
        "key_std": (key_squares - keys.square()).clamp_min(0).sqrt().float(),
        "value_mean": values.float(),
        "value_std": (value_squares - values.square()).clamp_min(0).sqrt().float(),
    }
