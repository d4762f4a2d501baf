"""How fast a machine does what costs are counted in: measured, or assumed for a named device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvp.costs.sizes import Lengths, ModelSize


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speeds of one machine with one model."""

    source: str
    """Where the numbers come from, for people: what was measured, what is assumed."""
    accelerator: bool
    """Whether the model runs beside the processor, with memory of its own."""
    device_bytes: float = math.inf
    """Memory of the accelerator, where it is known."""
    prompt_flops: float
    """Operations per second of a forward pass over a prompt."""
    decode_layer_seconds: float
    """Seconds of one layer for one decoded token of every answer of a batch."""
    decode_step_seconds: float
    """Seconds that a decoded token takes next to its layers."""
    pairs: float
    """Pairs of a query and a key per second, of labels."""
    grid_pairs: float
    """The same of importance grids (`ModelSize.grid_pairs`), whose intervals are short."""
    ranker_flops: float
    """Operations per second of rankers that train (float32)."""
    write_bytes: float
    """Raw bytes per second into a store of full traces: compressed and written."""
    read_bytes: float
    """Raw bytes per second of queries, keys and values out of a store."""
    write_importance_bytes: float
    """Raw bytes per second into an importance store, whose grid takes longer to compress."""
    read_grid_bytes: float
    """Raw bytes per second of importance grids out of a store."""
    copy_bytes: float
    """Bytes per second between the device and RAM."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the maker's data sheet says of an accelerator: dense, without sparsity."""

    flops: float
    """Of 16-bit products, per second."""
    float32_flops: float
    """Of float32 without tensor cores, per second, as kvp-train computes."""
    bandwidth: float
    """Bytes per second of its memory."""
    memory: float
    """Bytes."""


DEVICES = {
    "a100": Device(flops=312e12, float32_flops=19.5e12, bandwidth=2.04e12, memory=80e9),
    "h100": Device(flops=989e12, float32_flops=67e12, bandwidth=3.35e12, memory=80e9),
    "h200": Device(flops=989e12, float32_flops=67e12, bandwidth=4.8e12, memory=141e9),
}
"""NVIDIA's data sheets, SXM forms."""
REACHED_FLOPS = 0.4
"""Share of the peak of products that is assumed to be reached."""
REACHED_BANDWIDTH = 0.6
"""Share of the peak of memory that is assumed to be reached."""
LAUNCH_SECONDS = 8e-4
"""Assumed time in which Python starts the kernels of one layer."""
STEP_SECONDS = 2e-3
"""Assumed time of what `generate` does between two tokens."""
CODEC_BYTES = 4e8
"""Assumed bytes per second that one thread packs or unpacks (`kvp.store.codec_rate`)."""
COPY_BYTES = 8e9
"""Assumed bytes per second between device and ordinary RAM."""
_PAIR_FLOPS = 4
"""Operations of a pair per channel: labels compute each logit twice on a GPU."""


def assumed_rates(name: str, size: ModelSize, lengths: Lengths, itemsize: int, batch: int) -> Rates:
    """Rates of a device in `DEVICES`, from its data sheet and stated shares of it; not measured.

    `itemsize` are the bytes of a weight, `batch` the answers decoded together.
    """
    device = DEVICES[name]
    peak = device.flops if itemsize < 4 else device.float32_flops
    cache = 2 * size.geometry.kv_heads * size.geometry.head_dim * lengths.tokens * itemsize
    layer_bytes = size.layer_parameters * itemsize + batch * cache
    moved = layer_bytes / (REACHED_BANDWIDTH * device.bandwidth)
    head = size.head_parameters * itemsize / (REACHED_BANDWIDTH * device.bandwidth)
    return Rates(
        source=(
            f"assumed, not measured: {name}, {REACHED_FLOPS:.0%} of the peak of products "
            f"({peak / 1e12:g} TFLOP/s of the model, {device.float32_flops / 1e12:g} of rankers) "
            f"and {REACHED_BANDWIDTH:.0%} of {device.bandwidth / 1e12:g} TB/s, "
            f"{LAUNCH_SECONDS * 1e3:g} ms per layer and decoded token, stores at "
            f"{CODEC_BYTES / 1e9:g} GB/s"
        ),
        accelerator=True,
        device_bytes=device.memory,
        prompt_flops=REACHED_FLOPS * peak,
        decode_layer_seconds=max(moved, LAUNCH_SECONDS),
        decode_step_seconds=head + STEP_SECONDS,
        pairs=REACHED_FLOPS * peak / (_PAIR_FLOPS * size.geometry.head_dim),
        grid_pairs=REACHED_FLOPS * peak / (_PAIR_FLOPS * size.geometry.head_dim),
        ranker_flops=REACHED_FLOPS * device.float32_flops,
        write_bytes=CODEC_BYTES,
        read_bytes=CODEC_BYTES,
        write_importance_bytes=CODEC_BYTES,
        read_grid_bytes=CODEC_BYTES,
        copy_bytes=COPY_BYTES,
    )
