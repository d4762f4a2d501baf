"""Answers lost to eviction, and what the heads kept of the tokens that answers are read from.

An answer is right where it contains all references. Lost: right with the full cache, not right with
the compressed one; gained: the reverse. Evidence is defined in `kvp.data.evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.report.aggregates import ReportedMethod, by_method
from eval.report.best_settings import Comparison, select
from eval.report.load import Results
from eval.report.page import Field, Table
from eval.report.schema import PROTOCOL_NAMES
from eval.report.tables import Line, budget_names
from eval.results.records import FULL, Record, policy_groups
from eval.stats import Interval, Unit, bootstrap_mean, by_policy

Cells = Mapping[ReportedMethod, Mapping[str | None, Sequence[Record]]]
"""Records by method and budget spec."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """One method at one budget, on prompts that the full cache answered, too."""

    lost: Interval
    """Share of the full cache's right answers that are not right here, and its interval."""
    answers: int
    """Answers that are right with the full cache; policies count one by one."""
    failed: int
    """Those of them that are not right here."""
    gained: int
    """Right answers where the full cache's is not."""
    gone: int | None
    """Failed ones of which some evidence token was kept by no head; None without evidence."""


def failures(
    records: Sequence[Record], full: Mapping[Unit, bool], *, resamples: int
) -> Failures | None:
    """Compare answers with the full cache's; None where it has no right one among their prompts."""
    known = [record for record in records if (record["task"], record["example"]) in full]
    had = [record for record in known if full[record["task"], record["example"]]]
    if not had:
        return None
    marked = [{**record, "lost": float(not _right(record))} for record in had]
    failed = [record for record in had if not _right(record)]
    lost_evidence = [record["evidence_lost"] for record in failed if _evidence(record)]
    return Failures(
        lost=bootstrap_mean(by_policy(marked, "lost"), resamples=resamples),
        answers=len(had),
        failed=len(failed),
        gained=sum(map(_right, known)) - (len(had) - len(failed)),
        gone=sum(count > 0 for count in lost_evidence) if any(map(_evidence, had)) else None,
    )


def evidence_by_head(records: Sequence[Record]) -> list[list[float]]:
    """Mean share of the evidence kept, layer by layer and head by head; empty without evidence."""
    shares = [
        np.array(record["evidence_kept"]) / record["evidence_tokens"]
        for record in filter(_evidence, records)
    ]
    return np.mean(shares, axis=0).tolist() if shares else []


def cells_of(results: Results, protocol: str) -> Cells:
    """Generated answers of a protocol by method and budget."""
    groups = policy_groups([*results.records, *results.kept])
    return by_method(select(results, "accuracy", protocol), groups)


def right_with_full(cells: Cells) -> dict[Unit, bool]:
    """Whether the full cache answers a prompt right; empty where it was not run."""
    records = [
        record
        for method, budgets in cells.items()
        if method.method == FULL
        for record in budgets[None]
    ]
    return {(record["task"], record["example"]): _right(record) for record in records}


def failure_table(
    cells: Cells,
    comparison: Comparison,
    lines: Sequence[Line],
) -> Table | None:
    """Answers lost per method and budget; None where the full cache was not run."""
    full = right_with_full(cells)
    rows: list[Sequence[Field | str]] = []
    for name, note, setting in lines:
        found = {
            spec: failures(cells[setting][spec], full, resamples=comparison.resamples)
            for spec in comparison.budgets.specs
            if spec in cells.get(setting, {})
        }
        if setting.method != FULL and any(found.values()):
            fields = [_failure_field(found.get(spec)) for spec in comparison.budgets.specs]
            rows.append([Field(text=name, small=note), *fields])
    if not rows:
        return None
    return Table(
        caption="Right answers of the full cache that are lost, % (95 % bootstrap interval over "
        "prompts and policy seeds; lost of all, and gained where the full cache is wrong; losses "
        "of which no head kept some token of the answer); an answer is right where it contains "
        "all references; "
        f"{PROTOCOL_NAMES[comparison.protocol]}.",
        header=("method", *budget_names(comparison.budgets)),
        rows=rows,
    )


def evidence_table(
    cells: Cells,
    comparison: Comparison,
    spec: str,
    lines: Sequence[Line],
    model_layers: Sequence[int] = (),
) -> Table | None:
    """Evidence kept in each head at one budget; None without evidence.

    `model_layers` are the model's indices of the layers evicted from; empty: counted from 0.
    """
    shares = {
        (name, note): evidence_by_head(cells.get(setting, {}).get(spec, ()))
        for name, note, setting in lines
    }
    layers = max(map(len, shares.values()), default=0)
    if not layers:
        return None
    names = model_layers if len(model_layers) == layers else range(layers)
    rows: list[Sequence[Field | str]] = [
        [
            Field(text=name, small=note),
            f"{100 * float(np.mean(found)):.0f}",
            *(
                Field(
                    text=f"{100 * float(np.mean(heads)):.0f}",
                    small=" ".join(f"{100 * share:.0f}" for share in heads),
                )
                for heads in found
            ),
        ]
        for (name, note), found in shares.items()
        if found
    ]
    return Table(
        caption=f"Evidence kept at {spec}, %: tokens of the context that spell the answer, mean "
        "over prompts; per layer the mean over its KV heads, and below it each head; "
        f"{PROTOCOL_NAMES[comparison.protocol]}.",
        header=("method", "all heads", *(f"layer {layer}" for layer in names)),
        rows=rows,
    )


def _failure_field(found: Failures | None) -> Field:
    if found is None:
        return Field(text="–")
    lost = found.lost
    lines = [
        f"{100 * lost.low:.1f} to {100 * lost.high:.1f}",
        f"{found.failed} of {found.answers}, {found.gained} gained",
    ]
    if found.gone is not None:
        lines.append(f"{found.gone} with a token gone")
    return Field(text=f"{100 * lost.mean:.1f}", small="\n".join(lines))


def _right(record: Record) -> bool:
    return bool(record["score"] >= 1)


def _evidence(record: Record) -> bool:
    return record["evidence_tokens"] is not None
