"""Seconds and bytes per method and budget, from the batch-1 timing pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.report.aggregates import FULL, Setting, setting_of
from eval.results.records import Row


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What one request costs with one setting at one budget."""

    setting: Setting
    protocol: str | None
    budget: float | None
    """Tokens per KV head, the realised ones of own sizes; None for the full cache."""
    cache_bytes: float
    prefill_seconds: float
    evict_seconds: float
    decode_seconds: float
    """Seconds per decoded token."""
    bytes_to_full: float | None
    """Cache bytes divided by those of the full cache; None without a full-cache row."""
    decode_to_full: float | None
    """Seconds per decoded token divided by those of the full cache."""


def timings(rows: Iterable[Row], groups: Mapping[str | None, str]) -> list[Timing]:
    """Means over prompts and policies, the full cache first, then by budget and method."""
    parts: dict[tuple[str | None, str | None, Setting], list[Row]] = {}
    for row in rows:
        size = row.get("budget_spec") or row["budget"]
        spec = None if row["method"] == FULL else str(size)
        key = (row.get("protocol"), spec, setting_of(row, groups))
        parts.setdefault(key, []).append(row)
    full = {
        protocol: own for (protocol, _, setting), own in parts.items() if setting.method == FULL
    }
    found = []
    for (protocol, spec, setting), own in parts.items():
        reference = full.get(protocol)
        found.append(
            Timing(
                setting=setting,
                protocol=protocol,
                budget=None if spec is None else _size(own),
                cache_bytes=_mean(own, "cache_bytes"),
                prefill_seconds=_mean(own, "prefill_seconds"),
                evict_seconds=_mean(own, "evict_seconds"),
                decode_seconds=_mean(own, "decode_seconds_per_token"),
                bytes_to_full=_ratio(own, reference, "cache_bytes"),
                decode_to_full=_ratio(own, reference, "decode_seconds_per_token"),
            )
        )
    return sorted(found, key=lambda timing: (timing.budget is not None, timing.budget or 0.0))


def middle_budget(found: Sequence[Timing]) -> list[Timing]:
    """The full cache, own sizes and the middle one of the budgets (the larger of two)."""
    asked = [timing for timing in found if not timing.setting.own]
    budgets = sorted({timing.budget for timing in asked if timing.budget is not None})
    chosen = {None, budgets[len(budgets) // 2]} if budgets else {None}
    return [timing for timing in found if timing.setting.own or timing.budget in chosen]


def _size(rows: Sequence[Row]) -> float:
    return _mean(rows, "kept_tokens" if rows[0]["budget"] is None else "budget")


def _mean(rows: Iterable[Row], field: str) -> float:
    return float(np.mean([row[field] for row in rows]))


def _ratio(rows: Sequence[Row], reference: Sequence[Row] | None, field: str) -> float | None:
    return None if reference is None else _mean(rows, field) / _mean(reference, field)
