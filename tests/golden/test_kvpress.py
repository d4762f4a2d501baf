"""The presets named after kvpress keep what kvpress 0.5.5 keeps, wherever definitions coincide.

Its selection is torch.topk, whose ties are unspecified, so sets are compared where no tie or near
tie lies at the budget, and as one of the valid top-k sets (LagKV, StreamingLLM) where ties are part
of its definition. Budgets are those of kvpress: `kept_tokens`, truncated. Random is left out.
"""

import itertools

import numpy as np
import pytest
import torch
from reference import kvpress
from reference.inputs import SHAPES, draw
from reference.ranking import kept, undecided
from reference.scorers import lagkv_spread

from kvp.ranking import select
from policies.registry import make_scorer

RATIOS = [0.1, 0.25, 0.5, 0.6, 0.75, 0.9]

SAME_SETS = {
    "knorm:kvpress": (kvpress.knorm, 1),
    "keydiff:kvpress": (kvpress.keydiff, 1),
    "snapkv:kvpress": (kvpress.snapkv, 64),
    "tova:kvpress": (kvpress.tova, 1),
    "h2o:kvpress": (kvpress.observed_attention, 1),
    "expected_attention:kvpress": (kvpress.expected_attention, 4),
}
"""Specification -> its scores there, and the fewest tokens that leave no tie among forced ones."""


def chosen(spec, inputs, budget):
    """Mask [B, H, T] of what the product keeps, nothing protected."""
    scorer = make_scorer(spec)
    indices = select(scorer.score(inputs.view(scorer.needs, budget)), budget)
    mask = torch.zeros(inputs.shape[:3], dtype=torch.bool)
    return mask.scatter_(-1, indices, True).numpy()


def test_truncation_is_that_of_kvpress():
    numbers = [(100, 0.9), (1000, 0.9), (200, 0.8), (10, 0.99)]
    assert [kvpress.kept_tokens(*number) for number in numbers] == [9, 99, 39, 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SAME_SETS)
def test_same_kept_sets(spec, shape):
    scores, least = SAME_SETS[spec]
    compared = total = 0
    for tokens in (65, 150, 300):
        inputs = draw(tokens, shape, seed=5)
        expected = scores(inputs)
        for ratio in RATIOS:
            budget = kvpress.kept_tokens(tokens, ratio)
            if budget < least:
                continue
            decided = ~undecided(expected, budget, 1e-5, 1e-7)
            same = (chosen(spec, inputs, budget) == kept(expected, budget)).all(axis=-1)
            assert same[decided].all(), (spec, tokens, ratio)
            compared, total = compared + int(decided.sum()), total + decided.size
    assert compared >= 0.9 * total


def _is_top(mask, scores):
    """Nothing dropped scores higher than anything kept."""
    worst_kept = np.where(mask, scores, np.inf).min(axis=-1)
    best_dropped = np.where(mask, -np.inf, scores).max(axis=-1)
    return bool((worst_kept >= best_dropped).all())


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("tokens", [65, 300])
def test_streaming_llm_keeps_the_same_tokens(tokens, ratio):
    inputs = draw(tokens)
    budget = kvpress.kept_tokens(tokens, ratio)
    same = kvpress.streaming_llm(inputs, ratio) == 1
    assert (chosen("streaming_llm:kvpress", inputs, budget) == same).all()
    if budget >= 8:  # below, sinks are half of the budget here and four there
        assert (chosen("streaming_llm", inputs, budget) == same).all()


def _ranks_are_clear(inputs):
    """[B, H]: no two tokens of a partition so close that float32 may swap them."""
    spread = np.sort(lagkv_spread(inputs, 4, 128), axis=-1)
    return (np.diff(spread) > 3e-6 * spread[..., 1:]).all(axis=(-2, -1))


@pytest.mark.parametrize("tokens", [260, 300, 390])
def test_lagkv_scores_and_sets_up_to_ties(tokens):
    compared = 0
    for shape, seed in itertools.product(SHAPES, range(4)):
        inputs = draw(tokens, shape, seed=seed)
        clear = _ranks_are_clear(inputs)
        compared += int(clear.sum())
        expected = kvpress.lagkv(inputs)[clear]
        scorer = make_scorer("lagkv:kvpress")
        scores = scorer.score(inputs.view(scorer.needs, 64)).numpy()[clear]
        np.testing.assert_allclose(scores[..., 4:], expected[..., 4:], rtol=1e-5, atol=1e-6)
        for ratio in RATIOS:
            mask = chosen("lagkv:kvpress", inputs, kvpress.kept_tokens(tokens, ratio))[clear]
            assert _is_top(mask, expected)
    assert compared >= 10  # of 28 heads


@pytest.mark.parametrize("tokens", [20, 259])
def test_lagkv_on_short_prompts(tokens):
    inputs = draw(tokens)
    for ratio in RATIOS:
        mask = chosen("lagkv:kvpress", inputs, kvpress.kept_tokens(tokens, ratio))
        assert _is_top(mask, kvpress.lagkv(inputs))
