"""The same table, whoever wrote it, gives the same samples."""

import json
import math
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvp.data.rows.documents import read_documents
from kvp.data.rows.forms import document_of
from kvp.data.rows.values import RowError, plain_row
from kvp.data.task import TaskSettings


def read(data, **changes):
    return read_documents(str(data), "data", TaskSettings(length=99, **changes))[0]


def skipped(path, *rows):
    """Why the last row of a file is skipped."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in ({"text": "x"}, *rows)]
    path.write_text("\n".join(lines))
    tally = read_documents(str(path), "data", TaskSettings(length=99))[1]
    return f"{path.name} {': '.join(tally.skipped[-1])}"


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


@settings(max_examples=15, deadline=None)
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
def test_truth_values_of_a_table_are_no_answers(tmp_path, name):
    WRITERS[name](pd.DataFrame({"question": ["a", "b"], "answer": [True, None]}), tmp_path / name)
    documents, tally = read_documents(str(tmp_path / name), "data", TaskSettings(length=99))
    assert [one.questions[0].question for one in documents] == ["b"]
    assert "has a value that is not text in answer" in tally.skipped[0][1]


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
def test_cells(cell, plain):
    found = plain_row({"a": cell})["a"]
    assert (found, type(found)) == (plain, type(plain))


@pytest.mark.parametrize("number", [math.inf, -math.inf, [math.inf]])
def test_a_number_that_is_not_finite_is_refused(number):
    with pytest.raises(RowError, match="has a number that is not finite"):
        plain_row({"a": number})


BOUNDS = [-3, 0, 1e9, 10**400, "8", True, [8], 8.5]


def test_a_number_out_of_bounds_is_named(tmp_path):
    row = {"question": "q", "answer": "a"}
    for value in BOUNDS:
        said = skipped(tmp_path / "a.jsonl", {**row, "max_new_tokens": value})
        assert said.startswith("a.jsonl line 2: has max_new_tokens ")
        assert said.endswith("which is not a whole number from 1 to 1048576")
        assert len(said) < 140
    for value in (8, 8.0):
        document = document_of(plain_row({**row, "max_new_tokens": value}))
        assert document.questions[0].max_new_tokens == 8


def test_the_schema_of_openai():
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
    turns = [{"role": "user", "content": 0}, {"from": "gpt", "role": None, "value": 0.0}]
    document = document_of(plain_row({"messages": turns}))
    assert [turn["content"] for turn in document.turns] == ["0", "0"]
