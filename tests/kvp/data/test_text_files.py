from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvp.data.synthetic.needles import split_of
from kvp.data.text_files import alternating, best_thread, documents, read_text
from kvp.errors import UsageError


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def turns(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def message(name: str, parent: str | None, **facts: Any) -> dict[str, Any]:
    role = "prompter" if len(name) % 2 else "assistant"
    return {
        "message_id": name, "parent_id": parent, "message_tree_id": name[0], "role": role,
        "text": f"text {name}", "rank": None, "deleted": False, **facts,
    }  # fmt: skip


def test_text_and_messages(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "d.jsonl", {"text": "One."}, {"messages": turns("a", "b", "c")})
    text, chat = documents(data)
    assert (text.text, text.turns, text.split) == ("One.", (), split_of("One."))
    assert chat.turns == tuple(turns("a", "b"))


def test_equal_rows_share_a_split_and_all_splits_occur(tmp_path: Path) -> None:
    rows = [{"text": f"text {number % 150}"} for number in range(300)]
    found = documents(jsonl(tmp_path / "d.jsonl", *rows))
    owner = {document.text: document.split for document in found}
    assert all(owner[document.text] == document.split for document in found)
    counts = {split: list(owner.values()).count(split) for split in ("train", "validation", "test")}
    assert counts["train"] > 90
    assert min(counts.values()) >= 5


def test_published_ruler_rows(tmp_path: Path) -> None:
    row = {"context": "c", "question": "q", "answer": ["1"], "answer_prefix": "p"}
    (document,) = documents(jsonl(tmp_path / "d.jsonl", row))
    assert document.question == row


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            '{"text": "a"}\n{"answer": "b", "query": "c"}\n',
            "line 2: neither a 'text' nor a 'messages' column (columns: answer, query)",
        ),
        ('{"text": 3}\n', "line 1: neither a 'text' nor a 'messages' column (columns: text)"),
        ('\n{"text": "a"\n', "line 2: not JSON"),
        ("[1]\n", "line 1: not a JSON object"),
        ('{"messages": [{"from": "user"}]}\n', "line 1: a message needs 'role' and 'content'"),
        ("\n", "there is nothing in it"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, lines: str, said: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(lines)
    with pytest.raises(UsageError) as error:
        documents(str(path))
    assert str(path) in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        documents(str(tmp_path / "none.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        documents(str(tmp_path / "binary.jsonl"))


def test_the_best_ranked_thread_of_a_tree() -> None:
    tree = [
        message("a", None),
        message("aa", "a", rank=1),
        message("ab", "a", rank=0),
        message("ac", "a"),
        message("aba", "ab", rank=0, deleted=True),
        message("abb", "ab", rank=1),
        message("abba", "abb"),
        message("abbac", "abba"),
    ]
    found = best_thread(tree)
    assert [turn["content"] for turn in found] == ["text a", "text ab", "text abb", "text abba"]
    assert [turn["role"] for turn in found] == ["user", "assistant"] * 2
    assert best_thread(tree[1:]) == ()


def test_trees_of_a_file(tmp_path: Path) -> None:
    rows = [message("a", None), message("aa", "a"), message("b", None), message("bb", "b")]
    rows.append(message("c", None))
    found = documents(jsonl(tmp_path / "d.jsonl", *rows))
    assert [document.turns[1]["content"] for document in found] == ["text aa", "text bb"]
    assert [document.split for document in found] == [split_of("a"), split_of("b")]


def test_only_a_clean_start_of_a_dialogue_is_used() -> None:
    system = {"role": "system", "content": "s"}
    tool = {"role": "tool", "content": "t"}
    assert alternating([system, *turns("a", "b")]) == tuple(turns("a", "b"))
    assert alternating([*turns("a", "b"), tool, *turns("c", "d")]) == tuple(turns("a", "b"))
    assert alternating(turns("a", "b")[::-1]) == ()
    assert alternating([*turns("a", "b"), *turns("c")]) == tuple(turns("a", "b"))


def test_a_local_data_set_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    jsonl(folder / "train.jsonl", {"text": "one"}, {"text": "two"})
    jsonl(folder / "test.jsonl", {"text": "three"})
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert sorted(document.text for document in documents(str(folder))) == ["one", "three", "two"]


def test_an_unknown_data_set_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"--data no/such: .*data set that loads"):
        documents("no/such")


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.")
    (tmp_path / "c.md").write_text("Not this.")
    assert read_text(str(tmp_path), "essays") == "First.\n\nSecond."
    assert read_text(str(tmp_path / "b.txt"), "essays") == "Second."


@pytest.mark.parametrize("what", ["missing", "empty folder", "blank"])
def test_unusable_texts_name_the_flag(tmp_path: Path, what: str) -> None:
    path = tmp_path / "t"
    if what == "empty folder":
        path.mkdir()
    elif what == "blank":
        path.write_text(" \n")
    with pytest.raises(UsageError, match="--essays"):
        read_text(str(path), "essays")
