"""The published fitness, at numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from eval.evolve.fitness import cache_score, fitness, reply_score


@pytest.mark.parametrize(
    ("mean", "expected"),
    [(128, 1.0), (256, 0.0), (0, 0.8), (64, 0.9), (192, 0.5), (512, 0.0)],
)
def test_cache_score(mean: float, expected: float) -> None:
    assert cache_score(mean, 128, gamma=0.2) == pytest.approx(expected)


def test_fitness() -> None:
    assert fitness(1.0, 128, 128, lambda_=0.3, gamma=0.2) == pytest.approx(1.3)
    assert fitness(0.5, 64, 128, lambda_=0.3, gamma=0.2) == pytest.approx(0.5 * 1.27)
    assert fitness(1.0, 256, 128, lambda_=0.3, gamma=0.2) == pytest.approx(1.0)


def test_useless_candidates_still_differ_by_their_size() -> None:
    small, large = (fitness(0.0, mean, 128, lambda_=0.3, gamma=0.2) for mean in (128, 250))
    assert 0 < large < small < 1e-5


def test_replies_score_as_one_over_perplexity() -> None:
    assert reply_score(0.0, 7) == 1.0
    assert reply_score(3 * math.log(4), 3) == pytest.approx(0.25)
