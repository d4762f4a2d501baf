"""A data source of one's own: what it may return, and its mistakes in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.rows.files import read_rows
from kvp.data.sources import open_source
from kvp.data.task import TaskSettings
from kvp.errors import UsageError

MODULE = """
from dataclasses import replace
from kvp.data.task import blank_sample

def yields(tasks, settings, tokenizer):
    for n in range(100):
        yield replace(blank_sample(settings, "own", str(n)), context="One. ", question="Two?")

def fails(tasks, settings, tokenizer):
    raise KeyError("oops")

def leaves(tasks, settings, tokenizer):
    raise SystemExit(0)

def nothing(tasks, settings, tokenizer):
    return None

def texts(tasks, settings, tokenizer):
    return ["one", "two"]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `kvp_test_own_source` in the working folder."""
    (tmp_path / "kvp_test_own_source.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("kvp_test_own_source", None)


def opened(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    source = open_source(
        TaskSettings(
            data=f"kvp_test_own_source:{name}", tasks=(), split="train", count=3, seed=0, length=200
        ),
        tokenizer,
    )
    return [sample.id for sample in source]


def test_a_source_may_yield(tokenizer: PreTrainedTokenizerBase) -> None:
    assert opened("yields", tokenizer) == [f"own/train/0/{n}" for n in range(3)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "failed (KeyError: 'oops'; kvp_test_own_source.py line 10)"),
        ("leaves", "failed (SystemExit: 0; kvp_test_own_source.py line 13)"),
        ("nothing", "failed (TypeError: 'NoneType' object is not iterable"),
        ("texts", " made 'one', not a kvp.data Sample"),
    ],
)
def test_mistakes_name_the_source(
    name: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UsageError) as error:
        opened(name, tokenizer)
    assert str(error.value).startswith(f"--data kvp_test_own_source:{name}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (" ", "--data is empty"),
        ("nope.jsonl", "--data nope.jsonl: no such file or folder"),
        ("./nope", "--data ./nope: no such file or folder"),
        ("kvp_test_own_source:fails", "write a task and give it by --tasks"),
    ],
)
def test_names_of_no_data_do_not_reach_the_hub(data: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        list(read_rows(data, "data"))
    assert message in str(error.value)
