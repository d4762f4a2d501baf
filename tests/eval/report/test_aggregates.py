"""Numbers of the tables against hand-computed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eval.report.aggregates import (
    ReportedMethod,
    budget_axis,
    perplexity_grid,
    score_grid,
)
from eval.results.records import policy_groups

Record = dict[str, Any]
MakeRecord = Callable[..., Record]


def _setting(method: str, *, protected: bool = True) -> ReportedMethod:
    return ReportedMethod(method=method, group="", variant="auto", protected=protected)


def test_tasks_weigh_the_same_and_seeds_are_averaged_per_prompt(answers: list[Record]) -> None:
    records = [record for record in answers if record["protocol"] == "query_aware"]
    grid = score_grid(records, policy_groups(records), resamples=10)
    kvp = grid[_setting("kvp")]["25%"]
    # per prompt (1 + 1) / 2, (0 + 1) / 2, (1 + 0) / 2, (1 + 1) / 2; per task 0.75 and 0.75
    assert kvp.interval.mean == 0.75
    assert (kvp.interval.prompts, kvp.policies) == (4, 2)
    assert {seed: kvp.scores[seed]["one", "e2"] for seed in kvp.scores} == {"seed0": 0, "seed1": 1}
    assert grid[_setting("knorm", protected=False)]["25%"].interval.mean == 0.375
    assert grid[_setting("full", protected=False)][None].interval.mean == 1.0


def test_an_uneven_number_of_prompts_does_not_change_a_tasks_weight(
    make_record: MakeRecord,
) -> None:
    records = [
        make_record(task="one", example="e1", score=1.0),
        *(make_record(task="two", example=f"e{n}", score=0.0) for n in (2, 3, 4)),
    ]
    grid = score_grid(records, {None: ""}, resamples=10)
    assert grid[_setting("knorm")]["25%"].interval.mean == 0.5


def test_perplexity_weighs_tokens(replies: list[Record]) -> None:
    grid = perplexity_grid(replies, {None: ""}, resamples=10)
    cells = grid[_setting("knorm")]
    assert cells["25%"].interval.mean == pytest.approx(np.exp((20 + 60) / (10 + 30)))
    assert cells["50%"].interval.mean == pytest.approx(np.exp((10 + 50) / (10 + 30)))


def test_two_protocols_are_never_one_grid(answers: list[Record]) -> None:
    with pytest.raises(ValueError, match="2 protocols"):
        score_grid(answers, policy_groups(answers), resamples=10)


@pytest.mark.parametrize(
    ("labels", "groups"),
    [
        ({"seed0": 0, "seed1": 1}, {"seed0": "", "seed1": ""}),
        ({"policies": 0}, {"policies": ""}),
        (
            {"ratio-seed0": 0, "ratio-seed12": 12, "skill_s0": 0},
            {"ratio-seed0": "ratio", "ratio-seed12": "ratio", "skill_s0": "skill"},
        ),
        ({"seed0": 0, "paper.0": 0}, {"seed0": "", "paper.0": "paper"}),
        ({"a1": None, "a2": None}, {"a1": "a1", "a2": "a2"}),
    ],
)
def test_policies_that_differ_only_in_seed_are_one_group(
    make_record: MakeRecord, labels: dict[str, int | None], groups: dict[str, str]
) -> None:
    records = [
        make_record("kvp", policy=label, policy_seed=seed, score=0.0)
        for label, seed in labels.items()
    ]
    assert policy_groups(records) == {None: "", **groups}


def test_budgets_are_percent_where_all_are(make_record: MakeRecord) -> None:
    records = [make_record(budget_spec=spec) for spec in ("50%", "12.5%", "25%")]
    budgets = budget_axis([*records, make_record("full", budget_spec=None)])
    assert budgets.specs == ("12.5%", "25%", "50%")
    assert budgets.positions == (12.5, 25.0, 50.0)
    mixed = budget_axis([*records, make_record(budget_spec="64", budget=64)])
    assert mixed.specs == ("12.5%", "25%", "50%", "64")
    assert mixed.positions == (2.0, 4.0, 8.0, 64.0)
    assert "tokens per KV head" in mixed.label
