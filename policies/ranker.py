"""The learned rankers: one small network per KV head, all of them in one module.

A ranker maps a cached token (key after RoPE, value, position) to a score; it sees no query and no
attention (KVP paper, section 3). Weights of all agents are stacked, `[A, in, out]`, so that they
train as one job on a GPU; on a CPU the same arithmetic runs head by head, which is faster there
(better cache locality). What is left out: sampling and losses (`train`), files (`policy_files`).

Architecture: key and value each Linear D -> hidden + LayerNorm; position features -> LayerNorm;
concatenate; two blocks of Linear -> hidden, LayerNorm, SiLU; Linear -> 1. With hidden = 256, D =
128 and a position table of 12,000 rows of 32 this is the paper's "two layers of 256, about 650K
parameters"; the network without a table has 273,729. `paper` looks positions up in such a table
(rows beyond the trained length are never trained); `fourier` replaces it by features that
extrapolate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ARCHITECTURES = ("fourier", "paper")
_EPSILON = 1e-6
_SHORTEST_WAVELENGTH = 4.0


@dataclass(frozen=True, kw_only=True)
class RankerSpec:
    """Architecture of one ranker, the same for every agent of a policy."""

    head_dim: int
    """D, channels of a key and of a value."""
    architecture: str = "fourier"
    """`fourier` (positions as features that extrapolate) or `paper` (learned position table)."""
    hidden: int = 256
    """Width of the key and value projections and of both blocks."""
    position_width: int = 32
    """Channels of the position embedding."""
    max_positions: int = 12288
    """Rows of the position table (`paper` only); later positions use the last row."""
    frequencies: int = 16
    """Sine and cosine pairs, wavelengths log-spaced from 4 to `reference_length` tokens."""
    reference_length: int = 4096
    """Tokens by which positions are scaled (`fourier` only); about the trained length."""

    def __post_init__(self) -> None:
        """Raise ValueError on an unknown architecture or a size that is not positive."""
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"unknown architecture {self.architecture!r}: choose {' or '.join(ARCHITECTURES)}"
            )
        sizes = {key: size for key, size in self.to_dict().items() if key != "architecture"}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} of a ranker must be a positive integer, got {size!r}")

    @property
    def position_features(self) -> int:
        """Width of the `fourier` position features before their projection."""
        return 3 + 2 * self.frequencies

    @property
    def features(self) -> tuple[str, ...]:
        """What a token is described by, in input order (recorded in policy files)."""
        if self.architecture == "paper":
            return ("key", "value", "position_table[min(position, max_positions - 1)]")
        return (
            "(key - key_mean) / key_std",
            "(value - value_mean) / value_std",
            "position / reference_length",
            "log1p(position) / log1p(reference_length)",
            "log1p(length - 1 - position) / log1p(reference_length)",
            "sin(2 pi position / wavelength)",
            "cos(2 pi position / wavelength)",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankerSpec:
        """Inverse of `to_dict`; TypeError on unknown keys, ValueError on values out of range."""
        return cls(**data)


def position_features(spec: RankerSpec, positions: Tensor, length: int | Tensor) -> Tensor:
    """Features of `fourier` rankers: positions [..., N] -> float32 [..., N, 3 + 2 * frequencies].

    `length` is the number of tokens seen when the cache is compressed (last position + 1), as one
    number or one per token; distance to the end is legal information at eviction time.
    """
    place = positions.float()
    scale = math.log1p(spec.reference_length)
    remaining = (length - 1 - positions).float().clamp_min(0)
    exponents = torch.linspace(0, 1, spec.frequencies, device=positions.device)
    ratio = max(spec.reference_length / _SHORTEST_WAVELENGTH, 1.0)
    wavelengths = _SHORTEST_WAVELENGTH * ratio**exponents
    angle = 2 * math.pi * (place[..., None] % wavelengths) / wavelengths
    trends = [place / spec.reference_length, place.log1p() / scale, remaining.log1p() / scale]
    return torch.cat([torch.stack(trends, dim=-1), angle.sin(), angle.cos()], dim=-1)


class HeadRankers(nn.Module):
    """Rankers of A agents (layer-major KV heads); parameters carry the agent as first axis."""

    def __init__(
        self, spec: RankerSpec, agents: int, generator: torch.Generator | None = None
    ) -> None:
        """Initialise every agent as `torch.nn` would (`Linear`: uniform by fan-in, `Embedding`:
        normal); the same generator state gives the same weights.
        """
        super().__init__()
        self.spec = spec
        self.agents = agents
        width, place = spec.hidden, spec.position_width
        self._add_linear("key", spec.head_dim, width, generator)
        self._add_linear("value", spec.head_dim, width, generator)
        if spec.architecture == "fourier":
            self._add_linear("position", spec.position_features, place, generator)
            for name in ("key", "value"):
                self.register_buffer(f"{name}_mean", torch.zeros(agents, spec.head_dim))
                self.register_buffer(f"{name}_std", torch.ones(agents, spec.head_dim))
        else:
            table = torch.empty(agents, spec.max_positions, place).normal_(generator=generator)
            self.register_parameter("position_table", nn.Parameter(table))
        self._add_linear("first", 2 * width + place, width, generator)
        self._add_linear("second", width, width, generator)
        self._add_linear("score", width, 1, generator)
        sizes = {"key": width, "value": width, "position": place, "first": width, "second": width}
        for name, size in sizes.items():
            ones, zeros = torch.ones(agents, size), torch.zeros(agents, size)
            self.register_parameter(f"{name}_norm_weight", nn.Parameter(ones))
            self.register_parameter(f"{name}_norm_bias", nn.Parameter(zeros))

    def _add_linear(
        self, name: str, inputs: int, outputs: int, generator: torch.Generator | None
    ) -> None:
        bound = 1 / math.sqrt(inputs)
        weight = torch.empty(self.agents, inputs, outputs)
        bias = torch.empty(self.agents, outputs)
        for part, tensor in (("weight", weight), ("bias", bias)):
            tensor.uniform_(-bound, bound, generator=generator)
            self.register_parameter(f"{name}_{part}", nn.Parameter(tensor))

    def forward(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        length: int | Tensor,
        *,
        heads: slice | None = None,
        stacked: bool | None = None,
    ) -> Tensor:
        """Score tokens: keys and values [a, N, D] of the a agents in `heads` -> float32 [a, N].

        `positions` is int64 [N], or [a, N] where agents see different contexts; `length` is tokens
        seen at compression (last position + 1), one number or shaped as `positions`. Tokens are
        scored independently, so contexts may be concatenated along N. `stacked` forces one batched
        product per layer of the network (default on accelerators) or a loop over heads (CPU).
        """
        weights = {name: tensor[heads or slice(None)] for name, tensor in self._weights().items()}
        count = weights["score_bias"].shape[0]
        if keys.shape != values.shape or keys.shape[0] != count:
            raise ValueError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must both be "
                f"[{count}, tokens, {self.spec.head_dim}]"
            )
        if self.spec.architecture == "fourier":
            places = position_features(self.spec, positions, length)
            places = places.expand(count, *places.shape[-2:])
        else:
            places = positions.clamp(0, self.spec.max_positions - 1).expand(count, keys.shape[1])
        if stacked if stacked is not None else keys.device.type != "cpu":
            return _network(weights, keys, values, places)
        parts = {name: torch.split(tensor, 1) for name, tensor in weights.items()}
        rows = zip(
            torch.split(keys, 1), torch.split(values, 1), torch.split(places, 1), strict=True
        )
        scores = [
            _network({name: part[agent] for name, part in parts.items()}, *row)
            for agent, row in enumerate(rows)
        ]
        return torch.cat(scores)

    def _weights(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def standardise(
        self, *, key_mean: Tensor, key_std: Tensor, value_mean: Tensor, value_std: Tensor
    ) -> None:
        """Set the per-agent feature statistics, each [A, D]; stored with the policy.

        Channels that never vary are only centred. Raises ValueError for `paper`, whose inputs are
        raw.
        """
        if self.spec.architecture == "paper":
            raise ValueError("the paper architecture takes raw keys and values")
        new = {"key_mean": key_mean, "key_std": key_std}
        new |= {"value_mean": value_mean, "value_std": value_std}
        buffers = dict(self.named_buffers())
        for name, statistic in new.items():
            if statistic.shape != buffers[name].shape:
                raise ValueError(f"{name} must be {tuple(buffers[name].shape)}")
            if name.endswith("_std"):
                statistic = torch.where(statistic > _EPSILON, statistic, 1.0)
            buffers[name].copy_(statistic)

    def head_states(self) -> list[dict[str, Tensor]]:
        """State of every agent on its own: tensors without the agent axis, detached, contiguous."""
        states = self.state_dict()
        return [
            {name: tensor[agent].detach().clone() for name, tensor in states.items()}
            for agent in range(self.agents)
        ]

    @classmethod
    def from_head_states(
        cls, spec: RankerSpec, states: Sequence[Mapping[str, Tensor]]
    ) -> HeadRankers:
        """Inverse of `head_states`; ValueError, naming the agent, where a state does not fit."""
        expected = head_shapes(spec)
        for agent, state in enumerate(states):
            if {name: tuple(tensor.shape) for name, tensor in state.items()} != expected:
                raise ValueError(f"the tensors of agent {agent} do not fit {spec}")
        with torch.device("meta"):
            rankers = cls(spec, len(states))
        stacks = {name: torch.stack([state[name] for state in states]) for name in expected}
        rankers.load_state_dict(stacks, assign=True)
        return rankers


def head_shapes(spec: RankerSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of one agent's state."""
    with torch.device("meta"):
        states = HeadRankers(spec, 1).state_dict()
    return {name: tuple(tensor.shape[1:]) for name, tensor in states.items()}


