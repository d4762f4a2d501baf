"""The arithmetic of the rankers: tokens and weights in, scores out.

Pure functions over a mapping of weights, which the caller owns. Every weight has the head as its
first axis. Where weights are
bfloat16, so are the products with keys and values, of the blocks and for neighbours; inputs are
standardised, positions and `recent` projected, and scores computed and added up in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from policies.ranker_spec import RankerSpec, keys_seen_from_the_end, position_features


def score_tokens(
    spec: RankerSpec,
    weights: Mapping[str, Tensor],
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    length: int | Tensor,
    recent: Tensor | None = None,
    *,
    stacked: bool,
    contexts: Sequence[int] | None = None,
    gaps: bool = False,
) -> Tensor:
    """Score tokens: keys and values [a, N, D] of a heads -> float32 [a, N].

    `positions` is int64 [N] or [a, N]; `length` one number or shaped as `positions`; `recent` is
    [a, N, features]. `stacked`: one product per layer of the network for all heads, else a loop
    over heads. `contexts`: lengths of the contexts that the N tokens are; one where it is None.
    `gaps`: tokens at some positions of that one context are missing.
    """
    count = keys.shape[0]
    places = positions.expand(count, -1) if gaps else None  # [a, N]
    if spec.key_frequencies:  # [a, N, D] either way
        keys = keys_seen_from_the_end(spec, keys, length)
    inputs = {"key": keys, "value": values}
    if spec.architecture == "paper":
        indices = positions.clamp(0, spec.max_positions - 1)  # [N] or [a, N]
        inputs["position"] = indices.expand(count, keys.shape[1])  # [a, N]
    elif "position" in spec.projected:
        features = position_features(spec, positions, length)  # [..., N, features]
        inputs["position"] = features.expand(count, *features.shape[-2:])  # [a, N, features]
    if recent is not None:
        inputs["recent"] = recent
    inputs = {name: inputs[name] for name in spec.projected}
    if stacked:
        return _network(spec, weights, inputs, contexts, places)
    parts = {name: torch.split(tensor, 1) for name, tensor in weights.items()}
    by_head = {name: torch.split(tensor, 1) for name, tensor in inputs.items()}  # [1, N, ...]
    scores = [
        _network(
            spec,
            {name: part[head] for name, part in parts.items()},
            {name: heads[head] for name, heads in by_head.items()},
            contexts,
            None if places is None else places[head : head + 1],
        )
        for head in range(count)
    ]
    return torch.cat(scores)  # [a, N]


def _network(
    spec: RankerSpec,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    contexts: Sequence[int] | None,
    places: Tensor | None,
) -> Tensor:
    """The network: `inputs` name -> [a, N, channels], for a table int64 [a, N] -> [a, N] scores.

    `places` [a, N] are positions with gaps, None without gaps.
    """
    parts = [_norm(weights, name, _projected(weights, name, inputs[name])) for name in inputs]
    dtype = weights["first_weight"].dtype
    hidden = torch.cat([part.to(dtype) for part in parts], dim=-1)  # [a, N, sum of input widths]
    for block in spec.block_names:
        hidden = F.silu(_norm(weights, block, _linear(weights, block, hidden)))  # [a, N, hidden]
    scores = _linear(weights, "score", hidden.float()).squeeze(-1)  # [a, N]; bfloat16 would tie
    if not spec.neighbours:
        return scores
    weight = weights["neighbours_weight"].mT  # [a or 1, 2 R + 1, hidden]
    if places is not None:
        return scores + from_near_positions((weight @ hidden.mT).float(), places)
    of_context = torch.split(hidden, list(contexts), dim=1) if contexts else (hidden,)
    parts = [from_neighbours((weight @ part.mT).float()) for part in of_context]
    return scores + torch.cat(parts, dim=1)


def from_neighbours(added: Tensor) -> Tensor:
    """What the tokens of one context add to each other's scores: float32 [a, N].

    `added` [a, 2 R + 1, N] is, for the token at i, `hidden[i] @ weight[:, r]`: what it adds to the
    score of the one at i + R - r. The same as a convolution over the tokens with 2 R + 1 taps,
    several times faster on a CPU.
    """
    taps, tokens = added.shape[1:]
    padded = F.pad(added, (taps // 2, taps // 2))  # [a, 2 R + 1, N + 2 R]
    heads, rows, _ = padded.stride()
    return padded.as_strided((len(padded), taps, tokens), (heads, rows + 1, 1)).sum(1)


def from_near_positions(added: Tensor, positions: Tensor) -> Tensor:
    """As `from_neighbours`, for tokens at ascending `positions` [a, N] with gaps."""
    heads, taps, tokens = added.shape
    distances = torch.arange(taps, device=positions.device) - taps // 2
    wanted = (positions[:, None] + distances[:, None]).flatten(1)  # [a, (2 R + 1) N]
    found = torch.searchsorted(positions.contiguous(), wanted).clamp_max(tokens - 1)
    there = positions.gather(1, found) == wanted
    from_there = added.gather(2, found.view(heads, taps, tokens))
    return from_there.masked_fill(~there.view(heads, taps, tokens), 0.0).sum(1)


def _projected(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    if f"{name}_table" not in weights:
        inputs = _standard(weights, name, inputs)
        if name in ("key", "value"):
            inputs = inputs.to(weights[f"{name}_weight"].dtype)
        return _linear(weights, name, inputs)
    table = weights[f"{name}_table"]
    return table.gather(1, inputs[..., None].expand(-1, -1, table.shape[-1]))


def _standard(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    inputs = inputs.float()
    if f"{name}_mean" not in weights:
        return inputs
    mean, scale = weights[f"{name}_mean"][:, None], 1 / weights[f"{name}_std"][:, None]
    return torch.addcmul(-mean * scale, inputs, scale)  # one pass over the tokens


def _linear(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    weight, bias = (weights[f"{name}_{part}"].to(inputs.dtype) for part in ("weight", "bias"))
    bias = bias[:, None]
    return torch.baddbmm(bias, inputs, weight)


def _norm(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    names = (f"{name}_norm_weight", f"{name}_norm_bias")
    scale, shift = (weights[part].to(inputs.dtype) for part in names)
    if scale.shape[0] == 1:
        return F.layer_norm(inputs, inputs.shape[-1:], scale[0], shift[0])
    return F.layer_norm(inputs, inputs.shape[-1:]) * scale[:, None] + shift[:, None]
