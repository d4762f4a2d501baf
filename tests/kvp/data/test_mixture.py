"""Mixtures of data: shares, order, ends, and what cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.sources import (
    data_identity,
    open_source,
    parts_of,
    plan_collection,
    takes_tasks,
    turns,
)
from kvp.data.task import Source, TaskSettings
from kvp.errors import UsageError


def _opened(tokenizer: PreTrainedTokenizerBase, data: str, **changes: Any) -> Source:
    settings: dict[str, Any] = {
        "tasks": ("niah_single_1", "niah_single_2"), "split": "train", "count": 10, "seed": 1,
        "length": 900,
    }  # fmt: skip
    return open_source(TaskSettings(data=data, **(settings | changes)), tokenizer)


@pytest.fixture
def prose(tmp_path: Path) -> str:
    """A file with rows of running text."""
    path = tmp_path / "prose.jsonl"
    rows = ({"text": f"Line {number} of a story. " * 12} for number in range(20))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("weights", [(1, 1), (0.5, 0.3, 0.2), (7, 1), (1, 1e-6), (2, 3, 5, 1)])
def test_every_part_has_its_share_of_every_beginning(weights: tuple[float, ...]) -> None:
    order = list(islice(turns(weights), 200))
    for number in range(1, len(order) + 1):
        given = Counter(order[:number])
        for part, weight in enumerate(weights):
            assert abs(given[part] - number * weight / sum(weights)) < len(weights)
    assert order[0] == weights.index(max(weights))


def test_a_mixture_takes_samples_of_its_parts_by_weight(
    tokenizer: PreTrainedTokenizerBase, prose: str
) -> None:
    data = f"ruler:0.5,chat:0.3,{prose}:0.2"
    mixed = list(_opened(tokenizer, data))
    tasks = [sample.task for sample in mixed]
    assert Counter(tasks) == {"niah_single_1": 3, "niah_single_2": 2, "chat": 3, "prose": 2}
    assert len({sample.id for sample in mixed}) == 10
    assert list(_opened(tokenizer, data, count=4)) == mixed[:4]
    alone = list(_opened(tokenizer, "chat", count=3))
    assert [sample for sample in mixed if sample.task == "chat"] == alone
    assert takes_tasks(data)


def test_a_part_without_more_samples_ends_the_mixture_and_is_named(
    tokenizer: PreTrainedTokenizerBase, prose: str
) -> None:
    mixed = _opened(tokenizer, f"chat:0.1,{prose}:0.9", count=100, length=200)
    assert 10 < len(mixed) < 30
    (note,) = [note for note in mixed.notes if "the mixture ends there" in note]
    assert note.startswith(f"--data {prose}: only ")


def test_the_identity_of_a_mixture_has_its_files(
    tokenizer: PreTrainedTokenizerBase, prose: str
) -> None:
    def request(data: str) -> TaskSettings:
        return TaskSettings(data=data, tasks=("niah_single_1",), length=900, seed=0)

    mixed = request(f"ruler:1,{prose}:1")
    assert (
        data_identity(mixed, ())["digest"]
        == data_identity(request(prose), ())["digest"]
        is not None
    )
    assert data_identity(request("ruler:1,chat:1"), ())["digest"] is None
    plan = plan_collection(mixed, {"train": 4, "validation": 2}, tokenizer)
    assert plan.tasks == ("niah_single_1",)
    assert [sample.task for sample in plan] == ["niah_single_1", "prose"] * 3


def test_a_file_whose_name_has_a_comma_is_one_part(tmp_path: Path) -> None:
    path = tmp_path / "a,b:1"
    path.touch()
    assert list(parts_of(str(path))) == [str(path)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("ruler,chat:0.3", "--data: ruler has no weight"),
        ("ruler:nan,chat:1", "--data: ruler:nan has no weight"),
        ("chat:1,chat:2", "--data: chat is named twice"),
        ("a/x.jsonl:1,b/x.jsonl:1", "--data: two parts are called x.jsonl; rename"),
        ("chat:1,none.jsonl:2", "--data none.jsonl: no such file"),
    ],
)
def test_mixtures_that_cannot_work(
    data: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UsageError) as caught:
        _opened(tokenizer, data)
    assert str(caught.value).startswith(message)
