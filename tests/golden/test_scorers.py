"""Every scorer against its formula in float64: values, and the sets kept at many budgets.

A set is compared where it is decided: where the last token kept and the first one dropped differ by
more than float32 can confuse, or tie exactly, in which case the newer one must stay. Almost every
case is decided, which is asserted.
"""

import numpy as np
import pytest
import torch
from reference.contrast import contrastkv
from reference.inputs import SHAPES, constant, draw
from reference.methods import GOLDEN, NOT_COMPUTED
from reference.ranking import FORCED, kept, order, protected, tied, undecided

from kvp.protection import UNPROTECTED, Protection
from kvp.ranking import Selection, rank_tokens
from policies.registry import SCORERS, make_scorer

DEFAULT = Protection(sinks=4, recents=16)
each = pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden.spec)


def compare(golden, inputs, *, ties=True):
    """Assert agreement at every budget; returns compared and all (budget, head) pairs."""
    scorer = make_scorer(golden.spec)
    tokens = inputs.shape[2]
    compared = total = 0
    # Both ends, quarters, and numbers around protection and windows.
    wanted = {1, 2, 3, tokens // 4, tokens // 2, 3 * tokens // 4, tokens - 1, 21, 32, 64, 65, 130}
    for budget in sorted(budget for budget in wanted if 0 < budget < tokens):
        scores = scorer.score(inputs.view(scorer.needs, budget))
        truth = golden.truth(inputs, budget)
        assert scores.shape == truth.shape
        assert scores.dtype == torch.float32
        if golden.values:
            unforced = np.abs(truth) < FORCED
            np.testing.assert_allclose(
                scores.numpy()[unforced], truth[unforced], rtol=golden.rtol, atol=golden.atol
            )
        for protection in (UNPROTECTED, DEFAULT):
            if budget < protection.tokens:
                continue
            expected = protected(truth, protection.sinks, protection.recents)
            decided = ~undecided(expected, budget, golden.rtol, golden.atol)
            if not ties:
                decided &= ~tied(expected, budget)
            mask = np.zeros(truth.shape, bool)
            np.put_along_axis(mask, Selection(scores, protection).tokens(budget).numpy(), True, -1)
            same = (mask == kept(expected, budget)).all(axis=-1)
            assert same[decided].all(), (golden.spec, tokens, budget, protection)
            compared, total = compared + int(decided.sum()), total + decided.size
    return compared, total


@each
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_kept_sets(golden, shape):
    results = [compare(golden, draw(tokens, shape)) for tokens in golden.lengths]
    compared, total = (sum(counts) for counts in zip(*results, strict=True))
    assert compared >= 0.9 * total


@each
def test_ties_go_to_the_newer_token(golden):
    """All tokens are equal, so every budget ends in a tie."""
    for tokens in (golden.lengths[-1], 26):
        compared, total = compare(golden, constant(tokens), ties=golden.sums_tie)
        assert compared == total or not golden.sums_tie


def test_contrastkv_with_tokens_on_its_quantiles():
    """21 tokens: 0.1 (N - 1) is whole, so quantiles are tokens; whole rankings, many draws."""
    scorer = make_scorer("contrastkv")
    compared = total = 0
    for seed in range(80):
        inputs = draw(21, seed=seed)
        truth = contrastkv(inputs, 10)
        rankings = rank_tokens(scorer.score(inputs.view(scorer.needs, 10))).numpy()
        near = np.any([undecided(truth, budget, 0.0, 1e-6) for budget in range(1, 21)], axis=0)
        assert (rankings == order(truth))[~near].all()
        compared, total = compared + int((~near).sum()), total + near.size
    assert compared >= 0.9 * total


def test_gvote_draws_a_diagonal_gaussian():
    """One noise, scaled and shifted: the same for all statistics; about standard normal."""
    scorer = make_scorer("gvote(samples=300)")
    noises = []
    for seed in (1, 2):
        inputs = draw(40, seed=seed)
        scorer.score(inputs.view(scorer.needs, 10))
        seen = inputs.hidden[:, 4:].astype(np.float64)
        drawn = np.concatenate(inputs.drawn, axis=1)
        noises.append((drawn - seen.mean(axis=1, keepdims=True)) / seen.std(axis=1, keepdims=True))
    np.testing.assert_allclose(*noises, atol=1e-4)
    assert noises[0].shape == (1, 300, 12)
    assert abs(noises[0].mean()) < 4 / 3600**0.5
    assert abs(noises[0].var() - 1) < 4 * (2 / 3600) ** 0.5
    assert abs(np.corrcoef(noises[0][0].T) - np.eye(12)).max() < 5 / 300**0.5


def test_every_scorer_of_the_registry_is_in_the_table_with_its_presets():
    specs = {golden.spec for golden in GOLDEN}
    for name, entry in SCORERS.items():
        if name not in NOT_COMPUTED:
            assert {name, *(f"{name}:{preset}" for preset in entry.presets)} <= specs
