"""H2O (arXiv 2306.14048): heavy hitters of accumulated attention, and recent tokens.

Formula and published settings: docs/methods/h2o.md. The sets that budgets keep are nested, so a
token's rank is the smallest budget that keeps it: odd budgets admit the next heavy token, even ones
the next recent token, or, where that is in already, the next heavy one. A cache that has been
shrunk before is ranked by the queries since then.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvp.bounds import NotNegative
from kvp.errors import UsageError
from kvp.ops.attention import column_sums, recent_attention
from kvp.ranking import rank_tokens
from kvp.scoring import ALL_QUERIES, Needs, View
from policies.base import BaseScorer, Grid, Presets


@dataclass(frozen=True, kw_only=True)
class H2O(BaseScorer):
    """Keep tokens that received most attention so far, and recent ones."""

    normalize: Literal["none", "visible"] = "none"
    """`none`, or `visible`: per query that can see the token."""
    recents: bool = True
    """Give half of every budget to the most recent tokens."""
    window: NotNegative = 0
    """Last tokens that are kept whatever the budget; needs recents=false."""

    base_name: ClassVar[str] = "h2o"
    cost: ClassVar[str] = "the whole attention once more, O(G N N D)"
    presets: ClassVar[Presets] = {
        "kvpress": {"normalize": "visible", "recents": False},
        "kvcache_factory": {"recents": False, "window": 32},
    }
    grid: ClassVar[Grid] = {
        "recents": (True, False),
        "normalize": ("none", "visible"),
        "window": (0, 4, 8, 16, 32, 64),
    }

    needs = Needs(queries=ALL_QUERIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window and self.recents:
            raise UsageError(f"{self.base_name}: window={self.window} needs recents=false")

    def score(self, view: View) -> Tensor:
        """Minus the rank (or the accumulated attention, with recents=false): [B, H, N] float32."""
        assert view.queries is not None
        _, heads, tokens, _ = view.keys.shape
        read = view.queries.shape[2]
        if read < tokens:  # a cache that has been shrunk before
            received = recent_attention(view.queries, view.keys, read).sum(dim=-2).mean(dim=-2)
        else:
            queries = torch.unflatten(view.queries, 1, (heads, -1))
            received = column_sums(queries, view.keys).mean(dim=-2)
        if self.normalize == "visible":
            received /= torch.arange(tokens, 0, -1, device=received.device).clamp_max(read)
        if not self.recents:
            received[..., max(tokens - self.window, 0) :] = tokens + 1  # sums stay within N
            return received
        heavy = rank_tokens(received)
        ranks = [_entry_ranks(order) for order in heavy.flatten(0, -2).tolist()]
        return -torch.tensor(ranks, dtype=torch.float32, device=heavy.device).view_as(heavy)


def _entry_ranks(heavy: list[int]) -> list[int]:
    """Rank (1 = first kept) of every token, from the tokens by descending weight."""
    tokens = len(heavy)
    ranks = [0] * tokens
    next_heavy = iter(heavy)
    for budget in range(1, tokens + 1):
        recent = tokens - budget // 2
        if budget % 2 == 0 and not ranks[recent]:
            ranks[recent] = budget
        else:
            ranks[next(token for token in next_heavy if not ranks[token])] = budget
    return ranks
