from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import encode
from kvp.data.sources import open_source
from kvp.data.task import Source, TaskSettings
from kvp.errors import UsageError

SPLITS = ("train", "validation", "test")


def opened(tokenizer: PreTrainedTokenizerBase, data: str = "ruler", **changes: Any) -> Source:
    settings: dict[str, Any] = {
        "tasks": ("niah_single_2", "niah_multikey_2"), "split": "train", "count": 6, "seed": 1,
        "length": 1600,
    }  # fmt: skip
    return open_source(TaskSettings(data=data, **(settings | changes)), tokenizer)


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def conversation(number: int) -> dict[str, Any]:
    words = [f"w{number}x{turn}" for turn in range(6)]
    roles = ("user", "assistant") * 3
    return {
        "messages": [
            {"role": r, "content": f"{w} says so"} for r, w in zip(roles, words, strict=True)
        ]
    }


@pytest.mark.parametrize("data", ["ruler", "chat"])
def test_a_sample_depends_on_its_index_alone(data: str, tokenizer: PreTrainedTokenizerBase) -> None:
    few, many = opened(tokenizer, data, count=2), opened(tokenizer, data, count=6)
    assert list(few) == [many[0], many[1]]
    assert len({sample.id for sample in many}) == 6
    assert len(many) == 6
    with pytest.raises(IndexError):
        many[6]
    assert opened(tokenizer, data, seed=2)[0] != many[0]


def test_tasks_take_turns_and_a_task_alone_gives_the_same_samples(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    both = list(opened(tokenizer, count=4))
    assert [sample.task for sample in both] == ["niah_single_2", "niah_multikey_2"] * 2
    assert list(opened(tokenizer, tasks=("niah_multikey_2",), count=2)) == both[1::2]


@pytest.mark.parametrize("length", [1601])
@pytest.mark.parametrize("data", ["ruler", "chat"])
def test_prompts_fill_the_length_and_never_exceed_it(
    data: str, length: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    for sample in opened(tokenizer, data, length=length, count=3):
        tokens = encode(sample, tokenizer).prompt_length
        assert length - 250 < tokens <= length  # one more line or exchange would not fit


def test_chats_of_a_file_keep_a_dialogue_in_one_split_and_one_chat(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = jsonl(tmp_path / "talk.jsonl", *map(conversation, range(80)))
    owners: dict[str, tuple[str, int]] = {}
    for split in SPLITS:
        for index, sample in enumerate(opened(tokenizer, data, split=split, length=400, count=99)):
            assert sample.messages is not None
            assert sample.messages[-1]["role"] == "assistant"
            assert encode(sample, tokenizer).prompt_length <= 400
            for turn in sample.messages:
                owner = turn["content"].split("x")[0]
                assert owners.setdefault(owner, (split, index)) == (split, index)
    assert {split for split, _ in owners.values()} == set(SPLITS)


def test_running_text_is_cut_before_a_word(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    data = jsonl(tmp_path / "t.jsonl", *({"text": f"text{n} of several words"} for n in range(30)))
    pieces = list(opened(tokenizer, data, length=16, count=99))
    assert all(
        re.fullmatch(r"text\d+ of", sample.context) for sample in pieces
    )  # "several" ends at 16+
    # What follows is the reference.
    assert {sample.reply for sample in pieces} == {" several words"}
    whole = list(opened(tokenizer, data, length=50, count=99))
    assert all(sample.context.endswith("words") for sample in whole)
    assert {(sample.metric, sample.reply, sample.messages) for sample in whole} == {
        ("none", "", None)
    }


def test_rows_too_long_are_left_out_and_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"context": f"{n:02d}" * (45 if n % 3 == 0 else 5), "question": "Q?"} for n in range(60)
    ]
    source = opened(tokenizer, jsonl(tmp_path / "qa.jsonl", *rows), length=60, count=99)
    assert {len(sample.context) for sample in source} == {10}
    (note,) = source.notes
    assert re.search(r"train split: left out \d+ rows: line \d+ has \d+ prompt tokens, more", note)


def test_needles_that_do_not_fit_are_drawn_again(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The smallest prompts differ by the length of their key: some draws are too long."""
    roomy = opened(tokenizer, tasks=("niah_single_1",), count=60, length=2000)
    for length in range(440, 800, 4):
        try:
            tight = list(opened(tokenizer, tasks=("niah_single_1",), count=60, length=length))
        except UsageError:
            continue
        break
    assert len({sample.references for sample in tight}) == 60
    assert all(encode(sample, tokenizer).prompt_length <= length for sample in tight)
    pairs = zip(tight, roomy, strict=True)
    drawn_again = sum(one.references != other.references for one, other in pairs)
    assert 10 < drawn_again < 60


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        ("ruler", {"tasks": ("niah_single_9",)}, "--tasks: unknown task 'niah_single_9'"),
        ("ruler", {"tasks": ()}, "--tasks is empty"),
        ("ruler", {"essays": "/no/such/file"}, "--essays /no/such/file"),
        ("ruler", {"length": 100}, "--length"),
        ("chat", {"length": 10}, "--length 10: the smallest chat already has"),
        ("none.jsonl", {}, "--data none.jsonl: no such file or folder"),
    ],
)
def test_requests_that_cannot_work(
    data: str, changes: dict[str, Any], message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        opened(tokenizer, data, **changes)[0]
