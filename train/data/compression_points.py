"""The compression points trained and validated on: pure functions of seed and step.

At a compression point N the first N tokens of a sequence are in the cache, the rest is the future.
Nothing here has state, so a resumed run draws exactly what an uninterrupted one would have drawn.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvp.store import SequenceRecord
from train.data.labels import load_label
from train.recipe import Recipe

_SEQUENCES, _POINTS, _NOISE = range(3)


@dataclass(frozen=True, kw_only=True)
class CompressionPoint:
    """One context: a prefix of a stored sequence, and the future that its tokens matter for."""

    sequence: int
    """Index of the sequence in its store."""
    prefix_length: int
    """N, tokens in the cache, at least 1."""
    stop: int
    """End of the future window; queries at prefix_length <= j < stop count."""


def points_by_kind(record: SequenceRecord, recipe: Recipe) -> dict[str, list[int]]:
    """Possible compression points (as prefix lengths) of a sequence by kind.

    Kinds are `prompt`, `context` and `uniform`. A point is possible when at least `min_prefix`
    tokens come before it and one after it.
    """
    first, last = recipe.min_prefix, record.length - 1
    if load_label(recipe.label).stored is not None:  # stored labels end with the prompt
        last = min(last, record.prompt_length)
    candidates = {
        "prompt": [record.prompt_length - 1],
        "context": [record.context_length],
        "uniform": _space_evenly(first, last, recipe.uniform_points),
    }
    possible = {
        kind: [point for point in points if first <= point <= last]
        for kind, points in candidates.items()
        if getattr(recipe, f"compress_{kind}") > 0
    }
    return {kind: points for kind, points in possible.items() if points}


def drawn_points(
    records: Sequence[SequenceRecord], recipe: Recipe, *, seed: int, step: int
) -> Iterator[CompressionPoint]:
    """Draw the `recipe.contexts` points of one step; a sequence is read when its turn comes.

    Sequences come from one shuffle per pass over `records`; each must have a possible point.
    """
    for draw in range(step * recipe.contexts, (step + 1) * recipe.contexts):
        passes, index = divmod(draw, len(records))
        order = np.random.default_rng([seed, _SEQUENCES, passes]).permutation(len(records))
        record = records[int(order[index])]
        random = np.random.default_rng([seed, _POINTS, draw])
        kinds = points_by_kind(record, recipe)
        weights = np.array([getattr(recipe, f"compress_{kind}") for kind in kinds])
        kind = list(kinds)[int(random.choice(len(kinds), p=weights / weights.sum()))]
        yield _point(record, kinds[kind][int(random.integers(len(kinds[kind])))], recipe)


def noise_seed(seed: int, step: int, index: int) -> int:
    """Seed of the Gumbel noise of one context of one step."""
    return int(np.random.default_rng([seed, _NOISE, step, index]).integers(2**63 - 1))


def held_out_points(
    records: Sequence[SequenceRecord], recipe: Recipe, *, limit: int
) -> list[CompressionPoint]:
    """Choose at most `limit` fixed points for validation.

    Boundary points where the recipe trains on them, else the middle of the uniform ones. The second
    point of a sequence is used only after every sequence has given its first, and the sequences of
    a task take turns in which boundary that is, so that few points, too, show both.
    """
    rounds: list[list[CompressionPoint]] = [[], []]
    turns: Counter[str] = Counter()
    for record in records:
        kinds = points_by_kind(record, recipe)
        fixed = [kinds[kind][0] for kind in ("prompt", "context") if kind in kinds]
        if not fixed:
            fixed = [kinds["uniform"][len(kinds["uniform"]) // 2]]
        fixed = list(dict.fromkeys(fixed))
        turn = turns[record.task] % len(fixed)
        turns[record.task] += 1
        for index, prefix_length in enumerate(fixed[turn:] + fixed[:turn]):
            rounds[index].append(_point(record, prefix_length, recipe))
    return (rounds[0] + rounds[1])[:limit]


def _point(record: SequenceRecord, prefix_length: int, recipe: Recipe) -> CompressionPoint:
    stop = prefix_length + (recipe.future_max or record.length)
    if load_label(recipe.label).other_weight < 1:  # at least one reply is seen
        stop = max(stop, next((b for _, b in record.reply_spans if b > prefix_length), stop))
    return CompressionPoint(
        sequence=record.index, prefix_length=prefix_length, stop=min(stop, record.length)
    )


def _space_evenly(first: int, last: int, points: int) -> list[int]:
    if last < first:
        return []
    if points == 0:
        return list(range(first, last + 1))
    return sorted({round(value) for value in np.linspace(first, last, points)})
