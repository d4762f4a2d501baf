from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from train.optim import average_decay, clip_per_head, learning_rate_factor, update_average


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 0.01),
        (50, 0.505),
        (100, 1.0),
        (1_100, 0.505),  # half of the cosine between 1 and 0.01
        (600, 0.01 + 0.99 * (1 + math.sqrt(0.5)) / 2),  # a quarter of it
        (2_100, 0.01),
        (9_999, 0.01),
    ],
)
def test_schedule_by_hand(step: int, factor: float) -> None:
    value = learning_rate_factor(step, steps=2_100, warmup=100, final_factor=0.01)
    assert value == pytest.approx(factor, abs=1e-12)


def test_schedule_without_warmup() -> None:
    assert learning_rate_factor(0, steps=1, warmup=0, final_factor=0.1) == 1.0


def test_clip_per_head_equals_separate_clipping() -> None:
    random = torch.Generator().manual_seed(0)
    heads = 3
    parameters = [nn.Parameter(torch.zeros(heads, *shape)) for shape in [(4, 5), (6,), (1,)]]
    scales = torch.tensor([0.1, 1.0, 30.0])
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=random)
        parameter.grad = gradient * scales.view(-1, *[1] * (parameter.dim() - 1))
    alone = []
    for head in range(heads):
        copies = [nn.Parameter(parameter.detach()[head].clone()) for parameter in parameters]
        for copy, parameter in zip(copies, parameters, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad[head].clone()
        norm = torch.nn.utils.clip_grad_norm_(copies, 5.0)
        alone.append((norm, copies))
    norms = clip_per_head(parameters, 5.0)
    assert norms[0] < 5 < norms[2]
    for head, (norm, copies) in enumerate(alone):
        torch.testing.assert_close(norms[head], norm)
        for copy, parameter in zip(copies, parameters, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad[head], copy.grad)


@pytest.mark.parametrize(
    ("step", "decay"),
    [(1, 0.0), (20, 0.0), (21, 2 / 11), (110, 91 / 100), (910, 891 / 900), (911, 0.99)],
)
def test_averaging_starts_softly_after_the_warmup(step: int, decay: float) -> None:
    assert average_decay(step, warmup=20, ema=0.99) == pytest.approx(decay)


def test_average_by_hand() -> None:
    mean, model = nn.Linear(1, 1), nn.Linear(1, 1)
    for parameter in mean.parameters():
        nn.init.constant_(parameter, 1.0)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
    update_average(mean, model, 0.75)
    assert mean.weight.item() == pytest.approx(1.5)
    update_average(mean, model, 0.0)
    assert mean.bias.item() == 3.0
