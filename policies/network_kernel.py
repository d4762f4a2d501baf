"""The kernel of `policies.fused_scoring`: a block of tokens of one head through the whole network.

Device code and the shapes of its arguments; what it reads, rounds and leaves out is said there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Layer(NamedTuple):
    """Tensors [a, ...] of one layer of the network, None where it has none of that kind."""

    weight: Any = None
    bias: Any = None
    norm_weight: Any = None
    norm_bias: Any = None
    mean: Any = None
    std: Any = None
    table: Any = None


class Network(NamedTuple):
    """Layers of the rankers of a heads, None where they have none of that name."""

    key: Any
    value: Any
    position: Any
    recent: Any
    first: Any
    second: Any
    score: Any
    neighbours: Any


class Tokens(NamedTuple):
    """What is read of the tokens; strides count numbers, channels lie next to each other."""

    cached_keys: Any
    cached_values: Any
    positions: Any
    lengths: Any
    cosine: Any
    sine: Any
    recent: Any
    waves: Any
    key_strides: Any
    value_strides: Any
    position_strides: Any


@dataclass(frozen=True)
class Sizes:
    """Everything that is known when the kernel is compiled; arrays have powers of two there."""

    width: int
    hidden: int
    position_width: int
    frequencies: int
    recent: int
    """Features of `recent`."""
    turned: int
    """Pairs of channels in which keys are turned, 0 without."""
    taps: int
    """2 R + 1, 0 without neighbours."""
    rows: int
    """Of the position table, 0 without."""
    incoming: int
    """Rows of the first block's weight."""
    position: bool
    distance: bool
    block: int
    """Tokens of a program."""
    chunk: int
    """Columns of an operand of a product at most."""
    warps: int

    step = property(lambda self: min(self.chunk, padded(self.width)))
    """Channels of keys and values that are read at a time."""
    padded_hidden = property(lambda self: padded(self.hidden))
    padded_position = property(lambda self: padded(self.position_width))
    padded_frequencies = property(lambda self: padded(self.frequencies))
    padded_recent = property(lambda self: padded(self.recent))
    padded_taps = property(lambda self: padded(self.taps))
    trends = property(lambda self: 2 * self.position + self.distance)
    """Features of a position that are no waves; they come first."""
    features = property(lambda self: self.trends + 2 * self.frequencies * self.position)


