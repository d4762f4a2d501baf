"""Answers lost and evidence kept, from records small enough to count by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eval.report.aggregates import by_method
from eval.report.best_settings import Comparison
from eval.report.failures import evidence_by_head, evidence_table, failure_table, failures
from eval.report.load import load_results
from eval.report.tables import lines_shown
from kvp.errors import ResultsError

Record = dict[str, Any]
FULL = {("one", "e1"): True, ("one", "e2"): True, ("two", "e3"): False}


def _evidence(tokens: int, kept: list[list[int]], lost: int) -> Record:
    return {"evidence_tokens": tokens, "evidence_kept": kept, "evidence_lost": lost}


@pytest.fixture
def records(make_record: Callable[..., Record]) -> list[Record]:
    return [
        make_record(example="e1", score=1.0, **_evidence(4, [[4, 0], [2, 2]], 0)),
        make_record(example="e2", score=0.5, **_evidence(2, [[0, 0], [1, 0]], 1)),
        make_record(task="two", example="e3", score=1.0),
        make_record(task="two", example="e4", score=0.0),  # the full cache was not run on it
    ]


def test_lost_and_gained_answers_are_counted(records: list[Record]) -> None:
    found = failures(records, FULL, resamples=50)
    assert found is not None
    assert (found.answers, found.failed, found.gained, found.gone) == (2, 1, 1, 1)
    assert (found.lost.mean, found.lost.prompts) == (0.5, 2)


def test_without_right_answers_or_evidence_there_is_less_to_say(records: list[Record]) -> None:
    assert failures(records, dict.fromkeys(FULL, False), resamples=50) is None
    assert failures(records, {}, resamples=50) is None
    bare = [{**row, **_evidence(1, [], 0), "evidence_tokens": None} for row in records]
    found = failures(bare, FULL, resamples=50)
    assert found is not None
    assert found.gone is None
    assert evidence_by_head(bare) == []


def test_shares_of_the_evidence_are_averaged_head_by_head(records: list[Record]) -> None:
    assert evidence_by_head(records) == [[0.5, 0.0], [0.5, 0.25]]


def test_tables_name_counts_and_heads(
    records: list[Record],
    make_record: Callable[..., Record],
    make_comparison: Callable[..., Comparison],
) -> None:
    full = [
        make_record("full", protected=False, budget_spec=None, task=task, example=example,
                 score=float(right), **_evidence(2, [[2, 2], [2, 2]], 0))
        for (task, example), right in FULL.items()
    ]  # fmt: skip
    everything = [*full, *records[:3]]
    comparison = make_comparison(records=everything)
    cells = by_method(everything, {None: ""})
    lost = failure_table(cells, comparison, lines_shown(comparison))
    assert lost is not None
    ((_, cell),) = lost.rows
    assert not isinstance(cell, str)
    assert cell.text == "50.0"
    assert cell.small.split("\n")[1:] == ["1 of 2, 1 gained", "1 with a token gone"]
    kept = evidence_table(cells, comparison, "25%", lines_shown(comparison))
    assert kept is not None
    ((_, mean, *layers),) = kept.rows
    assert mean == "31"
    assert [(layer.text, layer.small) for layer in layers] == [("25", "50 0"), ("38", "50 25")]
    alone = make_comparison(records=records[:3])
    assert failure_table(by_method(records[:3], {None: ""}), alone, lines_shown(alone)) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"evidence_tokens": 0},
        {"evidence_tokens": None},
        {"evidence_lost": 5},
        {"evidence_kept": [[5, 0], [0, 0]]},
        {"evidence_kept": [[1, 0], [0]]},
        {"evidence_kept": [1, 0]},
        {"evidence_kept": []},
    ],
)
def test_damaged_evidence_is_refused(
    tmp_path: Any, write_results: Any, records: list[Record], damage: Record
) -> None:
    folder = write_results(tmp_path / "r", records=[{**records[0], **damage}])
    with pytest.raises(ResultsError, match=r"rows\.jsonl line 1 is damaged: 'evidence_"):
        load_results(folder)


def test_evidence_of_models_of_other_shape_is_refused(
    tmp_path: Any, write_results: Any, records: list[Record]
) -> None:
    other = {**records[1], "evidence_kept": [[0, 0]]}
    folder = write_results(tmp_path / "r", records=[records[0], other])
    with pytest.raises(ResultsError, match="different numbers of heads"):
        load_results(folder)
