"""Answers lost to eviction, and what the heads kept of the tokens that answers are read from.

An answer is right where it contains all references. Lost: right with the full cache, not right with
the compressed one; gained: the reverse. Evidence is defined in `kvp.data.encode`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eval.comparison import Comparison, ReportedMethod, by_method
from eval.records import FULL, PROTOCOL_NAMES, Record
from eval.report.tables import NOTHING, Field, Line, Table, budget_names
from eval.stats import Unit, bootstrap_mean, by_policy

Cells = Mapping[ReportedMethod, Mapping[str | None, Sequence[Record]]]
"""Records by method and budget spec."""


def cells_of(comparison: Comparison) -> Cells:
    """Generated answers of a protocol by method and budget."""
    return by_method(comparison.records, comparison.groups)


def failure_table(cells: Cells, comparison: Comparison, lines: Sequence[Line]) -> Table | None:
    """Answers lost per method and budget; None where the full cache has no right answer to lose."""
    full = {
        (record["task"], record["example"]): record["score"] >= 1
        for method, budgets in cells.items() if method.method == FULL
        for record in budgets[None]
    }  # fmt: skip
    rows: list[Sequence[Field | str]] = []
    for name, note, setting in lines:
        fields = [
            _lost(cells.get(setting, {}).get(spec, ()), full, comparison.resamples)
            for spec in comparison.budgets.specs
        ]
        if setting.method != FULL and any(field != NOTHING for field in fields):
            rows.append([Field(text=name, small=note), *fields])
    if not rows:
        return None
    return Table(
        caption="Right answers of the full cache that are lost, % (95 % bootstrap interval over "
        "prompts and policy seeds; lost of all, and gained where the full cache is wrong; losses "
        "of which no head kept some token of the answer); an answer is right where it contains "
        f"all references; {PROTOCOL_NAMES[comparison.protocol]}.",
        header=("method", *budget_names(comparison.budgets)),
        rows=rows,
    )


def _lost(records: Sequence[Record], full: Mapping[Unit, bool], resamples: int) -> Field:
    """Answers lost at one budget; policies count one by one."""
    known = [record for record in records if (record["task"], record["example"]) in full]
    had = [record for record in known if full[record["task"], record["example"]]]
    if not had:
        return NOTHING
    failed = [record for record in had if record["score"] < 1]
    gained = sum(record["score"] >= 1 for record in known) - (len(had) - len(failed))
    marked = [{**record, "lost": float(record["score"] < 1)} for record in had]
    lost = bootstrap_mean(by_policy(marked, "lost"), resamples=resamples)
    small = [
        f"{100 * lost.low:.1f} to {100 * lost.high:.1f}",
        f"{len(failed)} of {len(had)}, {gained} gained",
    ]
    if any(record["evidence_tokens"] is not None for record in had):
        small.append(
            f"{sum((each['evidence_lost'] or 0) > 0 for each in failed)} with a token gone"
        )
    return Field(text=f"{100 * lost.mean:.1f}", small="\n".join(small))


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
    rows: list[Sequence[Field | str]] = []
    layers = 0
    for name, note, setting in lines:
        shares = [
            np.array(record["evidence_kept"]) / record["evidence_tokens"]
            for record in cells.get(setting, {}).get(spec, ())
            if record["evidence_tokens"] is not None
        ]
        if not shares:
            continue
        percent = 100 * np.mean(shares, axis=0)  # [layers, KV heads]
        layers = len(percent)
        fields = [
            Field(text=f"{heads.mean():.0f}", small=" ".join(f"{one:.0f}" for one in heads))
            for heads in percent
        ]
        rows.append([Field(text=name, small=note), f"{percent.mean():.0f}", *fields])
    if not rows:
        return None
    names = model_layers if len(model_layers) == layers else range(layers)
    return Table(
        caption=f"Evidence kept at {spec}, %: tokens of the context that spell the answer, mean "
        "over prompts; per layer the mean over its KV heads, and below it each head; "
        f"{PROTOCOL_NAMES[comparison.protocol]}.",
        header=("method", "all heads", *(f"layer {layer}" for layer in names)),
        rows=rows,
    )
