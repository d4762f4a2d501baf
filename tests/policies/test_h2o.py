"""H2O: ties; `tests/golden` has the scores."""

import torch

from kvp.ranking import rank_tokens
from policies.h2o import H2O


def test_of_equal_tokens_the_newer_ones_stay(make_view):
    """Attention that only looks at itself: all column sums are 1, so everything ties."""
    view = make_view(tokens=11, batch=1, heads=1, group=1, width=11)
    view.keys[0, 0] = 1000 * torch.eye(11)
    view.queries[0, 0] = torch.eye(11)
    ranking = rank_tokens(H2O().score(view))[0, 0].tolist()
    for budget in range(1, 12):
        assert set(ranking[:budget]) == set(range(11 - budget, 11))
