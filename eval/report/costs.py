"""Cost-per-budget curves and their areas; seconds and bytes of the batch-1 timing pass.

The cost of a budget is the share of future attention that the evicted tokens would have received
(KVP paper, section 4.3: minus the per-budget reward). Policies of one group are averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.report.aggregates import ReportedMethod, method_of
from eval.results.records import FULL, ORACLE, Record
from eval.stats import Interval, median_interval

DECODE = "decode_seconds_per_token"
Head = tuple[int, int]
"""(layer, KV head)."""


@dataclass(frozen=True, kw_only=True)
class HeadCurve:
    """Cost against budget of one head."""

    budgets: tuple[float, ...]
    """Share of the cache kept, 0 to 1."""
    cost: tuple[float, ...]
    """Share of future attention lost, 0 to 1."""


Costs = Mapping[ReportedMethod, Mapping[Head, HeadCurve]]


def head_curves(
    curves: Iterable[Record], groups: Mapping[str | None, str]
) -> dict[ReportedMethod, dict[Head, HeadCurve]]:
    """Curves of one protocol by setting and head."""
    by_head: dict[tuple[ReportedMethod, Head], list[Record]] = defaultdict(list)
    for record in curves:
        by_head[method_of(record, groups), (record["layer"], record["head"])].append(record)
    settings: dict[ReportedMethod, dict[Head, HeadCurve]] = {}
    for (setting, head), records in by_head.items():
        cost: NDArray[np.float64] = np.mean([record["cost"] for record in records], axis=0)
        settings.setdefault(setting, {})[head] = HeadCurve(
            budgets=tuple(records[0]["budgets"]), cost=tuple(map(float, cost))
        )
    return settings


def mean_curve(heads: Mapping[Head, HeadCurve]) -> HeadCurve:
    """Mean over heads, which is the sum over heads divided by their number."""
    cost: NDArray[np.float64] = np.mean([curve.cost for curve in heads.values()], axis=0)
    first = next(iter(heads.values()))
    return HeadCurve(budgets=first.budgets, cost=tuple(map(float, cost)))


@dataclass(frozen=True, kw_only=True)
class Area:
    """Area under the cost curves of one setting, summed over heads."""

    mean: float
    """Mean over heads (the sum divided by their number) and policies."""
    skill: float | None
    """Mean over heads with signal and policies: 1 is ideal, 0 is chance; None without any."""
    ratios: tuple[float, ...]
    """Sum over heads divided by the oracle's, one per policy; empty without an oracle."""


def areas(curves: Sequence[Record], groups: Mapping[str | None, str]) -> dict[ReportedMethod, Area]:
    """Areas of one protocol; oracle and method both with protected tokens, or both without."""
    by_setting: dict[ReportedMethod, list[Record]] = defaultdict(list)
    for record in curves:
        by_setting[method_of(record, groups)].append(record)
    result = {}
    for setting, records in by_setting.items():
        policies = dict.fromkeys(record["policy"] for record in records)
        skills = [record["skill"] for record in records if record["skill"] is not None]
        ratios = (_ratio(by_setting, setting, policy) for policy in policies)
        result[setting] = Area(
            mean=float(np.mean([record["area"] for record in records])),
            skill=float(np.mean(skills)) if skills else None,
            ratios=tuple(ratio for ratio in ratios if ratio is not None),
        )
    return result


def head_skills(
    curves: Iterable[Record], groups: Mapping[str | None, str]
) -> dict[ReportedMethod, dict[Head, float | None]]:
    """Skill of every head of one protocol, mean over policies; None for heads without signal."""
    found: dict[ReportedMethod, dict[Head, list[float]]] = {}
    for record in curves:
        heads = found.setdefault(method_of(record, groups), {})
        skills = heads.setdefault((record["layer"], record["head"]), [])
        if record["skill"] is not None:
            skills.append(record["skill"])
    return {
        setting: {head: float(np.mean(each)) if each else None for head, each in heads.items()}
        for setting, heads in found.items()
    }


def _ratio(
    curves: Mapping[ReportedMethod, Sequence[Record]], setting: ReportedMethod, policy: str | None
) -> float | None:
    """Area over all heads divided by the oracle's; None without the oracle's of these heads."""
    oracle = [
        record
        for other, records in curves.items()
        if other.method == ORACLE and other.protected == setting.protected
        for record in records
    ]
    ours = _head_areas(record for record in curves[setting] if record["policy"] == policy)
    theirs = _head_areas(oracle)
    if set(ours) != set(theirs) or sum(theirs.values()) <= 0:
        return None
    return sum(ours.values()) / sum(theirs.values())