def _network(weights: Mapping[str, Tensor], keys: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """The network of the agents in `weights`: [a, N, D] keys and values -> [a, N] scores.

    `places` holds fourier features [a, N, features], or table rows int64 [a, N].
    """
    if "position_table" in weights:
        table = weights["position_table"]
        place = table.gather(1, places[..., None].expand(-1, -1, table.shape[-1]))
    else:
        place = _linear(weights, "position", places)
    inputs = [
        _norm(weights, "key", _linear(weights, "key", _standard(weights, "key", keys))),
        _norm(weights, "value", _linear(weights, "value", _standard(weights, "value", values))),
        _norm(weights, "position", place),
    ]
    hidden = torch.cat(inputs, dim=-1)
    for block in ("first", "second"):
        hidden = F.silu(_norm(weights, block, _linear(weights, block, hidden)))
    return _linear(weights, "score", hidden).squeeze(-1)


def _standard(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    inputs = inputs.float()
    if f"{name}_mean" not in weights:
        return inputs
    return (inputs - weights[f"{name}_mean"][:, None]) / weights[f"{name}_std"][:, None]


def _linear(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    bias = weights[f"{name}_bias"][:, None]
    return torch.baddbmm(bias, inputs, weights[f"{name}_weight"])


def _norm(weights: Mapping[str, Tensor], name: str, inputs: Tensor) -> Tensor:
    scale, shift = weights[f"{name}_norm_weight"], weights[f"{name}_norm_bias"]
    if scale.shape[0] == 1:
        return F.layer_norm(inputs, inputs.shape[-1:], scale[0], shift[0])
    return F.layer_norm(inputs, inputs.shape[-1:]) * scale[:, None] + shift[:, None]
