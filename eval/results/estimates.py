"""What each method scores at each budget: one number, and how numbers of a kind are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from eval.results import stats
from eval.results.method_setting import MethodSetting, PolicyGroups
from eval.results.record_schemas import ResultsRow
from eval.results.stats import Interval, Scores, Unit
from kvp.grouping import group_by
from kvp.names import FULL

Kind = Literal["answers", "perplexity"]
"""Scores of answers, perplexity of given replies."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How numbers of a kind are computed and written."""

    field: Literal["score", "nll"]
    """Field of a record that holds the number."""
    title: str
    """What is measured, with its unit, for captions and axes."""
    scale: int
    """Factor with which a mean is shown."""
    sign: Literal[1, -1]
    """1 where more is better."""
    digits: int
    """Decimal places of a mean in sentences and in the closing table."""
    page_format: str
    """Number format of a mean on the page."""
    unit: str
    """What follows a mean in sentences."""
    verb: str
    """What a method does to a mean, in sentences."""
    gap_format: str
    """Number format of a difference."""
    gap_unit: str
    """Unit of a difference, in words."""

    def goodness(self, estimate: Estimate) -> float:
        """What estimates are ordered by: more is better."""
        return estimate.interval.mean * self.sign


MEASURES: Mapping[Kind, Measure] = {
    "answers": Measure(
        field="score", title="accuracy, %", scale=100, sign=1, digits=0, unit="%",
        page_format=".1f", verb="answers", gap_format="+.1f", gap_unit="points",
    ),
    "perplexity": Measure(
        field="nll", title="perplexity of the given text", scale=1, sign=-1, digits=2,
        unit="", page_format=".2f", verb="has a perplexity of", gap_format="+.3f",
        gap_unit="nats per token",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """One number of a table."""

    interval: Interval
    policies: int
    """Policies averaged, 0 for methods without."""
    scores: Scores
    """Score per policy and prompt, or log-likelihood per token (`eval.results.stats`)."""
    weights: Mapping[Unit, float] | None
    """Tokens of the replies by prompt; None for answers."""
    kept_tokens: float
    """Tokens kept per KV head, mean over heads and prompts."""
    share: float
    """The same as a share of the tokens cached before."""
    nbytes: float | None
    """Bytes of keys and values after the eviction, mean over prompts; None where unmeasured."""

    @cached_property
    def prompts(self) -> set[Unit]:
        """The prompts answered."""
        return {unit for answers in self.scores.values() for unit in answers}


CellKey = tuple[MethodSetting, str]
"""A method and a budget as it was written, `own` or `full`."""
Cells = Mapping[CellKey, Estimate]


def make_estimates(kind: Kind, records: Sequence[ResultsRow], groups: PolicyGroups) -> Cells:
    """Numbers of one protocol by method and budget.

    Scores, 0 to 1: mean over tasks of the mean over prompts. Perplexity: exp(sum nll / sum tokens).
    """
    scored = [record for record in records if record[MEASURES[kind].field] is not None]
    by_key = group_by(
        scored, lambda record: (MethodSetting.of(record, groups), record["budget_spec"] or FULL)
    )
    return {key: _estimate(kind, same) for key, same in by_key.items()}


def _estimate(kind: Kind, records: list[ResultsRow]) -> Estimate:
    scores = stats.prompt_values(records)
    nbytes = [size for record in records if (size := record.get("cache_bytes")) is not None]
    shares = [record["kept_tokens"] / record["cached_tokens"] for record in records]
    return Estimate(
        interval=stats.bootstrap_mean(scores) if kind == "answers" else stats.perplexity(records),
        policies=len({record["policy"] for record in records} - {None}),
        scores=scores,
        weights=stats.reply_tokens(records),
        kept_tokens=float(np.mean([record["kept_tokens"] for record in records])),
        share=float(np.mean(shares)),
        nbytes=float(np.mean(nbytes)) if len(nbytes) == len(records) else None,
    )


def full_of(cells: Cells) -> Estimate | None:
    """The estimate of the full cache, where it was run."""
    return next((cell for (setting, _), cell in cells.items() if setting.method == FULL), None)
