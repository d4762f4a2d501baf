"""The type of a label: how it is computed, and which stores hold it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from kvp.errors import UsageError
from kvp.plugins import own_errors
from kvp.store import StorePlan
from train.labels import LABELS

FromQueries = Callable[[Tensor, Tensor, int, int], Tensor]
"""(queries [L, H, G, T, D], keys [L, H, T, D], prefix_length N, stop) -> importance [L, H, N]
float32, >= 0, of the first N tokens for the queries at N <= j < stop; both after RoPE."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """Importance of cached tokens at a compression point.

    Either computed from a trace's queries (`from_queries`) or stored next to it for every prompt
    token (`stored`); exactly one of the two.
    """

    from_queries: FromQueries | None = None
    """Computes the label from the queries of a trace."""
    stored: str | None = None
    """Name under which `kvp-collect --labels` stores it."""
    in_grid: bool = False
    """Whether stores of importance grids, which have no queries, hold it at all of their points."""
    summed: bool = False
    """Whether it is a sum over the future's queries, so that a mean per query makes sense."""

    def __post_init__(self) -> None:
        """Raise ValueError unless there is exactly one way to get the label."""
        if (self.from_queries is None) == (self.stored is None):
            raise ValueError("a label is either computed from queries or stored")

    def computed(self, queries: Tensor, keys: Tensor, prefix_length: int, stop: int) -> Tensor:
        """The label from the queries of a trace, shapes as `FromQueries`.

        Raises UsageError where a user's own label fails or returns what is no importance.
        """
        assert self.from_queries is not None, "stored labels come with the trace"
        what = f"label {getattr(self.from_queries, '__name__', self.from_queries)}"
        with own_errors(self.from_queries, what):
            importance = self.from_queries(queries, keys, prefix_length, stop)
        if (shape := (*keys.shape[:2], prefix_length)) != tuple(importance.shape):
            raise UsageError(f"{what} returned {tuple(importance.shape)}, expected {shape}")
        if not _finite(importance) and _finite(queries) and _finite(keys):  # else: broken traces
            raise UsageError(f"{what} returned NaN or infinity")
        if bool((importance < 0).any()):
            raise UsageError(f"{what} returned negative importance")
        return importance

    def missing(self, plan: StorePlan) -> str | None:
        """Error message if a store of this plan lacks the label, with the remedy; else None."""
        if self.stored is not None:
            if self.stored in plan.labels:
                return None
            return f"holds no such label; collect it with kvp-collect --labels {self.stored}"
        if plan.store == "qkv" or (plan.store == "importance" and self.in_grid):
            return None
        if plan.store == "importance":
            return (
                "keeps importance in place of queries, and not this label at every compression "
                "point; use --label future_attention, or collect with kvp-collect --store qkv"
            )
        return "was collected without queries; collect with kvp-collect --store qkv"


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


@cache
def label_of(name: str) -> Label:
    """The label of a name in `LABELS`; UsageError where there is none that can be used."""
    label = LABELS.load(name)
    if not isinstance(label, Label):
        raise UsageError(f"--label {name} is not a train.labels.label.Label")
    return label
