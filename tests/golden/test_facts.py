"""Known numbers and identities of the methods, and the test that holds each of them.

Most stand beside the code they are about; the table points there and is checked, so that a fact
cannot lose its test unnoticed. Those that concern several parts at once are tested below. Soft
ranks (an ablation of the KVP paper) have no code here, hence no entry.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from reference.inputs import draw

from kvp.allocation import Request
from kvp.ranking import rank_tokens
from policies.allocators.evolved import completed
from policies.registry import make_allocator, make_scorer

TESTS = Path(__file__).parents[1]

HELD_BY = {
    "sum of the costs of all budgets is sum (r - 1) w; budget 0 adds W":
        "kvp/test_reward.py::test_closed_form_equals_the_sum_over_budgets",
    "ranges of budgets and budgets weighted by 1/b have closed coefficients":
        "kvp/test_reward.py::test_any_weighting_of_budgets_follows_from_the_curve",
    "Plackett-Luce by reversed cumulative logsumexp is the stepwise product":
        "kvp/test_plackett_luce.py::test_equals_the_stepwise_product",
    "its gradient has a closed form and sums to 0":
        "kvp/test_plackett_luce.py::test_gradient_is_the_closed_form_and_sums_to_zero",
    "scores 1, 0, -1: first with 0.665, 0.245, 0.090":
        "kvp/test_plackett_luce.py::test_gumbel_sort_draws_with_plackett_luce_frequencies",
    "scores 1, 0, -1: this order with 0.4863":
        "kvp/test_plackett_luce.py::test_known_probability",
    "expected cost in closed form against sampling":
        "kvp/test_expected_cost.py::test_expected_cost_agrees_with_sampling",
    "expected ranks sum to n (n + 1) / 2":
        "kvp/test_expected_cost.py::test_expected_ranks_sum_to_a_constant",
    "leave-one-out of 1, 2, 3 is -1.5, 0, 1.5":
        "kvp/test_reward.py::test_leave_one_out_advantages",
    "a random ranking costs W (n - 1) / 2":
        "kvp/test_reward.py::test_no_ranking_beats_the_ideal_and_chance_is_the_mean",
    "parameters of the published ranker: 273,729 and 32 per position":
        "policies/test_ranker.py::test_parameters_per_head_explain_the_papers_600k_and_650k",
    "PyramidKV, 32 layers: 242 to 25 for 128 (mean 133.5), 991 to 61 for 512 (526)":
        "policies/allocators/test_pyramid.py::test_the_published_integers_and_their_leak",
    "WindowKV's code: 768, 598, 428, 258 and 732, 586, 440, 294":
        "policies/allocators/test_windowkv.py::test_the_integers_of_the_code",
    "population of CMA-ES: 6, 8, 10, 12, 14":
        "eval/evolve/test_search.py::test_population",
    "EvolKV's cache score: 1, 0, 0.8, 0.9":
        "eval/evolve/test_fitness.py::test_cache_score",
    "EvolKV's fitness at the target: 1.3":
        "eval/evolve/test_fitness.py::test_fitness",
    "H2O's sets are nested, prefixes of its ranking":
        "policies/test_h2o.py::test_every_prefix_of_the_ranking_is_the_set_of_its_budget",
    "K-Norm ignores RoPE":
        "policies/test_knorm.py::test_rotary_embedding_changes_nothing",
    "KeyDiff does not":
        "policies/test_keydiff.py::test_rotary_embedding_changes_the_ranking",
    "ContrastKV without fusion is KVzip":
        "policies/test_contrastkv.py::test_without_fusion_it_is_kvzip",
    "GVote grows with p_nuc and with samples":
        "policies/test_gvote.py::test_sets_grow_with_p_and_with_samples",
    "AdaKV with safeguard 1 is uniform":
        "policies/allocators/test_ada.py::test_whatever_the_scores_safeguard_one_is_uniform",
    "LagKV ranks short caches by recency":
        "policies/test_lagkv.py::test_short_caches_are_ranked_by_recency_after_the_sinks",
}  # fmt: skip


@pytest.mark.parametrize("fact", HELD_BY)
def test_every_fact_has_its_test(fact: str) -> None:
    file, name = HELD_BY[fact].split("::")
    assert re.search(rf"^def {name}\(", (TESTS / file).read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("layers", [1, 8, 28, 32])
def test_evolved_completion_overshoots_by_less_than_a_token_per_layer(layers: int) -> None:
    """Rounded up as published: 0 to L - 1 too many; by largest remainders: none."""
    rng = np.random.default_rng(layers)
    for _ in range(50):
        found = torch.from_numpy(rng.integers(1, 900, layers))
        total = int(rng.integers(layers, 2000)) * layers
        assert 0 <= int(completed(found, total).sum()) - total <= layers - 1


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
