"""Calibration of a policy: the expected importance of a token with a given score.

For every head, the tokens of held-out contexts are sorted by score and put into bins that grow from
the top downwards: eviction is decided among the best tokens, and they are few.
Isotonic regression of the bins' means gives the increasing function closest to them; each of its
steps becomes one knot, and logarithms are interpolated between knots (`policies.learned`).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from policies.learned import Calibration
from policies.ranker import HeadRankers
from train.data.contexts import RankingContext, scores_of
from train.data.labels import load_label

Array = NDArray[np.float64]

TARGET_LABELS = {
    "contribution": "max_future_attention",
    "reply_contribution": "max_reply_attention",
}
"""Calibration target -> label of the contexts. Scores are fitted to it times the norm of the
token's value after the output projection: a bound of how far it moves the residual stream. Every
other target is the name of a label, which scores are fitted to as it is."""
CALIBRATION_CONTEXTS = 48
"""Held-out contexts that scores are calibrated on, so that heads can compete."""
SMALLEST_BIN = 16
"""Tokens in the bin of the best scores."""
GROWTH = 1.15
"""Size of each bin over that of the bin above it."""
FLOOR = 1e-9
"""Smallest expectation whose logarithm is taken."""
MINIMUM_SLOPE = 1e-3
"""Smallest slope of the map; keeps the order of a head's tokens where their targets are equal."""


def calibration_target(label: str) -> str:
    """What rankers trained on a label are calibrated to (docs/method.md#calibration)."""
    made = load_label(label)
    if made.stored is not None:
        return label
    return "reply_contribution" if made.other_weight < 1 else "contribution"


@torch.no_grad()
def calibrate(
    rankers: HeadRankers,
    contexts: Iterable[RankingContext],
    *,
    target: str,
    output_gram: Tensor | None = None,
) -> Calibration:
    """Calibrate `rankers` on contexts that carry the target's label (`TARGET_LABELS`).

    `output_gram` is [L, H, D, D] (`TraceReader`), None where it is unknown: then the norm is that
    of the value itself. Raises ValueError when there are no contexts.
    """
    scores, targets = [], []
    for context in contexts:
        scores.append(scores_of(rankers, context).cpu())  # [A, N]
        importance = context.importance  # [A, N]
        if target in TARGET_LABELS:
            importance = importance * output_norms(context, output_gram)
        targets.append(importance.cpu())
    if not scores:
        raise ValueError("no contexts to calibrate on")
    heads = zip(torch.cat(scores, dim=1), torch.cat(targets, dim=1), strict=True)
    knots = [fit_head(score.double().numpy(), value.double().numpy()) for score, value in heads]
    return calibration_of(target, knots)


def calibration_of(target: str, knots: Sequence[tuple[Array, Array]]) -> Calibration:
    """The calibration of heads with these knots, of which some may have more than others."""
    most = max(len(scores) for scores, _ in knots)
    padded = np.array([add_knots(*pair, knots=most) for pair in knots])  # [A, 2, P]
    scores, values = torch.from_numpy(padded).float().unbind(1)  # [A, P] each
    return Calibration(target=target, scores=scores.contiguous(), values=values.contiguous())


def fit_head(scores: Array, targets: Array) -> tuple[Array, Array]:
    """Knots of one head: [M] scores and targets of tokens -> rising scores and log targets [P]."""
    order = np.argsort(scores, kind="stable")
    starts = bin_starts(len(order))  # [bins]
    sizes = np.diff([*starts, len(order)])
    bin_scores = np.add.reduceat(scores[order], starts) / sizes  # [bins]
    bin_targets = np.add.reduceat(targets[order], starts) / sizes
    fit = isotonic_regression(bin_targets, weights=sizes)
    steps = fit.blocks[:-1]  # [P] first bin of every step
    tokens = np.add.reduceat(sizes, steps)  # [P] tokens of every step
    knot_scores = np.add.reduceat(bin_scores * sizes, steps) / tokens  # [P]
    values = np.log(np.maximum(fit.x[steps], FLOOR))  # [P]
    return _rising_knots(knot_scores, values)


def bin_starts(tokens: int) -> NDArray[np.int64]:
    """First index of every bin of `tokens` tokens sorted by ascending score."""
    starts, size, start = [], float(SMALLEST_BIN), tokens
    while start > 0:
        start = max(start - int(size), 0)
        starts.append(start)
        size *= GROWTH
    return np.array(starts[::-1])


def add_knots(knot_scores: Array, values: Array, *, knots: int) -> tuple[Array, Array]:
    """The same function with `knots` knots: those added lie on its upper end line."""
    slope = (values[-1] - values[-2]) / (knot_scores[-1] - knot_scores[-2])
    steps = np.arange(1, knots - len(knot_scores) + 1)
    return (
        np.concatenate([knot_scores, knot_scores[-1] + steps]),
        np.concatenate([values, values[-1] + steps * slope]),
    )


def output_norms(context: RankingContext, output_gram: Tensor | None) -> Tensor:
    """Norms of the values after the output projection, [A, N]; before it where it is unknown."""
    values = context.values  # [A, N, D]
    if output_gram is None:
        unprojected: Tensor = values.norm(dim=-1)  # [A, N]
        return unprojected
    gram = output_gram.flatten(0, 1).to(values.device)  # [A, D, D]
    squares = torch.einsum("and,ade,ane->an", values, gram, values)  # [A, N]
    return torch.sqrt(squares.clamp_min(0))


def _rising_knots(knot_scores: Array, values: Array) -> tuple[Array, Array]:
    """Two knots or more, distinct in float32, with at least `MINIMUM_SLOPE` between them."""
    nearest = max(1e-4 * (knot_scores[-1] - knot_scores[0]), 1e-6 * np.abs(knot_scores).max())
    kept = [(knot_scores[0], values[0])]
    for score, value in zip(knot_scores[1:], values[1:], strict=True):
        gap = score - kept[-1][0]
        if gap > nearest:
            rise = max(MINIMUM_SLOPE * gap, 1e-5)
            kept.append((score, max(value, kept[-1][1] + rise)))
    if len(kept) == 1:
        kept.append((kept[0][0] + 1.0, kept[0][1] + MINIMUM_SLOPE))
    first, second = np.array(kept, dtype=np.float64).T
    return first, second
