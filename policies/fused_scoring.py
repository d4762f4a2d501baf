"""The arithmetic of the rankers as one Triton kernel: all KV heads of a layer at once, on CUDA.

A program scores a block of tokens of one head. It reads their keys and values once, as the model
left them (no copy to float32, none for batches), makes the features in registers (keys turned to
the end of the cache, standardised inputs, sines and cosines of positions), and passes them through
the whole network there. Memory traffic of N tokens and H heads is thus

    keys and values   2 D N H numbers of the cache's type, read once
    positions         8 N H bytes
    recent            4 x 18 N H bytes, for rankers with that input
    scores            4 N H bytes
    neighbours        about 16 (2 R + 1) N H bytes: what tokens add to the scores of others crosses
                      blocks, so it is written, and summed by `policies.network`
    weights           of a head by each of its blocks, N / 64 times: from the second-level cache,
                      which holds a layer's (64 hidden: 0.5 MB in float32; 256: 2.2 MB in bfloat16)

where the form in PyTorch writes and reads about 15 tensors of [H, N, hidden]. Channels are read in
pieces, and activations halved before a product until they are `chunk` wide, so that the weights of
a product fit shared memory at every width; no product is computed twice.

Where weights are bfloat16 (or float16), products with keys, values, of the blocks and for
neighbours take both factors in that type and add in float32. Nothing else is rounded: LayerNorm,
SiLU, positions and scores are float32, where `policies.network` rounds every intermediate tensor to
the weights' type, so this form is the nearer one to float32. float32 weights are multiplied as
three products of TF32 (`tf32x3`), whose error is close to that of float32. Not differentiable;
imported only where triton is: it is the optional extra `gpu`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from kvp.rope import Rope
from policies.network import from_near_positions, from_neighbours
from policies.network_kernel import Layer, Network, Sizes, Tokens, padded, score_block
from policies.ranker_spec import RankerSpec, wavelengths


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
        sizes = _sizes(spec, weights["first_weight"].dtype, block, chunk)
        score_block[(triton.cdiv(tokens, sizes.block), heads, batch)](
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
            for field in Layer._fields
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


def _sizes(spec: RankerSpec, dtype: torch.dtype, block: int | None, chunk: int | None) -> Sizes:
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
