"""Nulls: methods that score nothing, and what every other method has to beat (`policies.registry`).

A method is compared with the best null of the same budget and protection, on the same prompts. The
best one is taken on these prompts, which favours the nulls: what beats it has learned something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.results.records import value_of
from eval.stats import (
    Bounds,
    Interval,
    Scores,
    bootstrap_mean,
    by_policy,
    paired_difference,
    prompts_of,
)


def prompt_values(records: Iterable[Mapping[str, Any]]) -> Scores:
    """Per policy and prompt: `eval.results.records.value_of`."""
    return by_policy([{**record, "value": value_of(record)} for record in records], "value")


def best_values(nulls: Iterable[Scores]) -> Scores | None:
    """Those of the highest mean; every task weighs the same. None without any."""
    return max(
        nulls,
        key=lambda scores: bootstrap_mean(scores, bounds=None, resamples=1).mean,
        default=None,
    )


def over_null(
    ours: Scores, null: Scores, *, bounds: Bounds | None, resamples: int, seed: int
) -> Interval | None:
    """Difference to a null, paired by prompt; None where the two share no prompt."""
    if prompts_of(ours).isdisjoint(prompts_of(null)):
        return None
    return paired_difference(ours, null, bounds=bounds, resamples=resamples, seed=seed)
