"""The learned rankers: one small network per KV head, all of them in one module.

A ranker maps a cached token (key after RoPE, value, position) to a score; it sees no query and no
attention (KVP paper, section 3), unless it has the input `recent`. docs/formats.md defines the
network and its features. An input that is left out has neither its columns nor its parameters.

With hidden = 256, D = 128 and a position table of 12,000 rows of 32 this is the paper's "two layers
of 256, about 650K parameters"; the network without a table has 273,729. `paper` looks positions up
in such a table (rows beyond the trained length are never trained); `fourier` replaces it by
features of a few columns. Neither ranks well far beyond the lengths of its training, unless a
`reach` hides how far a token is from both ends.

Every weight has the head as its first axis, `[A, in, out]`, so that all heads train as one job on a
GPU; on a CPU the same runs head by head, which is faster there (better cache locality). Where
weights are bfloat16, so are the products with keys and values, of the blocks and for neighbours;
all else is float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvp.bounds import NotNegative, Positive
from kvp.field_checks import check_fields
from kvp.ops.attention import recent_attention
from kvp.rope import Rope
from kvp.training_names import INPUTS, PAPER_INPUTS, TOKEN_INPUTS

ARCHITECTURES = ("fourier", "paper")
_SHORTEST_WAVELENGTH = 4.0
RECENT_QUERIES = 32
"""Queries that are read; fewer where fewer tokens have been seen."""
_WINDOWS = (1, 4, 16, RECENT_QUERIES)
_KERNELS = (7, 31, 63)
RECENT_FEATURES = len(_WINDOWS) * (1 + len(_KERNELS)) + 2
"""Columns of `recent_features`."""
STATISTICS = frozenset(f"{name}_{part}" for name in ("key", "value") for part in ("mean", "std"))
"""Names of the statistics that inputs are standardised with: float32, whatever the weights are."""


@dataclass(frozen=True, kw_only=True)
class RankerSpec:
    """Architecture of one ranker, the same for every head of a policy."""

    head_dim: Positive
    """D, channels of a key and of a value."""
    architecture: str = "fourier"
    """`fourier` (positions as features) or `paper` (learned position table)."""
    hidden: Positive
    """Width of the key and value projections and of the blocks."""
    position_width: Positive = 32
    """Channels of the embeddings of the position and of `recent`."""
    max_positions: Positive = 12288
    """Rows of the position table (`paper` only); later positions use the last row."""
    frequencies: NotNegative = 16
    """Sine and cosine pairs, wavelengths log-spaced from 4 to `reference_length` tokens."""
    reference_length: Positive = 4096
    """Tokens by which positions are scaled (`fourier` only); about the trained length."""
    inputs: tuple[str, ...] = TOKEN_INPUTS
    """Some of `INPUTS`, kept in that order. `paper` always has `PAPER_INPUTS`; there
    `TOKEN_INPUTS` mean all that it has."""
    blocks: Literal[1, 2] = 2
    """Hidden layers after the inputs' projections, 1 or 2."""
    neighbours: NotNegative = 0
    """Tokens on either side that add to a token's score; 0: tokens are scored independently."""
    key_frequencies: tuple[float, ...] = ()
    """Radians per position of the model's rotary embedding: keys are turned with them so that the
    end of the cache is position 0. Empty: keys as the model rotated them; `paper` has none."""
    reach: NotNegative = 0
    """Tokens from either end of a context within which a token's place is seen; all that are
    farther from both ends look alike (`fourier` only). 0: every place is seen."""

    def __post_init__(self) -> None:
        paper, names = self.architecture == "paper", tuple(self.inputs)
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"unknown architecture {self.architecture!r}: choose {' or '.join(ARCHITECTURES)}"
            )
        inputs = tuple(name for name in INPUTS if name in names)
        if not names or len(inputs) < len(names):  # unknown ones or twice the same
            raise ValueError(
                f"inputs of a ranker are some of {', '.join(INPUTS)}, once each, got {names!r}"
            )
        turned = tuple(self.key_frequencies)
        only_fourier = turned or self.neighbours or self.reach
        if paper and (only_fourier or inputs not in (TOKEN_INPUTS, PAPER_INPUTS)):
            raise ValueError(
                f"the paper architecture always has the inputs {', '.join(PAPER_INPUTS)}, and no "
                "key_frequencies, neighbours or reach: choose fourier"
            )
        object.__setattr__(self, "inputs", PAPER_INPUTS if paper else inputs)
        object.__setattr__(self, "key_frequencies", turned)
        check_fields(self)

    @property
    def projected(self) -> tuple[str, ...]:
        """Inputs as the network projects and normalises them: position and distance are one."""
        vectors = tuple(name for name in ("key", "value") if name in self.inputs)
        placed = "position" in self.inputs or "distance" in self.inputs
        recent = ("recent",) if self.reads_queries else ()
        return (*vectors, *(("position",) if placed else ()), *recent)

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the hidden layers, in order."""
        return ("first", "second")[: self.blocks]

    @property
    def reads_queries(self) -> bool:
        """Whether scores need the last queries."""
        return "recent" in self.inputs

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        frequencies = list(self.key_frequencies)
        return {**asdict(self), "inputs": list(self.inputs), "key_frequencies": frequencies}


def rotate_keys_to_end(
    spec: RankerSpec, keys: Tensor, positions: Tensor, length: int | Tensor
) -> Tensor:
    """Keys [..., N, D] after RoPE, turned so that the end of the cache is position 0: float32.

    A query that follows the cache at distance d from its end then sees in a key what a query at
    position d would see in it, whatever the length. Keys farther from the end than `spec.reach`
    are turned as if they stood there. `positions` and `length` as for `position_features`.
    """
    turns = torch.as_tensor(length, device=keys.device)
    if spec.reach:
        turns = torch.minimum(turns, positions + 1 + spec.reach)  # [N], or [..., N]
    rope = Rope(frequencies=torch.tensor(spec.key_frequencies, device=keys.device))
    return rope.unrotate(keys, turns)


def position_features(spec: RankerSpec, positions: Tensor, length: int | Tensor) -> Tensor:
    """Features of `fourier` for positions [..., N]: float32 [..., N, features].

    `length` is the number of tokens seen when the cache is compressed (last position + 1), as one
    number or one per token; distance to the end is legal information at eviction time.
    """
    most = spec.reach or None
    position = positions.float().clamp(0, most)
    scale = math.log1p(spec.reference_length)
    trends, waves = [], []
    if "position" in spec.inputs:
        ratio = max(spec.reference_length / _SHORTEST_WAVELENGTH, 1.0)
        steps = torch.linspace(0, 1, spec.frequencies, device=positions.device)
        lengths = _SHORTEST_WAVELENGTH * ratio**steps  # tokens per turn
        angle = 2 * math.pi * (position[..., None] % lengths) / lengths
        trends += [position / spec.reference_length, position.log1p() / scale]
        waves = [angle.sin(), angle.cos()]
    if "distance" in spec.inputs:
        remaining = (length - 1 - positions).float().clamp(0, most)
        trends.append(remaining.log1p() / scale)
    return torch.cat([torch.stack(trends, dim=-1), *waves], dim=-1)


class HeadRankers(nn.Module):
    """Rankers of A heads (layer-major KV heads); parameters carry the head as first axis."""

    def __init__(
        self, spec: RankerSpec, heads: int, generator: torch.Generator | None = None
    ) -> None:
        """Initialise every head as `torch.nn` would (`Linear`: uniform by fan-in, `Embedding`:
        normal); the same generator state gives the same weights.
        """
        super().__init__()
        self.spec = spec
        self.head_count = heads
        widths = {"key": spec.head_dim, "value": spec.head_dim, "recent": RECENT_FEATURES}
        if "position" in spec.projected:
            widths["position"] = position_features(spec, torch.zeros(1), 1).shape[-1]
        vectors = [name for name in ("key", "value") if name in spec.projected]
        sizes = dict.fromkeys(spec.projected, spec.position_width)
        sizes |= dict.fromkeys(vectors, spec.hidden)
        incoming = sum(sizes.values())
        for name, size in sizes.items():
            if name == "position" and spec.architecture == "paper":
                table = torch.empty(heads, spec.max_positions, size).normal_(generator=generator)
                self.register_parameter("position_table", nn.Parameter(table))
            else:
                self._add_linear(name, widths[name], size, generator)
        for name in spec.block_names:
            self._add_linear(name, incoming, spec.hidden, generator)
            incoming = sizes[name] = spec.hidden
        self._add_linear("score", incoming, 1, generator)
        if spec.neighbours:  # nothing is added to neighbours before training
            zeros = torch.zeros(heads, incoming, 2 * spec.neighbours + 1)
            self.register_parameter("neighbours_weight", nn.Parameter(zeros))
        for name, size in sizes.items():
            ones, zeros = torch.ones(heads, size), torch.zeros(heads, size)
            self.register_parameter(f"{name}_norm_weight", nn.Parameter(ones))
            self.register_parameter(f"{name}_norm_bias", nn.Parameter(zeros))
        if spec.architecture == "fourier":  # statistics change nothing until `standardise`
            for name in vectors:
                self.register_buffer(f"{name}_mean", torch.zeros(heads, spec.head_dim))
                self.register_buffer(f"{name}_std", torch.ones(heads, spec.head_dim))

    def _add_linear(
        self, name: str, inputs: int, outputs: int, generator: torch.Generator | None
    ) -> None:
        bound = 1 / math.sqrt(inputs)
        weight = torch.empty(self.head_count, inputs, outputs)
        bias = torch.empty(self.head_count, outputs)
        for part, tensor in (("weight", weight), ("bias", bias)):
            tensor.uniform_(-bound, bound, generator=generator)
            self.register_parameter(f"{name}_{part}", nn.Parameter(tensor))

    def forward(
        self, keys: Tensor, values: Tensor, positions: Tensor, length: int | Tensor,
        recent: Tensor | None = None, *, heads: slice | None = None, stacked: bool | None = None,
        contexts: Sequence[int] | None = None, gaps: bool = False,
    ) -> Tensor:  # fmt: skip
        """Score tokens: keys and values [a, N, D] of the a heads in `heads` -> float32 [a, N].

        `recent` is [a, N, features], for rankers with that input.

        `positions` is int64 [N], or [a, N] where heads see different contexts; `length` is tokens
        seen at compression (last position + 1), one number or shaped as `positions`. Several
        contexts may be concatenated along N; `contexts` are their lengths, which only rankers with
        `neighbours` need. `gaps`: positions ascend but leave some out, and neighbours are those at
        that distance in position. `stacked` forces one batched product per layer of the network
        (default on accelerators, and of bfloat16 weights) or a loop over heads (float32 on a CPU).
        """
        heads = heads or slice(None)
        spec, count = self.spec, len(range(self.head_count)[heads])
        gapped_positions = positions.expand(count, -1) if gaps else None  # [a, N]
        inputs = _make_inputs(spec, keys, values, positions, length, recent)
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        weights = {name: part[heads].to(keys.device) for name, part in tensors.items()}  # [a, ...]
        if stacked is None:  # what is faster, docs/results/speed.md
            stacked = keys.device.type != "cpu" or self.dtype == torch.bfloat16
        if stacked:
            return _run_network(spec, weights, inputs, contexts, gapped_positions)
        gapped = [None] * count if gapped_positions is None else gapped_positions[:, None]
        by_head = zip(_split_heads(weights), _split_heads(inputs), gapped, strict=True)
        return torch.cat([_run_network(spec, w, x, contexts, p) for w, x, p in by_head])  # [a, N]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights; statistics of the inputs and scores are always float32."""
        return next(self.parameters()).dtype

    def standardise(self, **statistics: Tensor) -> None:
        """Set the per-head statistics (`STATISTICS`), each [A, D]; stored with the policy.

        Channels that never vary are only centred; statistics of an input that the rankers do not
        have are not used, and none of `paper`, whose inputs are raw.
        """
        buffers = dict(self.named_buffers())
        for name, statistic in statistics.items():
            if name.endswith("_std"):
                statistic = torch.where(statistic > 1e-6, statistic, 1.0)
            if name in buffers:
                buffers[name].copy_(statistic)

    def head_states(self) -> list[dict[str, Tensor]]:
        """State of every head alone: tensors without the head axis, detached, contiguous."""
        states, heads = self.state_dict().items(), range(self.head_count)
        return [{name: tensor[head].clone() for name, tensor in states} for head in heads]

    def with_dtype(self, dtype: torch.dtype) -> HeadRankers:
        """A copy with weights of `dtype`; statistics and scores stay float32."""
        rankers = copy.deepcopy(self)
        for parameter in rankers.parameters():
            parameter.data = parameter.data.to(dtype)
        return rankers

    @staticmethod
    def from_head_states(spec: RankerSpec, states: Sequence[Mapping[str, Tensor]]) -> HeadRankers:
        """Inverse of `head_states`."""
        with torch.device("meta"):
            rankers = HeadRankers(spec, len(states))
        stacks = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        rankers.load_state_dict(stacks, assign=True)
        return rankers


