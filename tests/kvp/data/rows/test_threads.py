"""Several threads of one message tree: their order, their split, their chats, and which rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from kvp.data.encode import encode
from kvp.data.rows.documents import read_documents, threads
from kvp.data.rows.files import RowError
from kvp.data.rows.forms import Turn
from kvp.data.rows.samples import ChatTokens, row_samples
from kvp.data.synthetic.text import SPLITS
from kvp.data.task import Source, TaskSettings, blank_sample
from kvp.errors import UsageError


def message(name: str, **facts: Any) -> dict[str, Any]:
    """A message whose name spells its way from the root: `a`, `ab`, `abc`."""
    return {
        "message_id": name, "parent_id": name[:-1] or None, "text": f"text {name}",
        "role": "prompter" if len(name) % 2 else "assistant", **facts,
    }  # fmt: skip


def names(found: Sequence[Turn]) -> str:
    return found[-1]["content"].removeprefix("text ")


TREE = [
    message("a"),
    message("ab", rank=1), message("ac", rank=0), message("ad", rank=2),
    message("acx", rank=1), message("acy", rank=0), message("acz"),
    message("acxe"), message("acye", rank=0), message("acyf", rank=1),
    message("acyez"),  # nobody answers
    message("abx"), message("abxg"),
]  # fmt: skip


def test_all_threads_the_best_first() -> None:
    found = list(threads(TREE))
    assert [names(thread) for thread in found] == ["acye", "abxg", "acxe", "acyf", "ad"]
    for thread in found:
        assert [turn["role"] for turn in thread] == ["user", "assistant"] * (len(thread) // 2)
    assert list(threads(reversed(TREE))) == found


def test_a_message_without_text_costs_its_threads_alone() -> None:
    tree = [message("a"), message("ab", text=None, rank=0), message("ac", rank=1)]
    assert [names(thread) for thread in threads(tree)] == ["ac"]
    with pytest.raises(RowError, match="has no text in a message"):
        list(threads(tree[:2]))


def nested(number: int) -> dict[str, Any]:
    """A tree of three threads."""
    replies = [
        {"text": f"{number} reply {n} " + "word " * 20, "role": "assistant", "rank": n}
        for n in range(3)
    ]
    prompt = {"text": f"{number} question", "role": "prompter", "replies": replies, "lang": "en"}
    return {"message_tree_id": f"t{number}", "tree_state": "ready_for_export", "prompt": prompt}


def flat(number: int, *, named: bool = True) -> list[dict[str, Any]]:
    tree = {"message_tree_id": f"t{number}"} if named else {}
    replies = [
        {"message_id": f"{number}/{n}", "parent_id": str(number), "role": "assistant", "rank": n,
         "text": f"{number} reply {n} " + "word " * 20, "lang": "de" if number % 4 else "en",
         **tree}
        for n in range(3)
    ]  # fmt: skip
    root = {"message_id": str(number), "parent_id": None, "role": "prompter", **tree}
    return [{**root, "text": f"{number} question", "lang": replies[0]["lang"]}, *replies]


def written(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(**changes: Any) -> TaskSettings:
    base: dict[str, Any] = {"split": "all", "count": 999, "seed": 0, "length": 900}
    return TaskSettings(**(base | changes))


def chats(data: str, tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Source:
    return row_samples(data, settings(**changes), tokenizer, flag="data")


def roots(source: Source) -> list[list[str]]:
    """The trees of every chat, by the number in their questions."""
    return [
        [turn["content"].split(" ")[0] for turn in sample.messages[::2]]
        for sample in source if sample.messages
    ]  # fmt: skip


@pytest.mark.parametrize(("paths", "expected"), [("best", 1), ("all", 3)])
@pytest.mark.parametrize("form", ["nested", "flat", "unnamed"])
def test_as_many_threads_as_asked_for(tmp_path: Path, form: str, paths: str, expected: int) -> None:
    rows: list[Any] = []
    for number in range(4):
        rows += [nested(number)] if form == "nested" else flat(number, named=form == "flat")
    data = written(tmp_path / "t.jsonl", rows)
    usable, _ = read_documents(data, "data", settings(tree_paths=paths))
    assert len(usable) == 4 * expected
    trees = [one.tree for one in usable]
    assert [trees.count(tree) for tree in dict.fromkeys(trees)] == [expected] * 4
    for tree in set(trees):
        assert len({one.split for one in usable if one.tree == tree}) == 1


@pytest.mark.parametrize("form", ["nested", "flat", "unnamed"])
def test_chats_have_one_thread_of_a_tree_and_no_tree_is_in_two_splits(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, form: str
) -> None:
    rows: list[Any] = []
    for number in range(80):
        rows += [nested(number)] if form == "nested" else flat(number, named=form == "flat")
    data = written(tmp_path / "t.jsonl", rows)
    of_split = {}
    for split in SPLITS:
        source = chats(data, tokenizer, split=split, tree_paths="all")
        found = roots(source)
        assert found
        for chat in found:
            assert len(set(chat)) == len(chat)
        for sample in source:
            assert 450 <= encode(sample, tokenizer).prompt_length <= 900
        of_split[split] = {tree for chat in found for tree in chat}
    assert not of_split["train"] & of_split["test"]
    assert not of_split["train"] & of_split["validation"]
    assert not of_split["test"] & of_split["validation"]
    best = chats(data, tokenizer, tree_paths="best")
    everything = chats(data, tokenizer, tree_paths="all")
    assert len(everything) > 2.5 * len(best)
    shorter = chats(data, tokenizer, tree_paths="all", count=3)
    assert list(shorter) == list(everything)[:3]


def test_tokens_of_a_chat_are_those_of_its_encoding(
    tokenizer: PreTrainedTokenizerBase, plain_tokenizer: PreTrainedTokenizerBase,
    system_tokenizer: PreTrainedTokenizerBase,
) -> None:  # fmt: skip
    blank = blank_sample(settings(), "data", "")
    turns: list[Turn] = []
    for kind in (tokenizer, plain_tokenizer, system_tokenizer):
        counted = ChatTokens(blank, kind)
        turns = []
        for number in range(4):
            turns += [{"role": "user", "content": f"é {number} <|end|>"},
                      {"role": "assistant", "content": "yes " * number}]  # fmt: skip
            sample = blank_sample(settings(), "data", "")
            chat = type(sample)(**{**vars(sample), "messages": tuple(turns)})
            assert counted(turns) == encode(chat, kind).prompt_length


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_rows_are_chosen_by_their_columns(tmp_path: Path, form: str) -> None:
    rows: list[Any] = []
    for number in range(8):
        rows += [nested(number)] if form == "nested" else flat(number)
    data = written(tmp_path / "t.jsonl", rows)
    usable, tally = read_documents(data, "data", settings(where="lang=EN"))
    if form == "nested":
        assert (len(usable), tally.note()) == (8, None)
    else:
        assert len(usable) == 2
        assert tally.note() == "--where lang=EN takes 8 of 32 rows"
        both = settings(where="lang=en, lang=de")
        assert len(read_documents(data, "data", both)[0]) == 8
    for where in ("lang=fr", "nothing=en"):
        with pytest.raises(UsageError, match=rf"--where {where} takes none of its (8|32) rows"):
            read_documents(data, "data", settings(where=where))
