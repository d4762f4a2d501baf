"""Folders that several runs of kvp-eval extended: methods lack tasks, budgets or protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.report.load import load_results
from eval.report.run import build, make_runs

Record = dict[str, Any]
Write = Callable[..., Path]
Run = Mapping[str, Sequence[Any]]


def _records(make_record: Callable[..., Record], run: Run) -> list[Record]:
    """Records of one run: every method on every task, example, budget and protocol."""
    return [
        make_record(
            method, task=task, example=example, protocol=protocol, budget_spec=spec,
            protected=method != "full", policy="seed0" if method == "kvp" else None,
            policy_seed=0 if method == "kvp" else None,
            **({"nll": 9.0, "reply_tokens": 10} if task == "chat" else {"score": 0.5}),
        )
        for method in run["methods"]
        for task in run["tasks"]
        for example in run.get("examples", ("e1", "e2"))
        for protocol in run.get("protocols", ("query_aware",))
        for spec in ((None,) if method == "full" else run.get("budgets", ("25%", "50%")))
    ]  # fmt: skip


FIRST = {"methods": ("full", "knorm", "keydiff"), "tasks": ("A",)}


@pytest.mark.parametrize(
    "second",
    [
        {"methods": ("full", "knorm"), "tasks": ("B",)},
        {"methods": ("full", "tova"), "tasks": ("B",)},
        {"methods": ("kvp",), "tasks": ("B",)},
        {"methods": ("knorm",), "tasks": ("B",), "budgets": ("50%",)},
        {"methods": ("full", "knorm"), "tasks": ("B",), "budgets": ("12%",)},
        {"methods": ("full", "knorm"), "tasks": ("A",), "examples": ("e3",)},
        {"methods": ("full", "knorm"), "tasks": ("B",), "protocols": ("query_agnostic",)},
        {"methods": ("full", "knorm"), "tasks": ("chat",)},
        {"methods": ("full",), "tasks": ("B",)},
        {"methods": ("oracle", "snapkv"), "tasks": ("chat", "B"), "budgets": ("6%",)},
    ],
)
def test_extended_folders_have_a_report(
    tmp_path: Path, write_results: Write, make_record: Callable[..., Record], second: Run
) -> None:
    records = [*_records(make_record, FIRST), *_records(make_record, second)]
    page = build(make_runs([load_results(write_results(tmp_path / "r", records=records))], None, 3))
    for method in {*FIRST["methods"], *second["methods"]} - {"full"}:
        assert f"<span>{method}</span>" in page


def test_means_over_different_tasks_are_never_compared(
    tmp_path: Path, write_results: Write, make_record: Callable[..., Record]
) -> None:
    records = [
        *_records(make_record, FIRST),
        *_records(make_record, {"methods": ("full", "knorm"), "tasks": ("B",)}),
    ]
    page = build(make_runs([load_results(write_results(tmp_path / "r", records=records))], None, 3))
    headline = page[page.index('id="accuracy-query_aware"') :].partition("</table>")[0]
    assert "<span>knorm</span>" in headline
    assert "<span>keydiff</span>" not in headline
    assert "without keydiff, which answered only some of the tasks" in headline


def test_curves_without_the_oracle_of_their_heads_have_no_ratio(
    tmp_path: Path, write_results: Write, curves: list[Record]
) -> None:
    fewer = [
        record for record in curves if not (record["method"] == "oracle" and record["head"] == 1)
    ]
    page = build(make_runs([load_results(write_results(tmp_path / "r", curves=fewer))], None, 3))
    assert "Area under the cost curves" in page
