"""The losses of rankers: sampled rankings, closed form, listwise and regression; and their input.

Every KV head is an agent with a policy of its own (the paper's view): rewards, baselines and
normalisation stay within one head, and losses are summed over heads, so that what "gradient norm 5"
means does not depend on how many heads train together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvp import reward
from kvp.errors import UsageError
from kvp.plugins import user_errors
from train.recipe import OBJECTIVES, Recipe

FLOOR = 1e-6
"""Added before the logarithm (regress): below it, differences mean nothing."""
_LOGGED = ("train/loss/", "train/flat_share/", "train/gradient_norm/", "train/lr/", "held_out/")
"""What the names of kvp's own numbers begin with."""
_REWARDS = {"skill": reward.skill_reward, "ratio": reward.ratio_reward}
_TILE = 2**22
"""Pairs that `exact` handles at a time: 16 MB of float32."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """C contexts, whose numbers of tokens N may differ, for A heads."""

    scores: Sequence[Tensor]
    """Per context [A, N] floating point, differentiable."""
    importances: Sequence[Tensor]
    """Per context [A, N], >= 0, importance of the tokens (`Recipe.label`)."""
    counted: Tensor
    """[C, A] bool, heads that learn from a context."""
    seeds: Sequence[int]
    """Per context, the seed of its noise."""
    heads: slice = field(default_factory=lambda: slice(None))
    """Heads of the model that the A are, all by default."""
    model_heads: int | None = None
    """Heads of the model, None for A: noise is drawn for all of them, so that a run of some heads
    draws what a run of all draws for them."""

    def mean(self, values: Tensor) -> Tensor:
        """Mean over contexts of [C, A] values, for each head over those that count: [A], or 0."""
        return values.where(self.counted, 0.0).sum(0) / self.counted.sum(0).clamp_min(1)


Objective = Callable[[Batch, Recipe], tuple[Tensor, dict[str, float]]]
"""Loss of every head, [A], of which the sum is minimised, and numbers for the log."""


def load_objective(name: str) -> Objective:
    """The objective of a name in `OBJECTIVES`; UsageError where there is none that can be used."""
    objective: Objective = OBJECTIVES.load(name)
    if not callable(objective):
        raise UsageError(f"--objective {name} is not a function")
    return objective


def compute_losses(
    objective: Objective, batch: Batch, recipe: Recipe
) -> tuple[Tensor, dict[str, float]]:
    """Loss of every head and numbers for the log; UsageError where a user's own objective fails."""
    what = f"--objective {recipe.objective}"
    with user_errors(objective, what):
        match objective(batch, recipe):
            case Tensor() as losses, Mapping() as numbers:
                logged = {}
                for name, number in numbers.items():
                    with user_errors(objective, f"{what}: its number {name}"):
                        logged[name] = float(number)
            case other:
                kind = type(other).__name__
                raise UsageError(f"{what} returned {kind}, expected losses and a dict of numbers")
        if taken := [name for name in logged if f"{name}/".startswith(_LOGGED)]:
            raise UsageError(f"{what} returned a number called {taken[0]}, as kvp's own: rename it")
        heads, shape = batch.counted.shape[1], tuple(losses.shape)
        if shape != (heads,):
            raise UsageError(f"{what} returned losses {shape}, expected one for each head: {heads}")
        if not losses.requires_grad:
            raise UsageError(f"{what} returned losses without a gradient: use batch.scores")
    return losses, logged


def shift_invariant(objective: Objective) -> Objective:
    """Decorator of an objective that does not change when all scores of a head shift.

    Training leaves the last bias of its rankers at rounding errors; the export sets it to 0.
    """
    vars(objective)["shift_invariant"] = True
    return objective


