"""The arithmetic of the rankers as one Triton kernel: all KV heads of a layer at once, on CUDA.

A program scores a block of tokens of one head. It reads their keys and values once, as the model
left them (no copy to float32, none for batches), makes the features in registers (keys turned to
the end of the cache, standardised inputs, sines and cosines of positions), and passes them through
the whole network; only scores are written. Memory traffic of N tokens and H heads is thus

    keys and values   2 D N H numbers of the cache's type, once
    positions         8 N H bytes
    scores            4 N H bytes
    neighbours        8 (2 R + 1) N H bytes: what tokens add to others crosses the blocks
    weights           of a head by every block of its tokens, from the second-level cache: at
                      hidden 256 in float32 1.1 MB, a layer's heads stay there

where the form in PyTorch writes and reads about 15 tensors of [H, N, hidden]. Products of 256
columns and more go in pieces of `chunk` columns, in two passes: LayerNorm needs the statistics of a
row before its first number. The first pass is computed again, which costs at most a half more
products and no memory.

Where weights are bfloat16 (or float16), products with keys, values, of the blocks and for
neighbours take both factors in that type and add in float32. Nothing else is rounded: LayerNorm,
SiLU, positions and scores are float32, where `policies.network` rounds every intermediate tensor to
the weights' type, so this form is the nearer one to float32. float32 weights are multiplied as
three products of TF32 (`tf32x3`), whose error is that of float32. Not differentiable; imported only
where triton is: it is the optional extra `gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvp.rope import Rope
from policies.network import from_near_positions, from_neighbours
from policies.ranker_spec import RankerSpec, wavelengths

_FIELDS = ("weight", "bias", "norm_weight", "norm_bias", "mean", "std", "table")


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

    @staticmethod
    def of(spec: RankerSpec, dtype: torch.dtype, block: int | None, chunk: int | None) -> Sizes:
        """Of rankers with weights of `dtype`; `block` and `chunk` as for `score_by_kernel`."""
        if chunk is None:
            chunk = 32 if dtype == torch.float32 else 64
        return Sizes(
            width=spec.head_dim,
            hidden=spec.hidden,
            position_width=spec.position_width,
            frequencies=spec.frequencies,
            recent=spec.features_of("recent"),
            turned=len(spec.key_frequencies),
            taps=2 * spec.neighbours + 1 if spec.neighbours else 0,
            rows=spec.max_positions if spec.architecture == "paper" else 0,
            incoming=sum(map(spec.width_of, spec.projected)),
            position="position" in spec.inputs,
            distance="distance" in spec.inputs,
            block=block or 64,
            chunk=chunk,
            warps=8 if padded(spec.hidden) >= 128 else 4,
        )

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


@torch.no_grad()
def score_by_kernel(
    spec: RankerSpec,
    weights: Mapping[str, Tensor],
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    lengths: Tensor,
    recent: Tensor | None = None,
    *,
    gaps: bool = False,
    block: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`policies.network.score_tokens` for B prompts of N tokens: float32 [B, H, N].

    Args:
        spec: of the rankers.
        weights: name -> [H, ...] of the layer's heads (`HeadRankers.weights`).
        keys: [B, H, N, D] float16, bfloat16 or float32 after RoPE, of any strides.
        values: [B, H, N, D], the same.
        positions: [B, N] int64, or [B, H, N] where heads hold different tokens.
        lengths: [B] or [B, H] int64, tokens seen at compression.
        recent: [B, H, N, features] (`policies.recent_features`), for rankers with that input.
        gaps: positions leave some out, and neighbours are those at that distance in position.
        block: tokens of a program, a power of two; None takes what fits.
        chunk: columns of a piece of a product, likewise.

    Raises:
        ValueError: shapes disagree, or `unsupported` says why the rankers have no such form.
    """
    if reason := unsupported(spec, weights):
        raise ValueError(reason)
    batch, heads, tokens, width = keys.shape
    if keys.shape != values.shape or width != spec.head_dim or heads != len(weights["score_bias"]):
        raise ValueError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be [batch, "
            f"{len(weights['score_bias'])}, tokens, {spec.head_dim}]"
        )
    if spec.reads_queries and (recent is None or recent.shape[:3] != keys.shape[:3]):
        raise ValueError("rankers with the input recent need its features of every token")
    scores = keys.new_empty(batch, heads, tokens, dtype=torch.float32)
    taps = 2 * spec.neighbours + 1 if spec.neighbours else 0
    added = keys.new_empty(batch * heads, taps, tokens, dtype=torch.float32)
    if not scores.numel():
        return scores
    places = (positions if positions.ndim == 3 else positions[:, None]).expand(-1, heads, -1)
    with torch.cuda.device(keys.get_device()):  # Triton launches on the current device
        inputs = _tokens(spec, keys, values, places, lengths, recent)
        sizes = Sizes.of(spec, weights["first_weight"].dtype, block, chunk)
        _score_block[(triton.cdiv(tokens, sizes.block), heads, batch)](
            inputs, _network(weights), scores, added, tokens, float(spec.reference_length),
            math.log1p(spec.reference_length), sizes, num_warps=sizes.warps, num_stages=1,
        )  # fmt: skip
    if gaps and taps:
        scores += from_near_positions(added, places.flatten(0, 1)).view_as(scores)
    elif taps:
        scores += from_neighbours(added).view_as(scores)
    return scores


