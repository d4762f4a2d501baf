"""Labels: how the importance of a token is computed, or which stores hold it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kvp.errors import UsageError
from kvp.ops.future_attention import future_attention, max_future_attention
from kvp.plugins import user_errors
from kvp.training_names import STORED_LABELS
from train.recipe import LABELS

EVALUATED = "future_attention"
"""Label that every policy is evaluated on, whatever it was trained on."""

FromQueries = Callable[..., Tensor]
"""(queries [L, H, G, T, D], keys [L, H, T, D], prefix_length N, stop, weights) -> importance
[L, H, N] float32, >= 0, of the first N tokens for the queries at N <= j < stop; both after RoPE.
`weights` [T] float32, what each query counts, is given only if `Label.other_weight` is below 1."""


@dataclass(frozen=True, kw_only=True)
class Label:
    """Importance of cached tokens at a compression point.

    Computed from a trace's queries (`from_queries`), stored next to it for every prompt token
    (`stored`), or the sum of both, each head's computed one scaled to the total of its stored one.
    """

    from_queries: FromQueries | None = None
    stored: str | None = None
    """Name under which `kvp collect --labels` stores it, of `kvp.training_names.STORED_LABELS`."""
    other_weight: float = 1.0
    """Weight, 0 to 1, of queries that write no reply of the assistant (`reply_windows`)."""

    def __post_init__(self) -> None:
        if self.from_queries is None and self.stored is None:
            raise UsageError("a Label needs from_queries=FUNCTION, stored=NAME or both")
        if self.stored not in (None, *STORED_LABELS):
            names = " or ".join(STORED_LABELS)
            raise UsageError(f"a Label's stored is {names}, got {self.stored!r}")
        if not 0 <= self.other_weight <= 1:
            raise UsageError(f"a Label's other_weight is from 0 to 1, got {self.other_weight}")

    def importance_of(
        self, queries: Tensor, keys: Tensor, prefix_length: int, stop: int,
        replies: Sequence[tuple[int, int]] = (), *, name: str,
    ) -> Tensor:  # fmt: skip
        """The label from the queries of a trace, shapes as `FromQueries`.

        `replies` are the [start, stop) token ranges that the assistant wrote. Raises UsageError,
        by `name`, where a user's own label fails or returns what is no importance.
        """
        assert self.from_queries is not None, "labels that are only stored come with the trace"
        arguments = [queries, keys, prefix_length, stop]
        if self.other_weight != 1:
            weights = torch.full(keys.shape[-2:-1], self.other_weight, device=keys.device)
            for first, last in reply_windows(replies, prefix_length, stop):
                weights[first:last] = 1.0
            arguments.append(weights)
        what = f"--label {name}"
        with user_errors(self.from_queries, what):
            importance = self.from_queries(*arguments)
        if not isinstance(importance, Tensor) or not importance.is_floating_point():
            kind = getattr(importance, "dtype", type(importance).__name__)
            raise UsageError(f"{what} returned {kind}, expected a tensor of float32")
        if (shape := (*keys.shape[:2], prefix_length)) != tuple(importance.shape):
            raise UsageError(f"{what} returned {tuple(importance.shape)}, expected {shape}")
        if not bool((importance := importance.float()).isfinite().all()):
            raise UsageError(f"{what} returned NaN or infinity")
        if bool((importance < 0).any()):
            raise UsageError(f"{what} returned negative importance")
        return importance

    @staticmethod
    def add(stored: Tensor, computed: Tensor) -> Tensor:
        """The sum of both parts, [L, H, N] each, with the total of `stored` twice."""
        scale = stored.sum(-1, keepdim=True) / computed.sum(-1, keepdim=True)
        return stored + computed * scale.nan_to_num()  # finite where all computed ones are 0


def reply_windows(spans: Sequence[tuple[int, int]], first: int, stop: int) -> list[tuple[int, int]]:
    """Queries at `first` <= j < `stop` that write replies, as [first, last) windows.

    A reply of the tokens [a, b) is written by the queries of the token before it and of its own.
    Where none writes a reply all count: of running text the model is to write every token.
    """
    windows = [(max(a - 1, first), min(b, stop)) for a, b in spans]
    return [(a, b) for a, b in windows if a < b] or [(first, stop)]


@cache
def load_label(name: str) -> Label:
    """The label of a name in `LABELS`; UsageError where there is none that can be used."""
    label = LABELS.load(name)
    if not isinstance(label, Label):
        raise UsageError(
            f"--label {name} is not a train.data.labels.Label, as Label(from_queries=FUNCTION) is"
        )
    return label


FUTURE_ATTENTION = Label(from_queries=future_attention)
"""Attention to a token, summed over future queries (KVP paper, section 3.1.1). Of the query heads
that share a KV head the largest counts."""

MAX_FUTURE_ATTENTION = Label(from_queries=max_future_attention)
"""The most that any single future query pays to a token: one that a query depends on is more
important than one that many attend to a little (docs/decisions.md#default-label)."""

MAX_REPLY_ATTENTION = Label(from_queries=max_future_attention, other_weight=0.2)
"""Largest attention of the queries that write a reply, and a fifth of that of all others, such as
the question's (docs/decisions.md#default-label)."""

REPLY_AND_KVZIP = replace(MAX_REPLY_ATTENTION, stored="kvzip")
"""`MAX_REPLY_ATTENTION` and KVzip's scores, half of the importance each."""

KVZIP, KVZIP_PLUS = Label(stored="kvzip"), Label(stored="kvzip_plus")
"""KVzip's scores: the attention a token gets while the model repeats its prompt, stored by `kvp
collect --labels` (`kvp.hf.trace.LABEL_PASSES`); the answer's tokens have none."""
