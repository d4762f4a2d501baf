"""The task that docs/data.md shows works as it is written there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.sources import open_source
from kvp.data.task import TaskSettings
from kvp.data.tasks import find_task

DOCS = Path(__file__).parents[4] / "docs" / "data.md"


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerBase
) -> None:
    match = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert match is not None
    (tmp_path / "my_tasks.py").write_text(match[1])
    monkeypatch.chdir(tmp_path)
    source = open_source(
        TaskSettings(
            data="ruler", tasks=("my_tasks:Backwards",), split="test", count=2, seed=0, length=99
        ),
        tokenizer,
    )
    assert [sample.references for sample in source] == [("eert",), ("enots",)]
    assert find_task("my_tasks:Backwards").score(source[0], " eert!") == 1