def unsupported(spec: RankerSpec, weights: Mapping[str, Tensor]) -> str | None:
    """Why the kernel does not score such rankers, in one line; None where it does.

    Left to `policies.network` are rankers wider than registers hold, reaches whose columns do not
    fit beside them, weights that heads share, and weights of float64.
    """
    if max(spec.hidden, spec.head_dim) > 256 or spec.position_width > 128:
        return "the kernel scores rankers of hidden and head_dim up to 256, position_width to 128"
    if spec.neighbours > 63 or spec.frequencies > 64:
        return "the kernel scores rankers of up to 63 neighbours and 64 frequencies"
    if len({len(tensor) for tensor in weights.values()}) > 1:
        return "the kernel scores rankers whose heads share no weights"
    if weights["first_weight"].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "the kernel scores rankers of float32, bfloat16 or float16 weights"
    return None


def _network(weights: Mapping[str, Tensor]) -> Network:
    layers = {}
    for name in Network._fields:
        tensors = {
            field: weights[f"{name}_{field}"].contiguous()
            for field in _FIELDS
            if f"{name}_{field}" in weights
        }
        layers[name] = Layer(**tensors) if tensors else None
    return Network(**layers)


def _tokens(
    spec: RankerSpec,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    lengths: Tensor,
    recent: Tensor | None,
) -> Tokens:
    """Arguments as of `score_by_kernel`, `places` [B, H, N]."""
    keys, values, places = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values, places)
    )
    heads = keys.shape[1]
    of_heads = (lengths if lengths.ndim == 2 else lengths[:, None]).expand(-1, heads).contiguous()
    cosine = sine = waves = None
    if spec.key_frequencies:
        rope = Rope(frequencies=torch.tensor(spec.key_frequencies, device=keys.device))
        cosine, sine = (part.contiguous() for part in rope.inverse(of_heads))  # [B, H, R / 2]
    if "position" in spec.inputs and spec.architecture != "paper":
        waves = wavelengths(spec, keys.device)
    return Tokens(
        cached_keys=keys,
        cached_values=values,
        positions=places,
        lengths=of_heads,
        cosine=cosine,
        sine=sine,
        recent=None if recent is None else recent.float().contiguous(),
        waves=waves,
        key_strides=keys.stride()[:3],
        value_strides=values.stride()[:3],
        position_strides=places.stride()[:2],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _score_block(
    inputs: Tokens,
    network: Network,
    scores: tl.tensor,
    added: tl.tensor,
    tokens: tl.tensor,
    reference_length: tl.tensor,
    log_reference: tl.tensor,
    s: tl.constexpr,
) -> None:
    # One program: `block` tokens of one head of one prompt.
    token = tl.program_id(0).to(tl.int64) * s.block + tl.arange(0, s.block)
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + head
    inside = token < tokens
    total = tl.full([s.block, s.padded_hidden], 0.0, tl.float32)  # the first block's products
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
        rows = _projected_recent(inputs, network.recent, place * tokens + token, inside, s)
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
    tl.store(scores + place * tokens + token, score, mask=inside)
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
