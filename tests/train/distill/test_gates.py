"""Gates of a budget: they sum to it, follow the scores, and end in eviction."""

from __future__ import annotations

import pytest
import torch

from train.distill.distillation import hard_log_gates, soft_log_gates


@pytest.fixture
def scores() -> torch.Tensor:
    return torch.randn(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("width", [2.0, 0.5, 0.05])
@pytest.mark.parametrize("kept", [3, 30, 117])
def test_soft_gates_sum_to_the_budget(scores: torch.Tensor, kept: int, width: float) -> None:
    gates = soft_log_gates(scores, kept, width).exp()
    assert float(gates.sum()) == pytest.approx(kept, rel=1e-4)
    assert (gates.flatten()[scores.flatten().argsort()].diff() >= 0).all()


def test_gradients_keep_the_budget(scores: torch.Tensor) -> None:
    scores.requires_grad_(True)
    (of_sum,) = torch.autograd.grad(soft_log_gates(scores, 30, 0.5).exp().sum(), scores)
    assert of_sum.abs().max() < 1e-9

    def one(values: torch.Tensor) -> torch.Tensor:
        return soft_log_gates(values, 30, 0.5)[1, 7]

    (gradient,) = torch.autograd.grad(one(scores), scores)
    for place in ((1, 7), (0, 3), (2, 39)):
        step = torch.zeros_like(scores)
        step[place] = 1e-5
        with torch.no_grad():
            slope = (one(scores + step) - one(scores - step)) / 2e-5
        assert float(slope) == pytest.approx(float(gradient[place]), rel=1e-3, abs=1e-7)


def test_a_low_width_is_eviction(scores: torch.Tensor) -> None:
    soft = soft_log_gates(scores, 30, 1e-4).exp()
    hard = hard_log_gates(scores, 30).exp()
    assert (soft - hard).abs().sum() < 2  # but for the tokens at the threshold
    assert hard.sum() == 30


def test_every_head_keeps_a_token() -> None:
    scores = torch.arange(20.0).view(2, 10)
    hard = hard_log_gates(scores, 4).exp()
    assert hard.sum(-1).tolist() == [1, 4]
