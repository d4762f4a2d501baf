"""Scores and perplexities per method and budget: every number of the result tables.

Pure functions of records. A method is reported as it was run: preset, allocator, protection, and
for `kvp` the group of policies that differ only in their training seed. Intervals are over prompts
and policy seeds (`eval.stats`). Callers select one protocol; records of two are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from eval.records import FULL, SELF_SIZED, UNIFORM, Record
from eval.stats import Interval, Scores, bootstrap_mean, perplexity, prompt_values

Kind = Literal["accuracy", "perplexity"]
"""Scores of answers, perplexity of given replies."""
FIELDS: Mapping[Kind, str] = {"accuracy": "score", "perplexity": "nll"}
"""Field of a record that holds the number."""


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
    """Score per policy and prompt, or log-likelihood per token (`eval.stats`)."""
    tasks: frozenset[str]
    """Tasks it is over."""
    kept_tokens: float
    """Tokens kept per KV head, mean over heads and prompts."""
    share: float
    """The same as a share of the tokens cached before."""
    nbytes: float | None
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
        unit = "% of the cached tokens" if self.relative else "tokens"
        return f"cache budget, {unit} per KV head"


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


def estimates(
    kind: Kind, records: Sequence[Record], groups: Mapping[str | None, str], *, resamples: int
) -> Grid:
    """Numbers of one protocol by method and budget; `groups` are those of the policies.

    Scores, 0 to 1: the mean over tasks of the mean over prompts. Perplexity: exp(sum of nll / sum
    of reply tokens).
    """
    found = (record for record in records if record[FIELDS[kind]] is not None)
    return {
        method: {spec: _estimate(kind, part, resamples) for spec, part in budgets.items()}
        for method, budgets in by_method(found, groups).items()
    }


def _estimate(kind: Kind, records: list[Record], resamples: int) -> Estimate:
    scores = prompt_values(records)
    if kind == "accuracy":
        interval = bootstrap_mean(scores, resamples=resamples)
    else:
        interval = perplexity(records, resamples=resamples)
    nbytes = [each["cache_bytes"] for each in records if each.get("cache_bytes") is not None]
    shares = [each["kept_tokens"] / each["cached_tokens"] for each in records]
    return Estimate(
        interval=interval,
        policies=len({record["policy"] for record in records} - {None}),
        scores=scores,
        tasks=frozenset(record["task"] for record in records),
        kept_tokens=float(np.mean([record["kept_tokens"] for record in records])),
        share=float(np.mean(shares)),
        nbytes=float(np.mean(nbytes)) if len(nbytes) == len(records) else None,
    )


def complete(grid: Grid) -> Grid:
    """The estimates that are over all tasks of a grid; the others cannot be compared with them.

    A folder that was extended by a task has methods without answers to it.
    """
    tasks = frozenset().union(*(one.tasks for budgets in grid.values() for one in budgets.values()))
    whole = {
        method: {spec: one for spec, one in budgets.items() if one.tasks == tasks}
        for method, budgets in grid.items()
    }
    return {method: budgets for method, budgets in whole.items() if budgets}
