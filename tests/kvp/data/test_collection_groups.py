"""Groups of benchmark tasks in kvp-collect and kvp-train."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.sources import fitting_tasks, plan_collection
from kvp.data.task import TaskSettings
from kvp.errors import UsageError


def _request(*tasks: str, length: int = 1200) -> TaskSettings:
    return TaskSettings(data="ruler", tasks=tasks, length=length, seed=0)


def test_generated_benchmarks_are_collected(tokenizer: PreTrainedTokenizerBase) -> None:
    request = _request("scbench", "longmemeval")
    plan = plan_collection(request, {"train": 14, "test": 2}, tokenizer)
    names = [sample.task for sample in plan]
    assert names[:7] == names[7:14] == list(plan.tasks)
    assert names[6] == "longmemeval"
    assert len(plan) == 16


def test_of_a_group_those_that_do_not_fit_are_left_out(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    fitting = fitting_tasks(_request("scbench", length=500), tokenizer)
    assert "scbench_mf" in fitting
    assert "scbench_kv" not in fitting
    with pytest.raises(UsageError, match="--length 30: no task of scbench fits"):
        fitting_tasks(_request("scbench", length=30), tokenizer)


@pytest.mark.parametrize("task", ["longbench", "longbench_trec", "scbench_qa_eng", "data"])
def test_tasks_that_only_read_rows_are_refused(
    tokenizer: PreTrainedTokenizerBase, task: str
) -> None:
    with pytest.raises(UsageError, match=f"--tasks {task} is a task of kvp-eval"):
        fitting_tasks(_request(task), tokenizer)
