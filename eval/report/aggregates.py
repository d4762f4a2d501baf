"""Scores and perplexities per method setting and budget: every number of the result tables.

Pure functions of rows. A setting is a method as it was run: preset, allocator, protection, and for
`kvp` the group of policies that differ only in their training seed. Seeds are averaged per prompt,
intervals are over prompts (`eval.stats`). Callers select one protocol; rows of two are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.results.records import OWN, UNIFORM, Row
from eval.stats import Interval, Unit, bootstrap_mean, per_prompt, perplexity

FULL = "full"
ORACLE = "oracle"
LEARNED = "kvp"


@dataclass(frozen=True, kw_only=True, order=True)
class Setting:
    """A method as it was run, policy seeds together."""

    method: str
    """Name in the roster, `kvp` or `full`."""
    group: str
    """Policies that differ only in seed; empty where there is one group."""
    variant: str
    """Preset; `auto` is the method's own setting for small budgets."""
    protected: bool
    """Whether first and last tokens are always kept."""
    allocator: str = UNIFORM
    """What split the budget over the heads."""
    own: bool = False
    """Whether the method sized the cache itself, whatever the budget."""

    @property
    def family(self) -> str:
        """What is one line of a figure: the method, with its policy group.

        A method that sizes the cache itself is a family apart: it has no budgets to compare at.
        """
        name = f"{self.method}/{self.group}" if self.group else self.method
        return f"{name}+{self.allocator}" if self.own else name

    @property
    def how(self) -> str:
        """The setting in words, empty for the full cache."""
        if self.method == FULL:
            return ""
        words = [] if self.variant == "auto" else [self.variant]
        if self.allocator != UNIFORM and not self.own:
            words.append(f"+{self.allocator}")
        return ", ".join([*words, "protected" if self.protected else "unprotected"])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table."""

    interval: Interval
    policies: int
    """Policies averaged, 0 for methods without."""
    values: Mapping[Unit, float]
    """Score per prompt; empty for perplexities."""
    kept_tokens: float = 0.0
    """Tokens kept per KV head, mean over heads and prompts."""
    share: float = 1.0
    """The same as a share of the tokens cached before."""
    nbytes: float | None = None
    """Bytes of keys and values after the eviction, mean over prompts; None where unmeasured."""


Grid = Mapping[Setting, Mapping[str | None, Cell]]
"""Setting -> budget spec (None for the full cache) -> number."""


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """The budget axis of one set of rows, smallest first."""

    specs: tuple[str, ...]
    """Budgets as they were asked for."""
    tokens: tuple[float, ...]
    """Mean tokens per KV head of each."""
    relative: bool
    """Whether all were asked for as a share of the cache."""

    @property
    def places(self) -> tuple[float, ...]:
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


def budget_axis(rows: Iterable[Row]) -> Budgets:
    """Budgets that were asked for in rows; none where only the full cache and own sizes occur."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        spec = row["budget_spec"]
        if spec is not None and spec != OWN:
            sizes[spec].append(row["budget"] if "budget" in row else row["kept_tokens"])
    means = {spec: float(np.mean(values)) for spec, values in sizes.items()}
    specs = sorted(means, key=lambda spec: means[spec])
    return Budgets(
        specs=tuple(specs),
        tokens=tuple(means[spec] for spec in specs),
        relative=all(spec.endswith("%") for spec in specs),
    )


def setting_of(row: Row, groups: Mapping[str | None, str]) -> Setting:
    """Setting that a row of any results file belongs to."""
    return Setting(
        method=row["method"],
        variant=row["variant"],
        group=groups[row["policy"]],
        protected=row["protected"],
        allocator=row["allocator"],
        own=row.get("budget_spec") == OWN,
    )


def by_setting(
    rows: Iterable[Row], groups: Mapping[str | None, str]
) -> dict[Setting, dict[str | None, list[Row]]]:
    """Rows by setting and budget spec; raises ValueError on rows of two protocols."""
    cells: dict[Setting, dict[str | None, list[Row]]] = {}
    protocols = set()
    for row in rows:
        protocols.add(row["protocol"])
        budgets = cells.setdefault(setting_of(row, groups), {})
        budgets.setdefault(row["budget_spec"], []).append(row)
    if len(protocols) > 1:
        raise ValueError(f"rows of {len(protocols)} protocols are never one table")
    return cells


def score_grid(
    rows: Sequence[Row], groups: Mapping[str | None, str], *, resamples: int
) -> dict[Setting, dict[str | None, Cell]]:
    """Mean score, 0 to 1, of one protocol's generated answers; every task weighs the same."""

    def cell(part: list[Row]) -> Cell:
        values = per_prompt(part)
        return Cell(
            interval=bootstrap_mean(values, resamples=resamples),
            policies=_policies(part),
            values=values,
            **_sizes(part),
        )

    scored = (row for row in rows if row["score"] is not None)
    cells = by_setting(scored, groups)
    return {
        setting: {spec: cell(part) for spec, part in budgets.items()}
        for setting, budgets in cells.items()
    }


def perplexity_grid(
    rows: Sequence[Row], groups: Mapping[str | None, str], *, resamples: int
) -> dict[Setting, dict[str | None, Cell]]:
    """Perplexity of one protocol's given replies: exp(sum of nll / sum of reply tokens)."""

    def cell(part: list[Row]) -> Cell:
        return Cell(
            interval=perplexity(part, resamples=resamples),
            policies=_policies(part),
            values={},
            **_sizes(part),
        )

    forced = (row for row in rows if row["nll"] is not None)
    cells = by_setting(forced, groups)
    return {
        setting: {spec: cell(part) for spec, part in budgets.items()}
        for setting, budgets in cells.items()
    }


def kept_grid(
    rows: Sequence[Row], groups: Mapping[str | None, str]
) -> dict[Setting, dict[str | None, Cell]]:
    """Future attention the whole model keeps, 0 to 1, of one protocol's traces.

    Policies of one group are averaged, and so are the ends of their intervals.
    """

    def cell(part: list[Row]) -> Cell:
        mean, low, high = (float(np.mean([row[name] for row in part])) for name in _KEPT)
        interval = Interval(mean=mean, low=low, high=high, prompts=part[0]["sequences"])
        return Cell(interval=interval, policies=_policies(part), values={}, **_sizes(part))

    return {
        setting: {spec: cell(part) for spec, part in budgets.items()}
        for setting, budgets in by_setting(rows, groups).items()
    }


_KEPT = ("kept", "low", "high")


def _sizes(rows: Sequence[Row]) -> dict[str, Any]:
    """Sizes of a cell: tokens kept, their share of what was cached, and bytes where measured."""
    held = [row.get("cache_bytes") for row in rows]
    measured = [nbytes for nbytes in held if nbytes is not None]
    return {
        "kept_tokens": float(np.mean([row["kept_tokens"] for row in rows])),
        "share": float(np.mean([row["kept_tokens"] / row["cached_tokens"] for row in rows])),
        "nbytes": float(np.mean(measured)) if len(measured) == len(rows) else None,
    }


def _policies(rows: Iterable[Row]) -> int:
    return len({row["policy"] for row in rows} - {None})
