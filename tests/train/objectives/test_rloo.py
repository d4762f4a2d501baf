from __future__ import annotations

import torch

from kvp.reward import log_prob
from train.objectives.losses import (
    Batch,
    floor_share,
    normalised,
    policy_loss,
    top_entropy,
    within_context,
)


def batch_of(scores: list[torch.Tensor], counted: torch.Tensor) -> Batch:
    return Batch(scores=scores, importances=scores, counted=counted, seeds=range(len(scores)))


def advantages(rewards: torch.Tensor, counted: torch.Tensor, clip: float) -> torch.Tensor:
    batch = batch_of([rewards[0]] * len(rewards), counted)
    return normalised(within_context(rewards, batch), batch, clip)


def test_loss_by_hand() -> None:
    scores = [torch.tensor([[0.3, -0.2]]), torch.tensor([[0.0, 1.0, 2.0]])]
    rankings = [torch.tensor([[[0, 1]], [[1, 0]]]), torch.tensor([[[2, 1, 0]], [[0, 1, 2]]])]
    advantage = torch.tensor([[[1.0], [-1.0]], [[0.5], [-0.5]]])
    counted = torch.tensor([[True], [True]])
    first = log_prob(scores[0], rankings[0][0]) - log_prob(scores[0], rankings[0][1])
    second = log_prob(scores[1], rankings[1][0]) - log_prob(scores[1], rankings[1][1])
    # mean over 2 permutations, per token, mean over 2 contexts
    expected = -(first / 2 / 2 + 0.5 * second / 2 / 3) / 2
    torch.testing.assert_close(
        policy_loss(batch_of(scores, counted), rankings, advantage), expected
    )


def test_advantages_by_hand() -> None:
    # Leave-one-out of (1, 2, 3) is (-1.5, 0, 1.5): deviation sqrt(1.5); the second context is flat.
    rewards = torch.tensor([[[1.0], [2.0], [3.0]], [[7.0], [8.0], [90.0]]])
    counted = torch.tensor([[True], [False]])
    result = advantages(rewards, counted, clip=9.0)
    edge = 1.5**0.5
    expected = torch.tensor([[[-edge], [0.0], [edge]], [[0.0], [0.0], [0.0]]])
    torch.testing.assert_close(result, expected)
    assert advantages(rewards, counted, clip=0.5).abs().max() == 0.5


def test_monitors() -> None:
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(top_entropy(scores), torch.tensor([1.0, 0.0]))
    rewards = torch.tensor([[[-200.0, -200.0], [-3.0, -200.0]]])
    counted = torch.tensor([[True, False]])
    assert floor_share("ratio", rewards, counted) == 0.5
    assert floor_share("skill", rewards, counted) == 0.0