def mean_of_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Mean of [C, A] values over the pairs that count; 0 where none does."""
    return values.where(counted, 0.0).sum() / counted.sum().clamp_min(1)


def make_objective(loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """The objective of a loss of scores and importance, [A, N] each -> [A]: mean over contexts."""

    def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
        losses = [loss(s, w) for s, w in zip(batch.scores, batch.importances, strict=True)]
        return batch.mean(torch.stack(losses)), {}

    return objective


def cross_entropy(scores: Tensor, importance: Tensor) -> Tensor:
    """- sum_i (w_i / W) log softmax(s)_i in nats: two [..., N] of one dtype -> [...]; 0 if W is.

    Its minimum is at log shares up to a constant: the all-budgets cost's order (descending w).
    """
    total = importance.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)  # [..., 1]
    share = importance / total  # [..., N]
    return -(share * scores.log_softmax(-1)).sum(-1)


def squared_error(scores: Tensor, importance: Tensor) -> Tensor:
    """mean_i (s_i - log(w_i + FLOOR))^2: two [..., N] of one dtype -> [...], without a ranking.

    With `--label kvzip_plus` this is KVzap's objective (arXiv 2601.07891), for our network.
    """
    return (scores - (importance + FLOOR).log()).square().mean(-1)


listwise_objective = shift_invariant(make_objective(cross_entropy))
regress_objective = make_objective(squared_error)


@shift_invariant
def exact_objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
    """Minus the expected reward in closed form, which RLOO estimates from sampled rankings: [A].

    Rewards are linear in the cost, whose mean is `expected_cost` (`ratio` without its floor).
    """
    rewards = []
    for scores, importance in zip(batch.scores, batch.importances, strict=True):
        block = max(_TILE // scores.numel(), 16)
        cost = reward.expected_cost(importance, scores, block)  # [A]
        rewards.append(_REWARDS[recipe.reward](importance, cost))
    expected = torch.stack(rewards)  # [C, A]
    metrics = {"train/reward": float(mean_of_counted(expected.detach(), batch.counted))}
    return -batch.mean(expected), metrics


Baseline = Callable[[Tensor, Batch], Tensor]
"""Rewards [C, K, A] of a batch -> rewards minus their baselines, 0 where a head does not count."""


def make_sampled_objective(baseline: Baseline) -> Objective:
    """The policy-gradient loss of every head, [A]: rankings sampled by Gumbel sort, their rewards
    minus a baseline, REINFORCE (KVP paper, section 3.2, eq. 6).
    """

    def objective(batch: Batch, recipe: Recipe) -> tuple[Tensor, dict[str, float]]:
        contexts = range(len(batch.seeds))
        rankings = [sample_rankings(batch, context, recipe.permutations) for context in contexts]
        measure = _REWARDS[recipe.reward]
        pairs = zip(batch.importances, rankings, strict=True)
        rewards = torch.stack([reward.reward_rankings(measure, *p) for p in pairs])  # [C, K, A]
        advantage = normalise(baseline(rewards, batch), batch, recipe.advantage_clip)  # [C, K, A]
        metrics = {"train/reward": float(mean_of_counted(rewards.mean(1), batch.counted))}
        return policy_loss(batch, rankings, advantage), metrics

    return objective


def sample_rankings(batch: Batch, context: int, permutations: int) -> Tensor:
    """Draw K rankings of one context from its seed: [K, A, N] int64."""
    scores = batch.scores[context].detach()  # [A, N]
    noise = torch.Generator(scores.device).manual_seed(batch.seeds[context])
    return reward.gumbel_sort(
        scores, permutations, noise, shard=batch.heads, heads=batch.model_heads
    )


def within_context(rewards: Tensor, batch: Batch) -> Tensor:
    """Reward minus the mean of the other K-1 rankings of its context, K > 1."""
    return reward.rloo_advantages(rewards.transpose(0, 1)).transpose(0, 1) * batch.counted[:, None]


def within_step(rewards: Tensor, batch: Batch) -> Tensor:
    """Reward minus the mean of all other rankings of the step that count; 0 for a single one."""
    counted = batch.counted[:, None]  # [C, 1, A]
    episodes = batch.counted.sum(0) * rewards.shape[1]  # [A]
    mean = (rewards * counted).sum((0, 1)) / episodes.clamp_min(1)  # [A]
    return (rewards - mean) * counted * (episodes / (episodes - 1).clamp_min(1))


def normalise(raw: Tensor, batch: Batch, clip: float) -> Tensor:
    """Rewards minus baselines, [C, K, A] of mean 0, with unit standard deviation per head over the
    contexts that count, then clipped at `clip` of them.
    """
    episodes = batch.counted.sum(0).clamp_min(1) * raw.shape[1]
    deviation = (raw.square().sum((0, 1)) / episodes).sqrt()  # [A]
    return (raw / deviation.clamp_min(1e-8)).clamp(-clip, clip)


def policy_loss(batch: Batch, rankings: Sequence[Tensor], advantages: Tensor) -> Tensor:
    """Loss of every head, [A]: minus advantage times log-probability per token, mean over episodes.

    `rankings` are [K, A, N] int64 per context, `advantages` [C, K, A].
    """
    losses = [
        -(advantage * reward.log_prob(scores, ranking)).mean(0) / scores.shape[-1]
        for scores, ranking, advantage in zip(batch.scores, rankings, advantages, strict=True)
    ]
    return batch.mean(torch.stack(losses))


rloo_objective = shift_invariant(make_sampled_objective(within_context))
"""The baseline of a ranking is the mean reward of the others of its context (Algorithm 1)."""
rloo_batch_objective = shift_invariant(make_sampled_objective(within_step))
"""The baseline is the mean reward of all other rankings of the step: the text under equation 6, and
the released code (a ranking of each of many contexts)."""