def head_shapes(spec: RankerSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one head's state."""
    with torch.device("meta"):
        states = HeadRankers(spec, 1).state_dict()
    return {name: tuple(tensor.shape[1:]) for name, tensor in states.items()}


def bytes_per_token(spec: RankerSpec) -> int:
    """Bytes one head needs per token for activations and the temporaries of their backward pass.

    About 13 float32 vectors of the hidden width (10 were measured to be kept), the two inputs, and
    twice what the token adds to its neighbours.
    """
    taps = 2 * spec.neighbours + 1 if spec.neighbours else 0
    return 4 * (13 * spec.hidden + 2 * spec.head_dim + 2 * taps)


def _split_heads(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Tensors [a, ...] by name, of each head alone: [1, ...]."""
    # Split, not sliced: the gradient of a slice is as large as that of all heads.
    by_head = zip(*(torch.split(tensor, 1) for tensor in tensors.values()), strict=True)
    return [dict(zip(tensors, parts, strict=True)) for parts in by_head]


def _make_inputs(
    spec: RankerSpec,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    length: int | Tensor,
    recent: Tensor | None,
) -> dict[str, Tensor]:
    """Inputs of the network by name, [a, N, ...] each, of tokens as `HeadRankers.forward`."""
    if spec.key_frequencies:  # [a, N, D] either way
        keys = rotate_keys_to_end(spec, keys, positions, length)
    count, tokens, _ = keys.shape
    inputs = {"key": keys, "value": values}
    if spec.architecture == "paper":
        indices = positions.clamp(0, spec.max_positions - 1)  # [N] or [a, N]
        inputs["position"] = indices.expand(count, tokens)  # [a, N]
    elif "position" in spec.projected:
        features = position_features(spec, positions, length)  # [..., N, features]
        inputs["position"] = features.expand(count, *features.shape[-2:])  # [a, N, features]
    if recent is not None:
        inputs["recent"] = recent
    return {name: inputs[name] for name in spec.projected}


def _run_network(
    spec: RankerSpec,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    contexts: Sequence[int] | None,
    gapped_positions: Tensor | None,
) -> Tensor:
    """The network: `inputs` name -> [a, N, channels], for a table int64 [a, N] -> [a, N] scores.

    `gapped_positions` [a, N] are positions with gaps, None without gaps.
    """
    parts = [_norm(weights, name, _project_input(weights, name, inputs[name])) for name in inputs]
    dtype = weights["first_weight"].dtype
    hidden = torch.cat([part.to(dtype) for part in parts], dim=-1)  # [a, N, sum of input widths]
    for block in spec.block_names:
        hidden = F.silu(_norm(weights, block, _linear(weights, block, hidden)))  # [a, N, hidden]
    scores = _linear(weights, "score", hidden.float()).squeeze(-1)  # [a, N]; bfloat16 would tie
    if not spec.neighbours:
        return scores
    weight = weights["neighbours_weight"].mT  # [a or 1, 2 R + 1, hidden]
    if gapped_positions is not None:
        return scores + sum_near_positions((weight @ hidden.mT).float(), gapped_positions)
    of_context = torch.split(hidden, list(contexts), dim=1) if contexts else (hidden,)
    parts = [sum_neighbours((weight @ part.mT).float()) for part in of_context]
    return scores + torch.cat(parts, dim=1)


def sum_neighbours(added: Tensor) -> Tensor:
    """What the tokens of one context add to each other's scores: float32 [a, N].

    `added` [a, 2 R + 1, N] is, for the token at i, `hidden[i] @ weight[:, r]`: what it adds to the
    score of the one at i + R - r. On a CPU several times faster than the equal convolution.
    """
    taps, tokens = added.shape[1:]
    padded = F.pad(added, (taps // 2, taps // 2))  # [a, 2 R + 1, N + 2 R]
    heads, rows, _ = padded.stride()
    return padded.as_strided((len(padded), taps, tokens), (heads, rows + 1, 1)).sum(1)


def sum_near_positions(added: Tensor, positions: Tensor) -> Tensor:
    """As `sum_neighbours`, for tokens at ascending `positions` [a, N] with gaps."""
    heads, taps, tokens = added.shape
    distances = torch.arange(taps, device=positions.device) - taps // 2
    wanted = (positions[:, None] + distances[:, None]).flatten(1)  # [a, (2 R + 1) N]
    indices = torch.searchsorted(positions.contiguous(), wanted).clamp_max(tokens - 1)
    present = positions.gather(1, indices) == wanted
    neighbours = added.gather(2, indices.view(heads, taps, tokens))
    return neighbours.masked_fill(~present.view(heads, taps, tokens), 0.0).sum(1)


def _project_input(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    if (table := weights.get(f"{name}_table")) is not None:
        return table.gather(1, inputs[..., None].expand(-1, -1, table.shape[-1]))
    inputs = inputs.float()
    if f"{name}_mean" in weights:
        mean, scale = weights[f"{name}_mean"][:, None], 1 / weights[f"{name}_std"][:, None]
        inputs = torch.addcmul(-mean * scale, inputs, scale)  # one pass over the tokens
    if name in ("key", "value"):
        inputs = inputs.to(weights[f"{name}_weight"].dtype)
    return _linear(weights, name, inputs)


def _linear(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    weight, bias = (weights[f"{name}_{part}"].to(inputs.dtype) for part in ("weight", "bias"))
    return torch.baddbmm(bias[:, None], inputs, weight)


def _norm(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    scale, shift = (weights[f"{name}_norm_{part}"].to(inputs) for part in ("weight", "bias"))
    if scale.shape[0] == 1:
        return F.layer_norm(inputs, inputs.shape[-1:], scale[0], shift[0])
    return F.layer_norm(inputs, inputs.shape[-1:]) * scale[:, None] + shift[:, None]


def recent_features(queries: Tensor, keys: Tensor) -> Tensor:
    """Features of every token: float32 [B, H, N, RECENT_FEATURES].

    `queries` [B, Q, W, D] are those of the last W tokens (more than `RECENT_QUERIES` are not read),
    `keys` [B, H, N, D] of all of them; both after RoPE.
    """
    tokens = keys.shape[2]
    window = min(RECENT_QUERIES, queries.shape[2], tokens)
    attention = recent_attention(queries, keys, window)  # [B, H, G, window, N]
    of_queries = attention.mean(dim=2)  # [B, H, window, N]
    shares = []
    for size in _WINDOWS:
        mean = of_queries[..., -min(size, window) :, :].mean(dim=2)  # [B, H, N]
        shares += [mean, *(F.max_pool1d(mean, k, stride=1, padding=k // 2) for k in _KERNELS)]
    shares.append(attention.amax(dim=(2, 3)))
    logs = (torch.stack(shares, dim=-1) * tokens).clamp_min(1e-3).log()
    newest = torch.arange(tokens, device=keys.device) >= tokens - window  # [N]
    return torch.cat([logs, newest.expand(logs.shape[:3])[..., None].float()], dim=-1)
