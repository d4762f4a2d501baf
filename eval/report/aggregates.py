"""Scores and perplexities per method and budget: every number of the result tables.

Pure functions of records. A method is reported as it was run: preset, allocator, protection, and
for `kvp` the group of policies that differ only in their training seed. Intervals are over prompts
and policy seeds (`eval.stats`). Callers select one protocol; records of two are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.results.records import FULL, SELF_SIZED, UNIFORM, Record
from eval.stats import (
    Interval,
    Scores,
    bootstrap_mean,
    by_policy,
    perplexity,
    prompt_values,
    with_seeds,
)


@dataclass(frozen=True, kw_only=True, order=True)
class ReportedMethod:
    """A method as it was run, policy seeds together."""

    method: str
    """Name in the registry, `kvp` or `full`."""
    group: str
    """Policies that differ only in seed; empty where there is one group."""
    variant: str
    """Preset; `auto` is the method's default for the budget."""
    protected: bool
    """Whether first and last tokens are always kept."""
    allocator: str = UNIFORM
    """Rule that splits the budget over the heads."""
    self_sized: bool = False
    """Whether the method sized the cache itself, whatever the budget."""

    @property
    def family(self) -> str:
        """Name of a line in a figure: the method, with its policy group.

        A method that sizes the cache itself is a separate family: it has no budgets to compare
        at.
        """
        name = f"{self.method}/{self.group}" if self.group else self.method
        return f"{name}+{self.allocator}" if self.self_sized else name

    @property
    def details(self) -> str:
        """Preset, allocator and protection in words, empty for the full cache."""
        if self.method == FULL:
            return ""
        words = [] if self.variant == "auto" else [self.variant]
        if self.allocator != UNIFORM and not self.self_sized:
            words.append(f"+{self.allocator}")
        return ", ".join([*words, "protected" if self.protected else "unprotected"])


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One number of a table."""

    interval: Interval
    policies: int
    """Policies averaged, 0 for methods without."""
    scores: Scores
    """Score per policy and prompt, or log-likelihood per token (`eval.stats`); empty for traces."""
    tasks: frozenset[str] = frozenset()
    """Tasks it is over; empty for traces."""
    kept_tokens: float = 0.0
    """Tokens kept per KV head, mean over heads and prompts."""
    share: float = 1.0
    """The same as a share of the tokens cached before."""
    nbytes: float | None = None
    """Bytes of keys and values after the eviction, mean over prompts; None where unmeasured."""


Grid = Mapping[ReportedMethod, Mapping[str | None, Estimate]]
"""Method -> budget spec (None for the full cache) -> number."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The budget axis of one set of records, smallest first."""

    specs: tuple[str, ...]
    """Budgets as they were written."""
    tokens: tuple[float, ...]
    """Mean tokens per KV head of each."""
    relative: bool
    """Whether all were written as a share of the cache."""

    @property
    def positions(self) -> tuple[float, ...]:
        """Where they lie on an axis: percent of the cache, or tokens per KV head."""
        if self.relative:
            return tuple(float(spec.rstrip("%")) for spec in self.specs)
        return self.tokens

    @property
    def label(self) -> str:
        """Title of the axis."""
        if self.relative:
            return "cache budget, % of the cached tokens per KV head"
        return "cache budget, tokens per KV head"


