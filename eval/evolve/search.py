"""CMA-ES over the layers of a model, group after group, bottom to top (EvolKV, algorithm 1).

Knows no model: a scheme (counts per layer) goes in, its task score comes back. Every layer starts
at the target c. In a group of n layers the optimiser moves x in [0, 1]^n, k = c reach^(x - 1/2);
all other layers stay at the best weights found so far. `project` rescales the whole scheme to the
exact total before it is evaluated (largest remainders), so budget can move between groups as well;
`soft` evaluates k itself. Equal schemes are evaluated once. Differences to the paper: projection by
default, and ceil(L / n) groups as in its algorithm (its text says floor).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cmaes import CMA
from numpy.typing import NDArray

from eval.evolve.search_folder import Generation, Journal
from kvp.allocation import apportion

Floats = NDArray[np.float64]
Scheme = tuple[int, ...]
"""Counts per layer, [L]."""
Evaluate = Callable[[Sequence[Scheme]], Sequence[float]]
"""Schemes to mean task scores, 0 to 1."""

UNIFORM_GROUP = -1
"""Group of the journal's first entry: the uniform scheme that the search starts from."""
LEAST_SCORE = 1e-6
"""A task score of 0 counts as this, so that the cache score still orders useless candidates."""


def cache_score(mean: float, target: float, gamma: float) -> float:
    """Score of a mean budget against its target, both tokens per KV head (EvolKV, section 3).

    max(0, 1 - (mean - target) / target) above the target, 1 - gamma (1 - mean / target) below.
    """
    if mean > target:
        return max(0.0, 1.0 - (mean - target) / target)
    return 1.0 - gamma * (1.0 - mean / target)


def fitness(score: float, mean: float, target: float, *, lambda_: float, gamma: float) -> float:
    """EvolKV's fitness r = f (1 + lambda cache_score): f is the mean task score, 0 to 1."""
    return max(score, LEAST_SCORE) * (1.0 + lambda_ * cache_score(mean, target, gamma))


def reply_score(nll: float, tokens: int) -> float:
    """Task score of a given reply: 1 / perplexity, the geometric mean of its tokens' probabilities.

    `nll` is summed over the reply's tokens, in nats. The paper only has generated answers.
    """
    return math.exp(-nll / tokens)


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """A search without its model."""

    layers: int
    budget: int
    """c, tokens per KV head on average."""
    least: int
    """Fewest tokens of a layer."""
    most: int
    """Most tokens of a layer."""
    group: int
    generations: int
    sigma: float
    reach: float
    constraint: str
    lambda_: float
    gamma: float
    seed: int

    @property
    def uniform(self) -> Scheme:
        """The start: every layer at the target."""
        return (self.budget,) * self.layers

    def fitness(self, scheme: Scheme, score: float) -> float:
        """Fitness r of a scheme with this task score."""
        mean = sum(scheme) / self.layers
        return fitness(score, mean, self.budget, lambda_=self.lambda_, gamma=self.gamma)

    def scheme(self, weights: Floats) -> Scheme:
        """Counts that a candidate is evaluated with."""
        if self.constraint == "soft":
            return tuple(np.clip(np.rint(weights), self.least, self.most).astype(int).tolist())
        total = self.budget * self.layers
        counts = apportion(torch.from_numpy(weights), total, minimum=self.least, maximum=self.most)
        return tuple(counts.tolist())


@dataclass(frozen=True, kw_only=True)
class Elite:
    """The best scheme so far."""

    weights: Floats
    """[L], tokens before projection."""
    scheme: Scheme
    score: float
    fitness: float


def layer_groups(layers: int, size: int) -> list[slice]:
    """Consecutive layers, bottom to top, `size` at a time; the last group may be smaller."""
    return [slice(start, min(start + size, layers)) for start in range(0, layers, size)]


def group_optimiser(plan: SearchPlan, group: int, size: int) -> CMA:
    """The optimiser of a group: starts at the x of the target, population 4 + floor(3 ln n)."""
    bounds = np.tile([0.0, 1.0], (size, 1))
    seed = int(np.random.SeedSequence([plan.seed, group]).generate_state(1)[0])
    return CMA(mean=np.full(size, 0.5), sigma=plan.sigma, bounds=bounds, seed=seed)


def search(plan: SearchPlan, evaluate: Evaluate, journal: Journal) -> Elite:
    """Run, or replay and continue, a search; every generation ends in the journal."""
    known: dict[Scheme, float] = {}

    def measured(group: int, generation: int, x: list[list[float]], schemes: list[Scheme]) -> None:
        if not journal.replay(group, generation, schemes):
            new = [scheme for scheme in dict.fromkeys(schemes) if scheme not in known]
            known.update(zip(new, evaluate(new) if new else (), strict=True))
            scores = [known[scheme] for scheme in schemes]
            journal.append(
                Generation(
                    group=group, generation=generation, x=x, schemes=schemes, scores=scores,
                    fitness=[plan.fitness(*pair) for pair in zip(schemes, scores, strict=True)],
                    evaluated=len(new),
                )
            )  # fmt: skip
        known.update(zip(schemes, journal.last.scores, strict=True))

    measured(UNIFORM_GROUP, 0, [], [plan.uniform])
    score = known[plan.uniform]
    elite = Elite(
        weights=np.full(plan.layers, float(plan.budget)),
        scheme=plan.uniform, score=score, fitness=plan.fitness(plan.uniform, score),
    )  # fmt: skip
    for group, span in enumerate(layer_groups(plan.layers, plan.group)):
        fixed = elite.weights
        optimiser = group_optimiser(plan, group, span.stop - span.start)
        for generation in range(plan.generations):
            if optimiser.should_stop():
                break
            points = [optimiser.ask() for _ in range(optimiser.population_size)]
            candidates = [_weights(plan, fixed, span, x) for x in points]
            schemes = [plan.scheme(weights) for weights in candidates]
            measured(group, generation, [x.tolist() for x in points], schemes)
            values = [plan.fitness(scheme, known[scheme]) for scheme in schemes]
            optimiser.tell([(x, -value) for x, value in zip(points, values, strict=True)])
            best = int(np.argmax(values))
            if values[best] > elite.fitness:
                elite = Elite(
                    weights=candidates[best], scheme=schemes[best],
                    score=known[schemes[best]], fitness=values[best],
                )  # fmt: skip
    return elite


def _weights(plan: SearchPlan, fixed: Floats, span: slice, x: Floats) -> Floats:
    """The fixed weights with those of one group replaced."""
    weights = fixed.copy()
    weights[span] = plan.budget * plan.reach ** (x - 0.5)
    return weights
