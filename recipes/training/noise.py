"""Noise of the gradient estimators: agreement of one step's gradient with the expectation.

    python recipes/training/noise.py SEQUENCES POLICY [POLICY ...]

For every policy, given as early or late in training, cosines per head between the gradient of all
weights that an estimator gives for one step and the exact gradient (`exact`, `skill`) of the same
contexts, and of 64 contexts (which says how much the choice of contexts costs). Means over heads
and steps; rankings are normalised as in training.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvp.ranking import Protection
from kvp.store import TraceReader
from policies import load_policy
from policies.ranker import HeadRankers
from train.data.compression_points import drawn_points, noise_seed
from train.data.contexts import Context, ContextSource
from train.data.store_checks import usable
from train.objectives.objective_batch import Batch, learnable, objective_of
from train.recipe import PRESETS, Recipe

STEPS = 8
BASE = replace(PRESETS["fourier"], objective="exact", label="future_attention", contexts=4)
LARGE = replace(BASE, contexts=64)
ESTIMATORS = {
    "exact": BASE,
    "exact, 64 pairs": replace(BASE, pairs=64),
    "rloo, 4 x 8": replace(BASE, objective="rloo", permutations=8),
    "rloo, 4 x 32": replace(BASE, objective="rloo", permutations=32),
    "rloo_batch, 4 x 8": replace(BASE, objective="rloo_batch", permutations=8),
    "rloo_batch, 32 x 1": replace(BASE, objective="rloo_batch", permutations=1, contexts=32),
    "rloo_batch, 32 x 1, ratio": replace(
        BASE, objective="rloo_batch", permutations=1, contexts=32, reward="ratio"
    ),
    "listwise": replace(BASE, objective="listwise"),
}


def gradient(
    rankers: HeadRankers, recipe: Recipe, contexts: Sequence[Context], step: int
) -> Tensor:
    """Gradient of every head's weights, [A, weights]."""
    scores = [rankers(c.keys, c.values, c.positions, c.length) for c in contexts]
    importances = [context.importance for context in contexts]
    batch = Batch(
        scores=scores,
        importances=importances,
        counted=torch.stack([learnable(importance) for importance in importances]),
        seeds=[noise_seed(1, step, index) for index in range(len(contexts))],
    )
    losses, _ = objective_of(recipe.objective)(batch, recipe)
    parts = torch.autograd.grad(losses.sum(), list(rankers.parameters()))
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def main() -> None:
    """Print one table."""
    traces, *policies = map(Path, sys.argv[1:])
    reader = TraceReader(traces)
    source = ContextSource(reader, memory_bytes=int(4e9))
    records = usable(reader, "train", BASE)

    def contexts(recipe: Recipe, step: int) -> list[Context]:
        points = drawn_points(records, recipe, seed=1, step=step)
        return [source.context(point).without(Protection()) for point in points]

    print("| policy | estimator | cosine to the same contexts' expectation | to 64 contexts' |")
    print("|---|---|--:|--:|")
    for policy in policies:
        rankers = load_policy(policy).rankers.requires_grad_(True)
        sums = {name: torch.zeros(2) for name in ESTIMATORS}
        for step in range(STEPS):
            aim = gradient(rankers, LARGE, contexts(LARGE, 1000 + step), step)
            for name, recipe in ESTIMATORS.items():
                drawn = contexts(recipe, step)
                exact = replace(recipe, objective="exact", reward="skill", pairs=0)
                estimate = gradient(rankers, recipe, drawn, step)
                same = torch.cosine_similarity(estimate, gradient(rankers, exact, drawn, step))
                whole = torch.cosine_similarity(estimate, aim)
                sums[name] += torch.stack([same.mean(), whole.mean()]) / STEPS
        for name, (same, whole) in sums.items():
            print(f"| {policy.parent.name}/{policy.name} | {name} | {same:.3f} | {whole:.3f} |")


if __name__ == "__main__":
    main()