def padded(size: int) -> int:
    """The next power of two that a product on tensor cores can have as a side."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit  # type: ignore[untyped-decorator]
def score_block(
    inputs: Tokens,
    network: Network,
    scores: tl.tensor,
    added: tl.tensor,
    tokens: tl.tensor,
    reference_length: tl.tensor,
    log_reference: tl.tensor,
    s: tl.constexpr,
) -> None:
    """One program: `block` tokens of one head of one prompt, the axes of the grid in that order."""
    token = tl.program_id(0).to(tl.int64) * s.block + tl.arange(0, s.block)
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head
    inside = token < tokens
    row = place * tokens + token
    total = _first_products(inputs, network, token, row, inside, reference_length, log_reference, s)
    active = _activated(total, network.first, s)
    if network.second is not None:
        total = tl.full([s.block, s.padded_hidden], 0.0, tl.float32)
        weight = network.second.weight + head * s.hidden * s.hidden
        total = _add_product(
            total, active, weight, 0, s.padded_hidden, s.hidden, s.hidden, s.padded_hidden, s
        )
        active = _activated(total, network.second, s)
    weight = _vector(network.score.weight, s.hidden, s.padded_hidden)
    score = tl.sum(active * weight[None, :], 1) + tl.load(network.score.bias + head).to(tl.float32)
    tl.store(scores + row, score, mask=inside)
    if network.neighbours is not None:
        weight = network.neighbours.weight + head * s.hidden * s.taps
        extra = tl.full([s.block, s.padded_taps], 0.0, tl.float32)
        extra = _add_product(
            extra, active, weight, 0, s.padded_hidden, s.hidden, s.taps, s.padded_taps, s
        )
        tap = tl.arange(0, s.padded_taps)
        tl.store(
            added + (place * s.taps + tap[None, :]) * tokens + token[:, None],
            extra,
            mask=inside[:, None] & (tap < s.taps)[None, :],
        )


@triton.jit  # type: ignore[untyped-decorator]
def _first_products(
    inputs: Tokens, network: Network, token: tl.tensor, place: tl.tensor, inside: tl.tensor,
    reference_length: tl.tensor, log_reference: tl.tensor, s: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    # All inputs, projected and normalised, @ the first block's weight: float32.
    head = tl.program_id(1).to(tl.int64)
    total = tl.full([s.block, s.padded_hidden], 0.0, tl.float32)
    weight = network.first.weight + head * s.incoming * s.hidden
    if network.key is not None:
        rows = _projected_vectors(inputs, network.key, token, inside, True, s)
        rows = _normed(rows, network.key, s.hidden, s.padded_hidden)
        total = _add_product(
            total, rows, weight, 0, s.padded_hidden, s.hidden, s.hidden, s.padded_hidden, s
        )
        weight += s.hidden * s.hidden
    if network.value is not None:
        rows = _projected_vectors(inputs, network.value, token, inside, False, s)
        rows = _normed(rows, network.value, s.hidden, s.padded_hidden)
        total = _add_product(
            total, rows, weight, 0, s.padded_hidden, s.hidden, s.hidden, s.padded_hidden, s
        )
        weight += s.hidden * s.hidden
    if network.position is not None:
        rows = _placed(inputs, network.position, token, inside, reference_length, log_reference, s)
        rows = _normed(rows, network.position, s.position_width, s.padded_position)
        total = _add_product(
            total,
            rows,
            weight,
            0,
            s.padded_position,
            s.position_width,
            s.hidden,
            s.padded_hidden,
            s,
        )
        weight += s.position_width * s.hidden
    if network.recent is not None:
        rows = _projected_recent(inputs, network.recent, place, inside, s)
        rows = _normed(rows, network.recent, s.position_width, s.padded_position)
        total = _add_product(
            total,
            rows,
            weight,
            0,
            s.padded_position,
            s.position_width,
            s.hidden,
            s.padded_hidden,
            s,
        )
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _vector(start: tl.tensor, width: tl.constexpr, padded_width: tl.constexpr) -> tl.tensor:
    # This head's vector of `width` numbers, float32, zero beyond.
    column = tl.arange(0, padded_width)
    of_head = start + tl.program_id(1).to(tl.int64) * width
    return tl.load(of_head + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    start: tl.tensor, first: tl.tensor, stop: tl.constexpr, count: tl.constexpr,
    columns: tl.constexpr, padded_columns: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    # Rows first .. first + count - 1 of a matrix of `columns`, zero from the row `stop` on.
    row, column = first + tl.arange(0, count), tl.arange(0, padded_columns)
    return tl.load(
        start + row[:, None] * columns + column[None, :],
        mask=(row < stop)[:, None] & (column < columns)[None, :],
        other=0.0,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(
    total: tl.tensor, rows: tl.tensor, weight: tl.tensor, first: tl.constexpr, width: tl.constexpr,
    stop: tl.constexpr, columns: tl.constexpr, padded_columns: tl.constexpr, s: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    # total + rows [block, width] @ weight[first:], in the weight's type. Rows are halved until they
    # are `chunk` wide, so that no more of the weight is in shared memory at once.
    if width > s.chunk:
        half: tl.constexpr = width // 2
        second: tl.constexpr = first + half
        pair = tl.permute(tl.reshape(rows, [s.block, 2, half]), [0, 2, 1])
        low, high = tl.split(pair)
        total = _add_product(total, low, weight, first, half, stop, columns, padded_columns, s)
        total = _add_product(total, high, weight, second, half, stop, columns, padded_columns, s)
    else:
        tile = _tile(weight, first, stop, width, columns, padded_columns)
        total = tl.dot(rows.to(tile.dtype), tile, total, input_precision="tf32x3")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _normed(
    rows: tl.tensor, layer: Layer, width: tl.constexpr, padded_width: tl.constexpr
) -> tl.tensor:
    # LayerNorm of [block, padded_width], zero beyond `width`, as they must be before.
    known = tl.arange(0, padded_width) < width
    mean = tl.sum(rows, 1) / width
    off = tl.where(known[None, :], rows - mean[:, None], 0.0)
    spread = tl.rsqrt(tl.sum(off * off, 1) / width + 1e-5)
    scale = _vector(layer.norm_weight, width, padded_width)
    shift = _vector(layer.norm_bias, width, padded_width)
    return off * spread[:, None] * scale[None, :] + shift[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _activated(total: tl.tensor, layer: Layer, s: tl.constexpr) -> tl.tensor:
    # SiLU(LayerNorm(total + b)): float32 [block, padded_hidden].
    total += _vector(layer.bias, s.hidden, s.padded_hidden)[None, :]
    normed = _normed(total, layer, s.hidden, s.padded_hidden)
    return normed * tl.sigmoid(normed)


@triton.jit  # type: ignore[untyped-decorator]
def _projected_vectors(
    inputs: Tokens, layer: Layer, token: tl.tensor, inside: tl.tensor, of_keys: tl.constexpr,
    s: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    # Standardised keys or values @ W + b: float32 [block, padded_hidden]. Standardised in float32,
    # then in the type of the weights.
    head = tl.program_id(1).to(tl.int64)
    weight = layer.weight + head * s.width * s.hidden
    total = tl.full([s.block, s.padded_hidden], 0.0, tl.float32)
    for first in range(0, s.width, s.step):
        column = first + tl.arange(0, s.step)
        known = column < s.width
        if of_keys:
            vectors = _keys(inputs, token, inside, column, s)
        else:
            start = inputs.cached_values + tl.program_id(2).to(tl.int64) * inputs.value_strides[0]
            start += head * inputs.value_strides[1]
            vectors = _channels(start, token * inputs.value_strides[2], column, inside, known)
        if layer.mean is not None:
            scale = 1.0 / tl.load(layer.std + head * s.width + column, mask=known, other=1.0)
            mean = tl.load(layer.mean + head * s.width + column, mask=known, other=0.0)
            vectors = vectors * scale[None, :] - (mean * scale)[None, :]
        tile = _tile(weight, first, s.width, s.step, s.hidden, s.padded_hidden)
        total = tl.dot(vectors.to(tile.dtype), tile, total, input_precision="tf32x3")
    return total + _vector(layer.bias, s.hidden, s.padded_hidden)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _channels(
    start: tl.tensor, offsets: tl.tensor, column: tl.tensor, inside: tl.tensor, known: tl.tensor
) -> tl.tensor:
    # The `known` of the channels in `column` of the tokens `inside`, float32, others zero.
    return tl.load(
        start + offsets[:, None] + column[None, :],
        mask=inside[:, None] & known[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(
    inputs: Tokens, token: tl.tensor, inside: tl.tensor, column: tl.tensor, s: tl.constexpr
) -> tl.tensor:
    # Some channels, turned to the end of the cache where the rankers want that.
    head = tl.program_id(1).to(tl.int64)
    start = inputs.cached_keys + tl.program_id(2).to(tl.int64) * inputs.key_strides[0]
    start += head * inputs.key_strides[1]
    offsets = token * inputs.key_strides[2]
    keys = _channels(start, offsets, column, inside, column < s.width)
    if s.turned > 0:
        low, turns = column < s.turned, column < 2 * s.turned
        frequency = tl.where(low, column, column - s.turned)
        partner = tl.where(low, column + s.turned, frequency)
        across = _channels(start, offsets, partner, inside, turns)  # the same lines of memory
        angle = (tl.program_id(2) * tl.num_programs(1) + head) * s.turned + frequency
        cosine = tl.load(inputs.cosine + angle, mask=turns, other=1.0)
        sine = tl.load(inputs.sine + angle, mask=turns, other=0.0)
        keys = keys * cosine[None, :] + across * tl.where(low, -sine, sine)[None, :]
    return keys


@triton.jit  # type: ignore[untyped-decorator]
def _projected(
    features: tl.tensor, layer: Layer, first: tl.constexpr, count: tl.constexpr,
    rows: tl.constexpr, s: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    # features @ the `count` rows of the weight from `first` on, in float32 whatever it is.
    weight = layer.weight + tl.program_id(1).to(tl.int64) * rows * s.position_width
    padded_count: tl.constexpr = features.shape[1]
    last: tl.constexpr = first + count
    tile = _tile(weight, first, last, padded_count, s.position_width, s.padded_position)
    return tl.dot(features, tile.to(tl.float32), input_precision="tf32x3")


@triton.jit  # type: ignore[untyped-decorator]
def _projected_recent(
    inputs: Tokens, layer: Layer, place: tl.tensor, inside: tl.tensor, s: tl.constexpr
) -> tl.tensor:
    # Features of the last queries @ W + b: float32 [block, padded_position].
    column = tl.arange(0, s.padded_recent)
    features = _channels(inputs.recent, place * s.recent, column, inside, column < s.recent)
    result = _projected(features, layer, 0, s.recent, s.recent, s)
    return result + _vector(layer.bias, s.position_width, s.padded_position)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _placed(
    inputs: Tokens, layer: Layer, token: tl.tensor, inside: tl.tensor,
    reference_length: tl.tensor, log_reference: tl.tensor, s: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    # Embedding of the position before its LayerNorm: float32 [block, padded_position].
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = inputs.positions + row * inputs.position_strides[0] + head * inputs.position_strides[1]
    place = tl.load(start + token, mask=inside, other=0)
    column = tl.arange(0, s.padded_position)
    known = column < s.position_width
    if s.rows > 0:
        index = tl.minimum(tl.maximum(place, 0), s.rows - 1)
        table = layer.table + head * s.rows * s.position_width
        result = _channels(table, index * s.position_width, column, inside, known)
    else:
        result = tl.full([s.block, s.padded_position], 0.0, tl.float32)
        result += _vector(layer.bias, s.position_width, s.padded_position)[None, :]
        weight = layer.weight + head * s.features * s.position_width + column
        if s.position:
            position = place.to(tl.float32)
            share = tl.load(weight, mask=known, other=0.0).to(tl.float32)
            result += (position / reference_length)[:, None] * share[None, :]
            share = tl.load(weight + s.position_width, mask=known, other=0.0).to(tl.float32)
            result += (tl.log(1.0 + position) / log_reference)[:, None] * share[None, :]
            sine, cosine = _waves(inputs, place, s)
            result += _projected(sine, layer, s.trends, s.frequencies, s.features, s)
            second: tl.constexpr = s.trends + s.frequencies
            result += _projected(cosine, layer, second, s.frequencies, s.features, s)
        if s.distance:
            length = tl.load(inputs.lengths + row * tl.num_programs(1) + head)
            remaining = tl.maximum(length - 1 - place, 0).to(tl.float32)
            weight += (s.trends - 1) * s.position_width
            share = tl.load(weight, mask=known, other=0.0).to(tl.float32)
            result += (tl.log(1.0 + remaining) / log_reference)[:, None] * share[None, :]
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _waves(inputs: Tokens, place: tl.tensor, s: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    # Sines and cosines [block, padded_frequencies]. The remainder is exact in float64.
    column = tl.arange(0, s.padded_frequencies)
    waves = tl.load(inputs.waves + column, mask=column < s.frequencies, other=1.0)
    exact = waves.to(tl.float64)[None, :]
    position = place.to(tl.float64)[:, None]
    rest = (position - tl.floor(position / exact) * exact).to(tl.float32)
    angle = 6.283185307179586 * rest / waves[None, :]
    return tl.sin(angle), tl.cos(angle)
