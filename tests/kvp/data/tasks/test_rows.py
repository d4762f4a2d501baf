"""The task `data` and the dialogues of `chat`: rows of a user's files in evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import encode
from kvp.data.sources import open_source
from kvp.data.task import TaskSettings
from kvp.data.tasks import find_task
from kvp.errors import UsageError


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def settings(**changes: Any) -> TaskSettings:
    base: dict[str, Any] = {"split": "all", "count": 99, "seed": 0, "length": 200}
    return TaskSettings(**base, **changes)


def test_questions_are_scored_and_other_rows_measured(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"context": "c", "question": "q", "answer": ["One", "two"], "task": "mine"},
        {"context": "c", "question": "q", "answers": {"text": ["One", "two"]}},
        {"context": "c", "question": "q"},
        {"prompt": "p"},
        {"text": "short"},
        {"text": "long " * 99},
    ]
    data = jsonl(tmp_path / "my.jsonl", *rows)
    task = find_task("data")
    source = task.build(settings(data=data), tokenizer)
    by_metric = {sample.metric: sample for sample in source}
    assert len(source) == 3
    assert task.score(by_metric["all"], "one!") == 0.5
    assert by_metric["all"].task == "mine"
    assert task.score(by_metric["part"], "ONE!") == 1
    assert by_metric["none"].task == "my"
    assert encode(by_metric["none"], tokenizer).reply_ids
    (note,) = source.notes  # type: ignore[attr-defined]
    assert f"--data {data}: all split: left out 3 rows" in note
    assert "has no answer to measure" in note
    assert "is no longer than --length 200" in note
    with pytest.raises(UsageError, match="--tasks data needs --data FILE"):
        task.build(settings(), tokenizer)


def test_the_chat_task_leaves_out_what_is_no_dialogue(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"prompt": "p" * 120, "completion": "c"}, {"context": "c", "question": "q"}]
    data = jsonl(tmp_path / "talk.jsonl", *rows)
    source = find_task("chat").build(settings(chat=data), tokenizer)
    assert [sample.task for sample in source] == ["chat"]
    assert "--chat" in source.notes[0]  # type: ignore[attr-defined]
    assert "line 2 is not a dialogue" in source.notes[0]  # type: ignore[attr-defined]


def test_a_prompt_without_completion_is_collected(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = jsonl(tmp_path / "p.jsonl", *({"prompt": f"What is {n}?"} for n in range(20)))
    options: dict[str, Any] = {"split": "train", "count": 9, "seed": 0, "length": 60}
    source = open_source(TaskSettings(data=data, tasks=(), **options), tokenizer)
    assert len(source) == 9
    assert source[0].messages is not None
    assert encode(source[0], tokenizer).reply_ids == ()
    with_replies = open_source(
        TaskSettings(data=data, tasks=(), needs_reply=True, **options), tokenizer
    )
    assert len(with_replies) == 0


def test_a_text_file_gives_as_many_prompts_as_fit(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "book.txt").write_text(" ".join(f"w{n}" for n in range(2000)))
    options: dict[str, Any] = {"split": "train", "count": 20, "seed": 0, "length": 100}
    source = open_source(
        TaskSettings(data=str(tmp_path / "book.txt"), tasks=(), **options), tokenizer
    )
    assert len(source) == 20
    words = [word for sample in source for word in sample.context.split()]
    assert words == [f"w{n}" for n in range(len(words))]
    assert all(sample.reply.split()[0] for sample in source)
