"""H2O: the ranking against the sets it must pass through; `tests/golden` has the scores."""

import numpy as np
import torch

from kvp.ranking import rank_tokens
from policies.h2o import H2O


def _kept(weights, budget):
    """Last budget // 2 tokens and the heaviest others; ties to the newer token."""
    tokens = len(weights)
    recent = set(range(tokens - budget // 2, tokens))
    others = sorted(set(range(tokens)) - recent, key=lambda i: (-weights[i], -i))
    return recent | set(others[: budget - budget // 2])


def test_ties_are_ranked_by_the_same_rule(make_view):
    """Attention that only looks at itself: all column sums are 1, so everything ties."""
    view = make_view(tokens=11, batch=1, heads=1, group=1, width=11)
    view.keys[0, 0] = 1000 * torch.eye(11)
    view.queries[0, 0] = torch.eye(11)
    ranking = rank_tokens(H2O().score(view))[0, 0].tolist()
    for budget in range(1, 12):
        assert set(ranking[:budget]) == _kept(np.ones(11), budget)
