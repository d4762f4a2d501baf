"""Identities that concern several methods or allocators at once."""

from __future__ import annotations

import torch
from reference.inputs import draw

from kvp.ranking import Request, rank_tokens
from policies.registry import make_allocator, make_scorer


def test_kvzip_is_contrastkv_without_fusion_also_across_heads() -> None:
    """The same tokens at the same budgets under the published split of the budget."""
    inputs = draw(120, (1, 2, 2, 8))
    counts, rankings = [], []
    for spec in ("kvzip", "contrastkv(beta=0,gamma=0)"):
        scorer = make_scorer(spec)
        scores = scorer.score(inputs.view(scorer.needs, 30))
        rankings.append(rank_tokens(scores))
        request = Request(scores=scores, budget=30, floor=1)
        counts.append(make_allocator("global:kvzip").allocate(request))
    assert torch.equal(*rankings)
    assert torch.equal(*counts)


def test_a_safeguard_of_one_makes_every_competition_uniform() -> None:
    scores = torch.rand(3, 2, 50)
    request = Request(scores=scores, budget=17, floor=1)
    for spec in ("ada(safeguard=1)", "ada(safeguard=1,rule=paper)", "global(safeguard=1)"):
        assert (make_allocator(spec).allocate(request) == 17).all()