def _head_areas(records: Iterable[Record]) -> dict[Head, float]:
    return {(record["layer"], record["head"]): record["area"] for record in records}


def shown_curves(costs: Costs, by_area: Mapping[ReportedMethod, Area]) -> dict[str, ReportedMethod]:
    """One setting per family for the figures: protected where all can be, smallest area."""
    protected = any(setting.protected for setting in costs)
    shown: dict[str, ReportedMethod] = {}
    for setting in costs:
        if setting.protected != protected:
            continue
        other = shown.get(setting.family)
        if other is None or by_area[setting].mean < by_area[other].mean:
            shown[setting.family] = setting
    return shown


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Bytes and seconds of one request with one setting at one budget."""

    setting: ReportedMethod
    protocol: str | None
    spec: str | None
    """Budget as it was written, `own` for a self-sized method; None for the full cache."""
    budget: float | None
    """Tokens per KV head, the realised ones of a self-sized method; None for the full cache."""
    cache_bytes: float
    prefill: Interval | None
    """Median seconds over prompts; None where there are too few for an interval."""
    evict: Interval | None
    """The same of scoring and evicting."""
    decode: Interval | None
    """Seconds per decoded token."""
    bytes_to_full: float | None
    """Cache bytes divided by those of the full cache; None without a record of the full cache."""
    decode_to_full: Interval | None
    """Seconds per decoded token divided by those of the full cache on the same prompt."""


def timings(records: Iterable[Record], groups: Mapping[str | None, str]) -> list[Timing]:
    """Bytes and medians of seconds, the full cache first, then by budget and method.

    Policies are averaged, the seconds of each prompt by itself.
    """
    parts: dict[tuple[str | None, str | None, ReportedMethod], list[Record]] = {}
    for record in records:
        size = record["budget_spec"] or record["budget"]
        spec = None if record["method"] == FULL else str(size)
        key = (record["protocol"], spec, method_of(record, groups))
        parts.setdefault(key, []).append(record)
    full = {
        protocol: same for (protocol, _, setting), same in parts.items() if setting.method == FULL
    }
    measured = []
    for (protocol, spec, setting), same in parts.items():
        reference = full.get(protocol)
        measured.append(
            Timing(
                setting=setting,
                protocol=protocol,
                spec=spec,
                budget=None if spec is None else _size(same),
                cache_bytes=_mean(same, "cache_bytes"),
                prefill=median_interval(_by_prompt(same, "prefill_seconds")),
                evict=median_interval(_by_prompt(same, "evict_seconds")),
                decode=median_interval(_by_prompt(same, DECODE)),
                bytes_to_full=_bytes_to_full(same, reference),
                decode_to_full=_decode_to_full(same, reference),
            )
        )
    return sorted(measured, key=lambda timing: (timing.budget is not None, timing.budget or 0.0))


def middle_budget(measured: Sequence[Timing]) -> list[Timing]:
    """The full cache, self-sized methods and the middle one of the budgets (the larger of two)."""
    budgeted = [timing for timing in measured if not timing.setting.self_sized]
    budgets = sorted({timing.budget for timing in budgeted if timing.budget is not None})
    shown = {None, budgets[len(budgets) // 2]} if budgets else {None}
    return [timing for timing in measured if timing.setting.self_sized or timing.budget in shown]


def _size(records: Sequence[Record]) -> float:
    return _mean(records, "kept_tokens" if records[0]["budget"] is None else "budget")


def _mean(records: Iterable[Record], field: str) -> float:
    return float(np.mean([record[field] for record in records]))


def _by_prompt(records: Sequence[Record], field: str) -> list[float]:
    """A measure of every prompt, policies averaged; empty where some record lacks it."""
    timed = [record["by_prompt"].get(field, []) for record in records]
    if len({len(values) for values in timed}) != 1:
        return []
    return [float(np.mean(values)) for values in zip(*timed, strict=True)]


def _bytes_to_full(records: Sequence[Record], reference: Sequence[Record] | None) -> float | None:
    """Mean bytes divided by the full cache's; None without one that is above 0."""
    whole = 0.0 if reference is None else _mean(reference, "cache_bytes")
    return _mean(records, "cache_bytes") / whole if whole > 0 else None


def _decode_to_full(
    records: Sequence[Record], reference: Sequence[Record] | None
) -> Interval | None:
    ours, whole = _by_prompt(records, DECODE), _by_prompt(reference or (), DECODE)
    if len(ours) != len(whole) or not all(whole):
        return None
    return median_interval([own / full for own, full in zip(ours, whole, strict=True)])
