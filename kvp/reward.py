"""The Plackett-Luce policy and the rewards of rankings (KVP paper, section 3.1).

The policy draws rankings of the N tokens of one context: the first token with probability
proportional to exp(score), the second among the rest, and so on (equations 2 and 3).

Rewards are about the attention a ranking loses over *all* budgets. Importance w is the future
attention of every token (`kvp.ops.future_attention`), float32 or float64. A cache of budget b keeps
the first b tokens of a ranking σ and loses E_b = sum_{r>b} w_{σ_r} (equation 5). The token at rank
r is evicted by exactly the budgets 1..r-1, so the sum over all budgets (equation 4) needs no loop:
sum_{b=1}^{N-1} E_b = sum_r (r-1) w_{σ_r}. Costs are positive, lower is better; rewards are higher =
better (the paper's quotient of two negative rewards would have to be minimised).

Tokens are the last axis; leading axes of `ranking` (samples, heads) broadcast over `importance`.
Callers decide which tokens take part (they drop protected ones) and have the optimiser.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def log_prob(scores: Tensor, ranking: Tensor) -> Tensor:
    """Log-probability of rankings: sum_i [s_{σ_i} - logsumexp_{j>=i} s_{σ_j}] (equation 2), O(N).

    Scores [..., N], differentiable, half precision computed in float32; rankings [..., N] int64,
    most important token first, whose extra leading axes (samples) broadcast -> natural logs [...].
    """
    ranked = _single_precision(scores).expand(ranking.shape).gather(-1, ranking)
    log_rest = ranked.flip(-1).logcumsumexp(-1).flip(-1)
    return (ranked - log_rest).sum(-1)


@torch.no_grad()
def gumbel_sort(
    scores: Tensor,
    samples: int,
    generator: torch.Generator | None = None,
    *,
    shard: slice | None = None,
    heads: int | None = None,
) -> Tensor:
    """Draw rankings: sort s_i + g_i in descending order, g_i ~ Gumbel(0, 1) (equation 3).

    Scores [..., N], half precision computed in float32 -> [K, ..., N] int64, K = `samples`, most
    important token first, independent over K. With `shard` and `heads` the scores are those of
    the heads `shard` among `heads` ones: the noise of all is drawn, on the generator's device, so
    that a shard gets the rankings that the whole model would give it.

    Noise is minus the log of a unit exponential, which keeps its upper tail in float32 (-log(-log
    u) of a float32 uniform cannot exceed 16).
    """
    shape = scores.shape if heads is None else (heads, *scores.shape[1:])
    source = scores.device if generator is None else generator.device
    unit = torch.empty((samples, *shape), device=source).exponential_(generator=generator)
    noise = -unit.clamp_min(torch.finfo(unit.dtype).tiny).log().to(scores.device)  # [K, ..., N]
    noise = noise if shard is None else noise[:, shard]
    return (_single_precision(scores) + noise).argsort(dim=-1, descending=True)


def _single_precision(scores: Tensor) -> Tensor:
    """At least float32: half-precision scores would tie."""
    return scores if scores.dtype == torch.float64 else scores.float()


def all_budgets_cost(importance: Tensor, ranking: Tensor) -> Tensor:
    """Importance lost, summed over the budgets 1..N-1: sum_r (r-1) w_{σ_r} (equation 4).

    Importance [..., N] float32 or float64, >= 0, and rankings [..., N] int64 -> [...], same dtype.
    """
    ranked = _rank_importance(importance, ranking)
    # Not a matrix product, which would round a row by the number of other rows.
    return (ranked * _coefficients(ranked)).sum(-1)


def ideal_cost(importance: Tensor) -> Tensor:
    """Cost of the best ranking σ*, by descending importance: [..., N] -> [...]."""
    ranked = importance.sort(dim=-1, descending=True).values
    return (ranked * _coefficients(ranked)).sum(-1)


def random_cost(importance: Tensor) -> Tensor:
    """Mean cost of a uniformly random ranking, W (N-1) / 2: [..., N] -> [...]."""
    return importance.sum(-1) * _coefficients(importance).mean()


def skill_reward(importance: Tensor, cost: Tensor) -> Tensor:
    """(random - cost) / (random - ideal): 1 is perfect, 0 as good as chance; ours, bounded above.

    `cost` [...] is one of `all_budgets_cost` or a mean of them. Where all tokens are equally
    important there is nothing to learn, and every ranking gets 0. The metric,
    `kvp.ranking_metrics.skill`, takes a protection, and is NaN for heads without signal.
    """
    chance = random_cost(importance)
    span = chance - ideal_cost(importance)
    equal = span <= 1e-6 * chance  # no order among the tokens
    return torch.where(equal, 0.0, (chance - cost) / torch.where(equal, 1.0, span))


def ratio_reward(importance: Tensor, cost: Tensor) -> Tensor:
    """Minus cost / ideal cost (the paper's normalisation), with coefficients r.

    The coefficients are r instead of r-1, that is, budget 0 counts too: both costs grow by W, which
    keeps the quotient bounded where one token holds all the attention. `cost` as in `skill_reward`.
    """
    total = importance.sum(-1)
    return -(cost + total) / (ideal_cost(importance) + total).clamp_min(1e-8)


def reward_rankings(
    reward: Callable[[Tensor, Tensor], Tensor], importance: Tensor, ranking: Tensor
) -> Tensor:
    """`reward` of rankings, at least -200, which only ratios reach; as `all_budgets_cost`."""
    return reward(importance, all_budgets_cost(importance, ranking)).clamp(min=-200.0)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the mean reward of the other K-1 rankings of the same context (equation 6).

    Rewards [K, ...], K >= 2 rankings per context -> advantages [K, ...], which sum to zero over K.
    """
    samples = rewards.shape[0]
    return (rewards - rewards.mean(0)) * (samples / (samples - 1))


def cost_curve(importance: Tensor, ranking: Tensor) -> Tensor:
    """Importance lost at every budget, E_b for b = 0..N (equation 5): -> [..., N + 1].

    E_0 = W and E_N = 0. Arguments as `all_budgets_cost`.
    """
    lost = _rank_importance(importance, ranking).flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(lost, (0, 1))


def _rank_importance(importance: Tensor, ranking: Tensor) -> Tensor:
    return importance.expand(ranking.shape).gather(-1, ranking)


def _coefficients(values: Tensor) -> Tensor:
    """Rank minus one for the ranks r = 1..N."""
    return torch.arange(values.shape[-1], dtype=values.dtype, device=values.device)


def expected_cost(importance: Tensor, scores: Tensor, block: int = 256) -> Tensor:
    """Exact mean of `all_budgets_cost` under Plackett-Luce scores, differentiable once.

    Token j precedes i with probability sigmoid(s_j - s_i), and the cost is linear in ranks, so its
    mean is sum_i w_i sum_{j != i} sigmoid(s_j - s_i). The paper does not use this; RLOO (its
    equation 6) is an unbiased estimate of the gradient of exactly this function.

    Importance, not differentiated, and scores [..., N] of one dtype -> [...]. O(N^2) time. One pass
    also accumulates the gradient: forward and backward take two tiles of `block` x N of memory.
    """
    cost: Tensor = _ExpectedCost.apply(importance, scores, block)  # type: ignore[no-untyped-call]
    return cost


class _ExpectedCost(torch.autograd.Function):
    """Cost and gradient from one pass over the tiles on and above the diagonal.

    With p = sigmoid(s_j - s_i) for a pair: it adds w_i p + w_j (1 - p) to the cost, and
    (w_i - w_j) p (1 - p) to the gradient of s_j and the opposite to that of s_i.
    """

    @staticmethod
    def forward(ctx: Any, importance: Tensor, scores: Tensor, block: int) -> Tensor:  # noqa: ANN401
        cost = -0.5 * importance.sum(-1)  # the diagonal tiles below count j = i, with sigmoid(0)
        gradient = torch.zeros_like(scores)
        for start in range(0, scores.shape[-1], block):
            tile, rest = slice(start, start + block), slice(start + block, None)
            score, weight = scores[..., tile], importance[..., tile]
            inside = (score[..., None, :] - score[..., :, None]).sigmoid_()
            cost = cost + (weight * inside.sum(-1)).sum(-1)
            slope = inside.mul_(1 - inside)
            gradient[..., tile] += _times(weight, slope) - weight * slope.sum(-2)
            later, later_weight = scores[..., rest], importance[..., rest]
            before = (later[..., None, :] - score[..., :, None]).sigmoid_()
            cost = cost + (weight * before.sum(-1)).sum(-1)
            cost = cost + (later_weight * (score.shape[-1] - before.sum(-2))).sum(-1)
            slope = before.mul_(1 - before)
            gradient[..., rest] += _times(weight, slope) - later_weight * slope.sum(-2)
            gradient[..., tile] += _times(later_weight, slope.mT) - weight * slope.sum(-1)
        ctx.save_for_backward(gradient)
        return cost

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor, None]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return None, upstream[..., None] * gradient, None


def _times(vector: Tensor, matrix: Tensor) -> Tensor:
    """[..., R] times [..., R, C] -> [..., C]."""
    return (vector[..., None, :] @ matrix).squeeze(-2)
