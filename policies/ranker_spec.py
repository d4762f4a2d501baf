"""Specification of a ranker: its inputs, its size, and the features of a token's position.

Plain data and one pure function; the weights are `policies.ranker`, the arithmetic is
`policies.network`. Inputs may be left out to measure what they contribute: a ranker without an
input has neither its columns nor its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvp.rope import Rope
from policies.recent_features import RECENT_FEATURES

ARCHITECTURES = ("fourier", "paper")
INPUTS = ("key", "value", "position", "distance", "recent")
"""Everything a ranker can read of a token, in the order in which its network takes them; `recent`
is what the last queries attend to (`policies.recent_features`)."""
TOKEN_INPUTS = ("key", "value", "position", "distance")
"""Inputs that need no query, the default."""
PAPER_INPUTS = ("key", "value", "position")
"""Inputs of the paper's ranker: its position table knows nothing of the end of the cache."""
MAX_BLOCKS = 2
MAX_NEIGHBOURS = 1024
_SHORTEST_WAVELENGTH = 4.0


@dataclass(frozen=True, kw_only=True)
class RankerSpec:
    """Architecture of one ranker, the same for every head of a policy."""

    head_dim: int
    """D, channels of a key and of a value."""
    architecture: str = "fourier"
    """`fourier` (positions as features that extrapolate) or `paper` (learned position table)."""
    hidden: int = 256
    """Width of the key and value projections and of the blocks."""
    position_width: int = 32
    """Channels of the embeddings of the position and of `recent`."""
    max_positions: int = 12288
    """Rows of the position table (`paper` only); later positions use the last row."""
    frequencies: int = 16
    """Sine and cosine pairs, wavelengths log-spaced from 4 to `reference_length` tokens."""
    reference_length: int = 4096
    """Tokens by which positions are scaled (`fourier` only); about the trained length."""
    inputs: tuple[str, ...] = TOKEN_INPUTS
    """Some of `INPUTS`, kept in that order. `paper` always has `PAPER_INPUTS`; there
    `TOKEN_INPUTS` mean all that it has."""
    blocks: int = 2
    """Hidden layers after the inputs' projections, 1 or 2."""
    neighbours: int = 0
    """Tokens on either side that add to a token's score; 0: tokens are scored independently."""
    key_frequencies: tuple[float, ...] = ()
    """Radians per position of the model's rotary embedding: keys are turned with them so that the
    end of the cache is position 0. Empty: keys as the model rotated them; `paper` has none."""

    def __post_init__(self) -> None:
        """Raise ValueError on unknown architecture or inputs, or on sizes out of range."""
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"unknown architecture {self.architecture!r}: choose {' or '.join(ARCHITECTURES)}"
            )
        object.__setattr__(self, "inputs", self._checked_inputs())
        object.__setattr__(self, "key_frequencies", self._checked_frequencies())
        no_sizes = ("architecture", "inputs", "neighbours", "key_frequencies")
        sizes = {k: v for k, v in self.to_dict().items() if k not in no_sizes}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} of a ranker must be a positive integer, got {size!r}")
        if self.blocks > MAX_BLOCKS:
            raise ValueError(f"blocks of a ranker must be 1 or {MAX_BLOCKS}, got {self.blocks}")
        reach = self.neighbours
        if type(reach) is not int or not 0 <= reach <= MAX_NEIGHBOURS:
            raise ValueError(
                f"neighbours of a ranker must be an integer in 0..{MAX_NEIGHBOURS}, got {reach!r}"
            )
        if reach and self.architecture == "paper":
            raise ValueError("neighbours of a ranker need the fourier architecture")

    def _checked_inputs(self) -> tuple[str, ...]:
        given = tuple(self.inputs)
        unknown = [name for name in given if name not in INPUTS]
        if unknown:
            raise ValueError(
                f"unknown input {unknown[0]!r} of a ranker: choose {', '.join(INPUTS)}"
            )
        inputs = tuple(name for name in INPUTS if name in given)
        if len(inputs) < len(given):
            raise ValueError(f"inputs of a ranker are named once each, got {', '.join(given)}")
        if not inputs:
            raise ValueError(f"inputs of a ranker cannot be empty: choose from {', '.join(INPUTS)}")
        if self.architecture == "paper":
            if inputs not in (TOKEN_INPUTS, PAPER_INPUTS):
                raise ValueError(
                    f"inputs of the paper architecture are always {', '.join(PAPER_INPUTS)}, "
                    f"got {', '.join(inputs)}: leave inputs out with fourier"
                )
            return PAPER_INPUTS
        return inputs

    def _checked_frequencies(self) -> tuple[float, ...]:
        given = tuple(self.key_frequencies)
        if given and (self.architecture == "paper" or "key" not in self.inputs):
            raise ValueError("key_frequencies of a ranker need the fourier architecture and keys")
        if 2 * len(given) > self.head_dim or not all(
            isinstance(value, float) and math.isfinite(value) for value in given
        ):
            raise ValueError(
                f"key_frequencies of a ranker must be at most head_dim / 2 numbers, got {given!r}"
            )
        return given

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

    def width_of(self, name: str) -> int:
        """Channels of one of `projected` once projected."""
        return self.hidden if name in ("key", "value") else self.position_width

    def features_of(self, name: str) -> int:
        """Channels of one of `projected` before its projection."""
        sizes = {"position": self.position_features, "recent": len(RECENT_FEATURES)}
        return sizes.get(name, self.head_dim)

    @property
    def position_features(self) -> int:
        """Width of the `fourier` features of a token's position before their projection."""
        width = 2 + 2 * self.frequencies if "position" in self.inputs else 0
        return width + ("distance" in self.inputs)

    @property
    def features(self) -> tuple[str, ...]:
        """Features of a token, in input order (recorded in policy files)."""
        if self.architecture == "paper":
            return ("key", "value", "position_table[min(position, max_positions - 1)]")
        key = "key turned by -length" if self.key_frequencies else "key"
        texts = (
            ("key", f"({key} - key_mean) / key_std"),
            ("value", "(value - value_mean) / value_std"),
            ("position", "position / reference_length"),
            ("position", "log1p(position) / log1p(reference_length)"),
            ("distance", "log1p(length - 1 - position) / log1p(reference_length)"),
            ("position", "sin(2 pi position / wavelength)"),
            ("position", "cos(2 pi position / wavelength)"),
            *(("recent", text) for text in RECENT_FEATURES),
        )
        return tuple(text for name, text in texts if name in self.inputs)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionary for JSON."""
        frequencies = list(self.key_frequencies)
        return {**asdict(self), "inputs": list(self.inputs), "key_frequencies": frequencies}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankerSpec:
        """Inverse of `to_dict`; TypeError on unknown keys, ValueError on values out of range."""
        return cls(**data)


def keys_seen_from_the_end(spec: RankerSpec, keys: Tensor, length: int | Tensor) -> Tensor:
    """Keys [..., N, D] after RoPE, turned by minus `length` positions: float32.

    A query that follows the cache at distance d from its end then sees in a key what a query at
    position d would see in it, whatever the length. `length` as for `position_features`.
    """
    rope = Rope(frequencies=torch.tensor(spec.key_frequencies, device=keys.device))
    return rope.unrotate(keys, torch.as_tensor(length, device=keys.device))


def wavelengths(spec: RankerSpec, device: torch.device) -> Tensor:
    """Tokens per turn of the sines and cosines of `fourier` positions: float32 [frequencies]."""
    exponents = torch.linspace(0, 1, spec.frequencies, device=device)
    ratio = max(spec.reference_length / _SHORTEST_WAVELENGTH, 1.0)
    return _SHORTEST_WAVELENGTH * ratio**exponents


def position_features(spec: RankerSpec, positions: Tensor, length: int | Tensor) -> Tensor:
    """Features of `fourier` for positions [..., N]: float32 [..., N, position_features].

    `length` is the number of tokens seen when the cache is compressed (last position + 1), as one
    number or one per token; distance to the end is legal information at eviction time.
    """
    position = positions.float()
    scale = math.log1p(spec.reference_length)
    trends, waves = [], []
    if "position" in spec.inputs:
        lengths = wavelengths(spec, positions.device)
        angle = 2 * math.pi * (position[..., None] % lengths) / lengths
        trends += [position / spec.reference_length, position.log1p() / scale]
        waves = [angle.sin(), angle.cos()]
    if "distance" in spec.inputs:
        remaining = (length - 1 - positions).float().clamp_min(0)
        trends.append(remaining.log1p() / scale)
    return torch.cat([torch.stack(trends, dim=-1), *waves], dim=-1)
