"""Fitting the calibration of a policy: what tokens of a given score turn out to be worth.

For every head, the unprotected tokens of held-out contexts are sorted by score and put into bins
that grow from the top downwards: eviction is decided among the best tokens, and they are few.
Isotonic regression of the bins' means gives the increasing function closest to them; each of its
steps becomes one knot, and logarithms are interpolated between knots (`policies.calibration`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from kvp.ranking import Protection
from policies.calibration import Calibration
from policies.ranker import HeadRankers
from train.data.compression_points import CompressionPoint
from train.data.contexts import Context, ContextSource

Array = NDArray[np.float64]

Worth = Callable[[Context, Tensor | None], Tensor]

TARGET_IMPORTANCE: dict[str, tuple[str, Worth]] = {
    "contribution": ("max_future_attention", lambda c, gram: c.importance * output_norms(c, gram)),
    "max_future_attention": ("max_future_attention", lambda c, gram: c.importance),
    "future_attention": ("future_attention", lambda c, gram: c.importance / c.future),
    "share": (
        "future_attention",
        lambda c, gram: c.importance / c.importance.sum(-1, keepdim=True),
    ),
}
"""What a token is worth, [A, N], and the label of the contexts that tell:
contribution: largest attention of any future query times the norm of the token's value behind the
output projection, that is, how far at most it moves the residual stream; max_future_attention: the
same without the norm; future_attention: attention per future query; share: share of all that the
head's cached tokens receive."""

SMALLEST_BIN = 16
"""Tokens in the bin of the best scores."""
GROWTH = 1.15
"""Size of each bin over that of the bin above it."""
FLOOR = 1e-9
"""Smallest expectation whose logarithm is taken."""
LEAST_SLOPE = 1e-3
"""Smallest slope of the map; keeps the order of a head's tokens where they turn out equal."""


def calibrate(
    rankers: HeadRankers,
    source: ContextSource,
    points: Sequence[CompressionPoint],
    *,
    target: str,
    protection: Protection,
) -> Calibration:
    """Calibrate `rankers` on points of a source whose label is the target's in `TARGET_IMPORTANCE`.

    Raises StoreError where the store is damaged.
    """
    gram = source.traces.output_gram()
    return fit_calibration(
        rankers,
        map(source.context, points),
        target=target,
        protection=protection,
        output_gram=None if gram is None else gram.flatten(0, 1).to(source.device),
    )


@torch.no_grad()
def fit_calibration(
    rankers: HeadRankers,
    contexts: Iterable[Context],
    *,
    target: str,
    protection: Protection,
    output_gram: Tensor | None = None,
) -> Calibration:
    """Calibrate `rankers` on whole contexts that carry the target's label.

    Tokens that `protection` keeps take no part. `output_gram` is [A, D, D] (`TraceReader`), None
    where it is unknown: then values count with their own norm. Raises ValueError when there are no
    contexts.
    """
    _, worth_of = TARGET_IMPORTANCE[target]
    scores, worths = [], []
    for context in contexts:
        free = protection.competing(context.length)
        if free.start >= free.stop:
            continue
        score = rankers(context.keys, context.values, context.positions, context.length)
        scores.append(score[:, free].cpu())
        worths.append(worth_of(context, output_gram)[:, free].cpu())
    if not scores:
        raise ValueError("no contexts to calibrate on: none is longer than the protected tokens")
    heads = zip(torch.cat(scores, dim=1), torch.cat(worths, dim=1), strict=True)
    knots = [fit_head(score.double().numpy(), worth.double().numpy()) for score, worth in heads]
    most = max(len(places) for places, _ in knots)
    padded = np.array([lengthened(*pair, knots=most) for pair in knots])
    places, values = torch.from_numpy(padded).float().unbind(1)
    return Calibration(target=target, scores=places, values=values)


def fit_head(scores: Array, worth: Array) -> tuple[Array, Array]:
    """Knots of one head from its tokens: [M] scores and [M] worth -> two increasing arrays.

    Values are natural logarithms of the expected worth.
    """
    order = np.argsort(scores, kind="stable")
    starts = bin_starts(len(order))
    sizes = np.diff([*starts, len(order)])
    places = np.add.reduceat(scores[order], starts) / sizes
    means = np.add.reduceat(worth[order], starts) / sizes
    fit = isotonic_regression(means, weights=sizes)
    steps = fit.blocks[:-1]
    block = np.add.reduceat(sizes, steps)
    knots = np.add.reduceat(places * sizes, steps) / block
    values = np.log(np.maximum(fit.x[steps], FLOOR))
    return _rising(knots, values)


def bin_starts(tokens: int) -> NDArray[np.int64]:
    """First index of every bin of `tokens` tokens sorted by ascending score."""
    starts, size, start = [], float(SMALLEST_BIN), tokens
    while start > 0:
        start = max(start - int(size), 0)
        starts.append(start)
        size *= GROWTH
    return np.array(starts[::-1])


def lengthened(places: Array, values: Array, *, knots: int) -> tuple[Array, Array]:
    """The same function with `knots` knots: those added lie on its upper end line."""
    slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
    steps = np.arange(1, knots - len(places) + 1)
    return (
        np.concatenate([places, places[-1] + steps]),
        np.concatenate([values, values[-1] + steps * slope]),
    )


def output_norms(context: Context, output_gram: Tensor | None) -> Tensor:
    """Norms of the values behind the output projection, [A, N]; their own where it is unknown."""
    values = context.values
    if output_gram is None:
        own: Tensor = values.norm(dim=-1)
        return own
    squares = torch.einsum("and,ade,ane->an", values, output_gram, values)
    norms: Tensor = squares.clamp_min(0).sqrt()
    return norms


def _rising(places: Array, values: Array) -> tuple[Array, Array]:
    """Two knots or more, distinct in float32, with at least `LEAST_SLOPE` between them."""
    nearest = max(1e-4 * (places[-1] - places[0]), 1e-6 * np.abs(places).max())
    kept = [(places[0], values[0])]
    for place, value in zip(places[1:], values[1:], strict=True):
        gap = place - kept[-1][0]
        if gap > nearest:
            rise = max(LEAST_SLOPE * gap, 1e-5)
            kept.append((place, max(value, kept[-1][1] + rise)))
    if len(kept) == 1:
        kept.append((kept[0][0] + 1.0, kept[0][1] + LEAST_SLOPE))
    first, second = np.array(kept, dtype=np.float64).T
    return first, second
