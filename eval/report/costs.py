"""Seconds and bytes of the batch-1 timing pass; policies of one group are averaged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.filesize import decimal

from eval.results.comparison import Best, Comparison
from eval.results.method_setting import MethodSetting, PolicyGroups
from eval.results.record_schemas import TimingRow
from eval.results.stats import CONFIDENCE, Interval, median_interval
from kvp.grouping import group_by
from kvp.names import FULL, KVZAP, LEARNED
from policies.registry import SCORERS


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Bytes and seconds of one request with one setting at one budget.

    Intervals are of medians over prompts, None where there are too few.
    """

    setting: MethodSetting
    protocol: str
    spec: str | None
    """Budget as it was written, `own` for a self-sized method; None for the full cache."""
    budget: float | None
    """Tokens per KV head, the realised ones of a self-sized method; None for the full cache."""
    cache_bytes: float
    bytes_to_full: float | None
    prompts: int
    """Prompts that were timed one by one."""
    flops: float | None
    """Operations of compression, as a share of the prefill's; None where they were not counted."""
    prefill: Interval | None
    evict: Interval | None
    evict_to_prefill: Interval | None
    decode: Interval | None
    """Seconds per decoded token."""
    decode_to_full: Interval | None


def describe_savings(comparison: Comparison, best: Best, timings: Iterable[Timing]) -> str:
    """What the lead saves at a budget: bytes, and seconds if they were timed.

    Seconds of compression may be those of another budget, protection or protocol, if these were not
    timed: its cost hardly depends on them.
    """
    lead, spec = best.lead, best.budget
    ours, full = comparison.cells[lead, spec], comparison.full
    parts = []
    if full and ours.nbytes and full.nbytes:
        size, whole = decimal(round(ours.nbytes)), decimal(round(full.nbytes))
        parts.append(
            f"{lead.label} keeps {size} of {whole} per prompt ({ours.nbytes / full.nbytes:.1%})"
        )
    sized, kept = [timing for timing in timings if timing.spec], lead.protected
    same = [it for it in sized if replace(it.setting, protected=kept) == lead]
    same.sort(key=lambda timing: (timing.protocol != comparison.protocol, timing.spec != spec))
    if same and (timing := same[0]).evict and timing.prefill:
        evict, prefill = (1000 * interval.mean for interval in (timing.evict, timing.prefill))
        parts.append(f"Compression takes {evict:.0f} ms, the prefill {prefill:.0f} ms")
        if timing.spec == spec and (times := timing.decode_to_full):
            mean, low, high = times.texts(1, ".2f")
            span = f"(median of {times.prompts} prompts, {CONFIDENCE} interval {low} to {high})"
            parts.append(f"A decoded token takes {mean} x its time with the full cache {span}")
    return f"{'. '.join(parts)}." if parts else ""


def count_passes(method: str) -> int | None:
    """How often the model reads the prompt: twice for methods that have it repeat the prompt.

    None for a user's own, whose class is not here.
    """
    if (known := SCORERS.get(method)) is None:
        return 1 if method in (FULL, LEARNED, KVZAP) else None
    return 1 if known().needs.reconstruction is None else 2


def summarise_timings(records: Iterable[TimingRow], groups: PolicyGroups) -> list[Timing]:
    """Bytes and medians of seconds, the full cache first, then by budget and method."""
    parts = group_by(
        records, lambda row: (row["protocol"], row["budget_spec"], MethodSetting.of(row, groups))
    )
    wholes = {key[0]: same for key, same in parts.items() if key[2].method == FULL}
    measured = []
    for (protocol, spec, setting), same in parts.items():
        whole = wholes.get(protocol, [])
        nbytes = _mean_field(same, "cache_bytes")
        decode, full = (_by_prompt(rows, "decode_seconds_per_token") for rows in (same, whole))
        evict, prefill = (_by_prompt(same, f"{part}_seconds") for part in ("evict", "prefill"))
        counted = [(row.get("evict_flops"), row.get("prefill_flops")) for row in same]
        flops = [part / whole for part, whole in counted if part is not None and whole]
        size = "kept_tokens" if same[0]["budget"] is None else "budget"
        timing = Timing(
            setting=setting, protocol=protocol, spec=spec, cache_bytes=nbytes, prompts=len(decode),
            budget=None if spec is None else _mean_field(same, size),
            bytes_to_full=nbytes / _mean_field(whole, "cache_bytes") if whole else None,
            flops=float(np.mean(flops)) if flops else None,
            prefill=median_interval(prefill), evict=median_interval(evict),
            evict_to_prefill=_ratio(evict, prefill), decode=median_interval(decode),
            decode_to_full=_ratio(decode, full),
        )  # fmt: skip
        measured.append(timing)
    return sorted(measured, key=lambda timing: (timing.budget is not None, timing.budget or 0.0))


def _mean_field(records: Sequence[Mapping[str, object]], field: str) -> float:
    return float(np.mean([record[field] for record in records]))


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    if len(ours) != len(theirs) or not all(theirs):
        return None
    return median_interval(np.divide(ours, theirs).tolist())


def _by_prompt(records: Sequence[TimingRow], field: str) -> list[float]:
    """A measure of every prompt, policies averaged; empty where some record lacks it."""
    timed = [record["by_prompt"].get(field, []) for record in records]
    if len({len(values) for values in timed}) != 1:
        return []
    return [float(np.mean(values)) for values in zip(*timed, strict=True)]
