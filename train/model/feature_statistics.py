"""Rotary frequencies and feature statistics of `fourier` rankers, taken from training traces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvp.errors import StoreError
from kvp.store import SequenceRecord
from policies.ranker import RankerSpec, keys_seen_from_the_end
from train.data.traces import Traces
from train.recipe import Recipe

_SEQUENCES = 64
"""Sequences the statistics are taken over: thousands of tokens per channel are plenty."""


def spread(records: Sequence[SequenceRecord]) -> Sequence[SequenceRecord]:
    """At most 64 of some records, evenly spread: those that statistics are taken over."""
    return records[:: -(-len(records) // _SEQUENCES)]


def feature_statistics(
    reader: Traces, records: Sequence[SequenceRecord], spec: RankerSpec
) -> dict[str, Tensor]:
    """Mean and standard deviation of every channel over training tokens.

    Takes `spread(records)`, with keys as rankers of `spec` see them from the
    end of a sequence. Returns `key_mean`, `key_std`, `value_mean` and
    `value_std`, each [A, D] float32 (sums in float64). Raises StoreError on damaged sequences.
    """
    tokens = 0
    sums: list[Tensor] = []
    for record in spread(records):
        keys, values = (part.flatten(0, 1) for part in reader.kv(record.index))  # [A, T, D]
        if spec.key_frequencies:
            keys = keys_seen_from_the_end(spec, keys, record.length)
        parts = [part.double() for part in (keys, values)]
        moments = [*(p.sum(1) for p in parts), *(p.square().sum(1) for p in parts)]
        sums.append(torch.stack(moments))  # [4, A, D]
        tokens += record.length
    key, value, key_square, value_square = (torch.stack(sums).sum(0) / tokens).unbind(0)
    return {
        "key_mean": key.float(),
        "key_std": (key_square - key.square()).clamp_min(0).sqrt().float(),
        "value_mean": value.float(),
        "value_std": (value_square - value.square()).clamp_min(0).sqrt().float(),
    }


def key_frequencies(traces: Traces, recipe: Recipe) -> tuple[float, ...]:
    """Frequencies that a ranker of `recipe` turns keys with, none where it takes them as stored.

    Raises StoreError where the traces do not say how their model rotates keys.
    """
    if recipe.key_frame == "stored" or "key" not in recipe.input_list:
        return ()
    frequencies = traces.manifest.get("rope_frequencies")
    if frequencies is None:
        raise StoreError(
            "--key_frame end: the traces do not hold the frequencies of a rotary embedding; "
            "collect them again, or use --key_frame stored (all that a model without one can use)"
        )
    return tuple(frequencies)
