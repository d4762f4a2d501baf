"""From true scores to kept sets, and by how much a set is decided."""

import numpy as np

FORCED = 1e6
"""Scores from here on mark tokens that a method always keeps."""


def significant(scores, digits=12):
    """Round to significant digits: what is equal on paper is then equal in float64."""
    safe = np.where(np.isfinite(scores) & (scores != 0), np.abs(scores), 1.0)
    unit = 10.0 ** (digits - 1 - np.floor(np.log10(safe)))
    return np.where(np.isfinite(scores), np.round(scores * unit) / unit, scores)


def protected(scores, sinks, recents):
    """Scores [..., N] with the first and last tokens above everything."""
    raised = scores.copy()
    raised[..., :sinks] = np.inf
    raised[..., max(scores.shape[-1] - recents, 0) :] = np.inf
    return raised


def order(scores):
    """Token indices [..., N] by descending score, equal scores newest first."""
    exact = significant(scores)
    newest_first = np.argsort(-exact[..., ::-1], axis=-1, kind="stable")
    return scores.shape[-1] - 1 - newest_first


def kept(scores, budget):
    """Mask [..., N] of the best `budget` tokens."""
    mask = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(mask, order(scores)[..., :budget], True, axis=-1)
    return mask


def _at_the_boundary(scores, budget):
    """Scores [...] of the last token kept and of the first one dropped."""
    falling = np.take_along_axis(significant(scores), order(scores), axis=-1)
    return falling[..., budget - 1], falling[..., budget]


def tied(scores, budget):
    """[...]: the last token kept and the first one dropped have the same score (budget < N)."""
    last, first = _at_the_boundary(scores, budget)
    return last == first


def undecided(scores, budget, rtol, atol):
    """[...]: float32 may decide differently here, because the first token dropped is nearly kept.

    An exact tie is decided: by the rule that the newer token wins. budget < N.
    """
    last, first = _at_the_boundary(scores, budget)
    gap = np.where(last == first, 0.0, last - first)  # inf - inf
    scale = np.where(np.abs(last) < FORCED, np.maximum(np.abs(last), np.abs(first)), 0.0)
    return (gap > 0) & (gap <= atol + rtol * scale)