def budget_axis(records: Iterable[Record]) -> Budgets:
    """Budgets of records; none where only the full cache and self-sized methods occur."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for record in records:
        spec = record["budget_spec"]
        if spec is not None and spec != SELF_SIZED:
            sizes[spec].append(record["budget"] if "budget" in record else record["kept_tokens"])
    means = {spec: float(np.mean(values)) for spec, values in sizes.items()}
    specs = sorted(means, key=lambda spec: means[spec])
    return Budgets(
        specs=tuple(specs),
        tokens=tuple(means[spec] for spec in specs),
        relative=all(spec.endswith("%") for spec in specs),
    )


def method_of(record: Record, groups: Mapping[str | None, str]) -> ReportedMethod:
    """Method that a record of any results file belongs to."""
    return ReportedMethod(
        method=record["method"],
        variant=record["variant"],
        group=groups[record["policy"]],
        protected=record["protected"],
        allocator=record["allocator"],
        self_sized=record.get("budget_spec") == SELF_SIZED,
    )


def by_method(
    records: Iterable[Record], groups: Mapping[str | None, str]
) -> dict[ReportedMethod, dict[str | None, list[Record]]]:
    """Records by method and budget spec; raises ValueError on records of two protocols."""
    parts: dict[ReportedMethod, dict[str | None, list[Record]]] = {}
    protocols = set()
    for record in records:
        protocols.add(record["protocol"])
        budgets = parts.setdefault(method_of(record, groups), {})
        budgets.setdefault(record["budget_spec"], []).append(record)
    if len(protocols) > 1:
        raise ValueError(f"records of {len(protocols)} protocols are never one table")
    return parts


def score_grid(
    records: Sequence[Record], groups: Mapping[str | None, str], *, resamples: int
) -> Grid:
    """Mean score, 0 to 1, of one protocol's generated answers; every task weighs the same."""

    def estimate(part: list[Record]) -> Estimate:
        scores = by_policy(part)
        return Estimate(
            interval=bootstrap_mean(scores, resamples=resamples),
            policies=_policies(part),
            scores=scores,
            tasks=frozenset(record["task"] for record in part),
            **_sizes(part),
        )

    return _grid((record for record in records if record["score"] is not None), groups, estimate)


def perplexity_grid(
    records: Sequence[Record], groups: Mapping[str | None, str], *, resamples: int
) -> Grid:
    """Perplexity of one protocol's given replies: exp(sum of nll / sum of reply tokens)."""

    def estimate(part: list[Record]) -> Estimate:
        return Estimate(
            interval=perplexity(part, resamples=resamples),
            policies=_policies(part),
            scores=prompt_values(part),
            tasks=frozenset(record["task"] for record in part),
            **_sizes(part),
        )

    return _grid((record for record in records if record["nll"] is not None), groups, estimate)


def attention_grid(records: Sequence[Record], groups: Mapping[str | None, str]) -> Grid:
    """Future attention the whole model keeps, 0 to 1, of one protocol's traces.

    Policies of one group are averaged, and so are the ends of their intervals, which the spread
    between policies then widens.
    """

    def estimate(part: list[Record]) -> Estimate:
        mean, low, high = (float(np.mean([record[name] for record in part])) for name in _ATTENTION)
        sequences = Interval(mean=mean, low=low, high=high, prompts=part[0]["sequences"])
        interval = with_seeds(sequences, [record["kept"] for record in part], bounds=(0, 1))
        return Estimate(interval=interval, policies=_policies(part), scores={}, **_sizes(part))

    return _grid(records, groups, estimate)


_ATTENTION = ("kept", "low", "high")


def complete(grid: Grid) -> Grid:
    """The estimates that are over all tasks of a grid; the others cannot be compared with them.

    A folder that was extended by a task has methods without answers to it.
    """
    estimates = [estimate for budgets in grid.values() for estimate in budgets.values()]
    tasks = frozenset().union(*(estimate.tasks for estimate in estimates))
    whole = {
        method: {spec: estimate for spec, estimate in budgets.items() if estimate.tasks == tasks}
        for method, budgets in grid.items()
    }
    return {method: budgets for method, budgets in whole.items() if budgets}


def _grid(
    records: Iterable[Record],
    groups: Mapping[str | None, str],
    estimate: Callable[[list[Record]], Estimate],
) -> Grid:
    return {
        method: {spec: estimate(part) for spec, part in budgets.items()}
        for method, budgets in by_method(records, groups).items()
    }


def _sizes(records: Sequence[Record]) -> dict[str, Any]:
    """Tokens kept, their share of the cached ones, and bytes where all records have them."""
    sizes = [record.get("cache_bytes") for record in records]
    measured = [nbytes for nbytes in sizes if nbytes is not None]
    return {
        "kept_tokens": float(np.mean([record["kept_tokens"] for record in records])),
        "share": float(
            np.mean([record["kept_tokens"] / record["cached_tokens"] for record in records])
        ),
        "nbytes": float(np.mean(measured)) if len(measured) == len(records) else None,
    }


def _policies(records: Iterable[Record]) -> int:
    return len({record["policy"] for record in records} - {None})
