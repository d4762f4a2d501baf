"""Rankers before the first step; `fourier` takes statistics and frequencies from the traces."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvp.errors import StoreError
from kvp.store import SequenceRecord, TraceReader
from policies.ranker import HeadRankers, RankerSpec, rotate_keys_to_end
from train.recipe import Recipe

_SEQUENCES = 64
"""Sequences that statistics are taken over: thousands of tokens per channel are plenty."""


def random_rankers(
    recipe: Recipe, traces: TraceReader, training: Sequence[SequenceRecord], heads: range, seed: int
) -> HeadRankers:
    """Random rankers of some heads, the same for a head whichever others train."""
    geometry = traces.geometry
    first = training[:: -(-len(training) // _SEQUENCES)]  # evenly spread
    longest = max(record.length for record in first)
    spec = RankerSpec(
        head_dim=geometry.head_dim, architecture=recipe.architecture, hidden=recipe.hidden,
        reference_length=min(longest, 2 * recipe.reach or longest), inputs=recipe.input_list,
        neighbours=recipe.neighbours, key_frequencies=key_frequencies(traces, recipe),
        reach=recipe.reach,
    )  # fmt: skip
    rankers = HeadRankers(spec, geometry.total_kv_heads, torch.Generator().manual_seed(seed))
    if len(heads) < geometry.total_kv_heads:
        states = rankers.head_states()[heads.start : heads.stop]
        rankers = HeadRankers.from_head_states(spec, states)
    if recipe.architecture == "fourier":
        rankers.standardise(**feature_statistics(traces, first, spec))
    return rankers


def feature_statistics(
    reader: TraceReader, records: Sequence[SequenceRecord], spec: RankerSpec
) -> dict[str, Tensor]:
    """Mean and standard deviation of every channel over training tokens: each [A, D] float32.

    Keys are as rankers of `spec` see them from the end of a sequence. StoreError on damage.
    """
    tokens = sum(record.length for record in records)
    sums: list[Tensor] = []
    for record in records:
        keys, values = (part.flatten(0, 1) for part in reader.kv(record.index))  # [A, T, D]
        if spec.key_frequencies:
            positions = torch.arange(record.length)
            keys = rotate_keys_to_end(spec, keys, positions, record.length)
        parts = [part.double() for part in (keys, values)]
        moments = [*(p.sum(1) for p in parts), *(p.square().sum(1) for p in parts)]
        sums.append(torch.stack(moments))  # [4, A, D]
    key, value, key_square, value_square = (torch.stack(sums).sum(0) / tokens).unbind(0)
    return {
        "key_mean": key.float(),
        "key_std": (key_square - key.square()).clamp_min(0).sqrt().float(),
        "value_mean": value.float(),
        "value_std": (value_square - value.square()).clamp_min(0).sqrt().float(),
    }


def key_frequencies(traces: TraceReader, recipe: Recipe) -> tuple[float, ...]:
    """Frequencies that a ranker turns keys with, if any; StoreError where traces lack them."""
    if recipe.key_frame == "stored" or "key" not in recipe.input_list:
        return ()
    frequencies = traces.manifest.get("rope_frequencies")
    if frequencies is None:
        raise StoreError(
            "--key_frame end: the traces do not hold the frequencies of a rotary embedding; "
            "collect them again, or use --key_frame stored (all that a model without one can use)"
        )
    return tuple(frequencies)
