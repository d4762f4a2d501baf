"""One list of tokens for all heads, against plain Python."""

import math

import numpy as np
import pytest
import torch

from kvp.protection import UNPROTECTED, Protection
from kvp.ranking import Selection
from policies.allocators.shared import Shared
from policies.registry import make_allocator

PROTECTIONS = [UNPROTECTED, Protection(sinks=2, recents=3)]


def pooled(scores, pool):
    """[L, H, N] -> [N]."""
    heads = scores.reshape(-1, scores.shape[-1]).tolist()
    combine = {
        "max": max,
        "mean": lambda column: sum(column) / len(column),
        "logsumexp": lambda column: math.log(sum(map(math.exp, column))),
    }[pool]
    return [float(np.float32(combine(column))) for column in zip(*heads, strict=True)]


def kept(scores, budget, protected):
    """Protected tokens, then the best ones, of equal ones the newer."""
    order = sorted(range(len(scores)), key=lambda i: (i not in protected, -scores[i], -i))
    return sorted(order[:budget])


@pytest.mark.parametrize("pool", ["logsumexp", "mean", "max"])
@pytest.mark.parametrize("levels", [3, 300], ids=["ties", "random"])
def test_all_heads_keep_the_best_tokens(pool, levels):
    allocator = Shared(pool=pool)
    for tokens in (1, 5, 16, 37):
        drawn = np.random.default_rng(tokens).integers(0, levels, (2, 3, tokens))
        for protection in PROTECTIONS:
            selection = Selection(torch.from_numpy(drawn).float(), protection)
            recents = range(max(tokens - protection.recents, 0), tokens)
            protected = sorted({*range(min(protection.sinks, tokens)), *recents})
            raised = drawn.astype(float)
            raised[..., protected] = np.inf  # they come first in every head
            for budget in range(max(1, min(tokens, protection.tokens)), tokens + 1):
                truth = kept(pooled(raised, pool), budget, protected)
                chosen = selection.tokens(budget, allocator)
                assert chosen.tolist() == [[truth] * 3] * 2, (tokens, protection, budget)


def test_infinite_scores_do_not_pass_for_protected_tokens():
    scores = torch.tensor([[[0.0, 1, 2, torch.inf, 3]]])
    selection = Selection(scores, Protection(sinks=1, recents=0))
    for budget, truth in ((1, [0]), (2, [0, 3]), (3, [0, 3, 4])):
        assert selection.tokens(budget, make_allocator("shared(pool=max)")).tolist() == [[truth]]


def test_one_ranking_serves_every_budget_of_an_allocator():
    class Counted(Shared):
        calls = 0

        def pooled(self, scores):
            type(self).calls += 1
            return super().pooled(scores)

    scores = torch.rand(2, 2, 9)
    selection, counted = Selection(scores, UNPROTECTED), Counted()
    shared = [selection.tokens(budget, counted).tolist() for budget in (2, 4, 9)]
    assert Counted.calls == 1
    assert selection.tokens(4).tolist() == Selection(scores, UNPROTECTED).tokens(4).tolist()
    assert shared[1] != selection.tokens(4).tolist()
    opposite = Counted()  # of the same name
    object.__setattr__(opposite, "pooled", lambda scores: -counted.pooled(scores))
    assert selection.tokens(4, opposite).tolist() != shared[1]
