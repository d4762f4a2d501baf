"""Nulls: methods that score nothing, and what every other method has to beat (`policies.registry`).

A method is compared with the best null of the same budget and protection, on the same prompts. The
best one is taken on these prompts, which favours the nulls: what beats it has learned something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eval.stats import Unit, bootstrap_mean, paired_difference, per_prompt

Values = Mapping[Unit, float]
"""A number per prompt, higher = better."""


def prompt_values(records: Iterable[Mapping[str, Any]]) -> dict[Unit, float]:
    """Score per prompt, or log-likelihood per token of a given reply, over policy seeds."""
    return per_prompt(
        [
            {**record, "value": record["score"] if record["nll"] is None else _likelihood(record)}
            for record in records
        ],
        "value",
    )


def _likelihood(record: Mapping[str, Any]) -> float:
    return -float(record["nll"]) / float(record["reply_tokens"])


def best_values(nulls: Iterable[Values]) -> Values | None:
    """Those of the highest mean; every task weighs the same. None without any."""
    return max(nulls, key=lambda values: bootstrap_mean(values, resamples=1).mean, default=None)


def beats(ours: Values, null: Values, *, resamples: int, seed: int) -> bool:
    """Whether the 95 % interval of the paired difference is above zero."""
    shared = any(unit in null for unit in ours)
    return shared and paired_difference(ours, null, resamples=resamples, seed=seed).low > 0
