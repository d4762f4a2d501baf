"""The contract between methods and models: what a scorer sees, declares and returns.

A scorer ranks the tokens of one layer's cache; `kvp.hf` (or a trace) supplies the view. Selection,
protection and budgets are `kvp.ranking`; which methods exist is `policies.roster`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

ALL_QUERIES = -1
"""`Needs.queries` value of a method that reads the query of every cached token."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a scorer reads beside keys, values and positions; the caller supplies exactly that."""

    queries: int = 0
    """How many of the most recent queries (tokens), or `ALL_QUERIES`."""
    future: bool = False
    """True only for hindsight methods: the attention future queries really paid."""


@dataclass(frozen=True, kw_only=True)
class View:
    """One layer's cache at the moment of compression, without padding.

    Batches with padding are scored one row at a time, so every token of a view is real.
    """

    layer: int
    """Layer index, 0-based."""
    keys: Tensor
    """[B, H, N, D] keys after RoPE, in the model's dtype."""
    values: Tensor
    """[B, H, N, D] values, in the model's dtype."""
    positions: Tensor
    """[B, N] int64 true positions, ascending."""
    budget: int
    """Tokens per KV head to be kept, protected ones included (methods with windows adapt)."""
    queries: Tensor | None = None
    """[B, Q, W, D] queries after RoPE of the last W tokens, W = min(needs.queries, N)."""
    future: Tensor | None = None
    """[B, H, N] float32 future attention of every token (`kvp.ops.future_attention`)."""


@runtime_checkable
class Scorer(Protocol):
    """A method that ranks tokens. Higher score = keep; ties go to the newer token."""

    @property
    def name(self) -> str:
        """Roster name with its options, e.g. `snapkv:kvpress`."""
        ...

    @property
    def needs(self) -> Needs:
        """What the view must carry."""
        ...

    def score(self, view: View) -> Tensor:
        """Score every token of one layer: [B, H, N] float32, finite or -inf, never NaN."""
        ...
