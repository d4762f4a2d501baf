"""A table gives the same samples in every file format."""

import math
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvp.data.rows.documents import read_documents
from kvp.data.rows.forms import document_of
from kvp.data.rows.values import plain_row
from kvp.data.task import TaskSettings


def read(data):
    return read_documents(str(data), "data", TaskSettings(length=99))[0]


WRITERS = {
    "a.jsonl": lambda table, path: table.to_json(path, orient="records", lines=True),
    "records.json": lambda table, path: table.to_json(path, orient="records"),
    "a.parquet": lambda table, path: table.to_parquet(path),
}

NUMBERS = st.integers(-(2**40), 2**40) | st.sampled_from([0.5, 3.0, 2.25, -1.5])
WORDS = st.text("ab ,'\"é日\n", min_size=1).filter(str.strip)
CELLS = {
    "answer": st.one_of(
        st.lists(NUMBERS | st.none(), min_size=3, max_size=3),
        st.lists(WORDS, min_size=3, max_size=3),
        st.lists(st.lists(WORDS, min_size=1, max_size=3), min_size=3, max_size=3),
    ),
    "max_new_tokens": st.lists(st.integers(1, 999) | st.none(), min_size=3, max_size=3),
    "task": st.lists(st.integers(1, 9) | st.none(), min_size=3, max_size=3),
}


@settings(max_examples=15)
@given(cells=st.fixed_dictionaries(CELLS))
def test_the_same_table_gives_the_same_samples(cells):
    given = {"context": ["One.\n", "Two.\n", "Three.\n"], "question": ["q1", "q2", "q3"], **cells}
    expected = [
        document_of(plain_row({name: column[row] for name, column in given.items()}))
        for row in range(3)
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, write in WRITERS.items():
            write(pd.DataFrame(given), path := Path(folder, name))
            found = [(one.questions, one.split) for one in read(path)]
            assert found == [(one.questions, one.split) for one in expected], name


@pytest.mark.parametrize("name", WRITERS)
def test_messages_and_trees_of_a_table(tmp_path, name):
    said = [{"role": "user", "content": "it's"}, {"role": "assistant", "content": "b"}]
    WRITERS[name](pd.DataFrame({"messages": [said, said]}), tmp_path / name)
    assert read(tmp_path / name)[0].turns == tuple(said)
    tree = pd.DataFrame(
        {"message_id": [1, 2], "parent_id": [None, 1], "role": ["prompter", "assistant"],
         "message_tree_id": ["t", "t"],
         "text": ["a", "b"], "rank": [None, 0]}
    )  # fmt: skip
    WRITERS[name](tree, tmp_path / f"tree.{name}")
    assert [turn["content"] for turn in read(tmp_path / f"tree.{name}")[0].turns] == ["a", "b"]


@pytest.mark.parametrize(
    ("cell", "plain"),
    [
        (42.0, 42), (2.5, 2.5), (1e300, 1e300), (math.nan, None), ("", None), ("None", "None"),
        ([1.0, {"a": (2.0,)}], [1, {"a": [2]}]), ("42.0", "42.0"),
    ],
)  # fmt: skip
def test_cells_become_plain_values(cell, plain):
    found = plain_row({"a": cell})["a"]
    assert (found, type(found)) == (plain, type(plain))


def test_messages_in_the_schema_of_openai_are_read():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "User", "name": "ann", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]},
        {"role": "tool", "content": "d"},
    ]
    assert [one["content"] for one in document_of({"messages": messages}).turns] == ["a", "b"]


def test_numbers_keep_their_digits_and_zero_is_a_text():
    assert plain_row({"a": 2**70 + 1})["a"] == 2**70 + 1
    row = {"question": "q", "answer": "a", "max_new_tokens": 8.0}
    assert document_of(plain_row(row)).questions[0].max_new_tokens == 8
    turns = [{"role": "user", "content": 0}, {"from": "gpt", "role": None, "value": 0.0}]
    document = document_of(plain_row({"messages": turns}))
    assert [turn["content"] for turn in document.turns] == ["0", "0"]
