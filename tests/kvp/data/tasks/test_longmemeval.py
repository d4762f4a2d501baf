"""LongMemEval: questions about dated chats, of rows in the published form."""

import json
from dataclasses import replace

import pytest

from kvp.data.encode import encode
from kvp.data.task import TaskSettings
from kvp.data.tasks import TASKS
from kvp.errors import UsageError

SETTINGS = TaskSettings(split="test", count=9, seed=0, length=4000)
TASK = TASKS["longmemeval"]


def _build(tokenizer, **changes):
    return TASK.build(replace(SETTINGS, **changes), tokenizer)


def test_settings_that_cannot_work(tokenizer):
    with pytest.raises(UsageError, match="--tasks longmemeval needs --data FILE, FOLDER or"):
        _build(tokenizer)
    with pytest.raises(UsageError, match="--metric choice: longmemeval has all, part"):
        _build(tokenizer, metric="choice")


def _row(**columns):
    sessions = [
        [{"role": "user", "content": f" I say {n}. "}, {"role": "assistant", "content": "Yes.",
                                                       "has_answer": True}]
        for n in range(3)
    ]  # fmt: skip
    return {
        "question_id": "q0", "question_type": "temporal-reasoning", "question": "When?",
        "answer": 7, "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_dates": ["2023/05/02 (Tue) 10:00", "2023/05/01 (Mon) 10:00",
                           "2023/05/03 (Wed) 10:00"],
        "haystack_session_ids": ["s0", "s1", "s2"], "answer_session_ids": ["s0"],
        "haystack_sessions": sessions, **columns,
    }  # fmt: skip


def _write(path, *rows):
    path.write_text(json.dumps(rows))
    return str(path)


def test_the_published_prompt(tokenizer, tmp_path):
    data = _write(tmp_path / "longmemeval_s.json", _row())
    (sample,) = _build(tokenizer, data=data, split="all")
    sessions = [
        f"\n### Session {place}:\nSession Date: {date}\nSession Content:\n\n\nuser: I say {n}.\n\n"
        "assistant: Yes.\n"
        for place, n, date in (
            (1, 1, "2023/05/01 (Mon) 10:00"),
            (2, 0, "2023/05/02 (Tue) 10:00"),
            (3, 2, "2023/05/03 (Wed) 10:00"),
        )
    ]
    assert sample.context + sample.question == (
        "I will give you several history chats between you and a user. Please answer the question "
        "based on the relevant chat history.\n\n\nHistory Chats:\n\n" + "".join(sessions) + "\n\n"
        "Current Date: 2023/06/01 (Thu) 10:00\nQuestion: When?\nAnswer:"
    )
    assert (sample.references, sample.max_new_tokens) == (("7",), 500)
    assert sample.labels == {"question_type": "temporal-reasoning"}
    assert TASK.score(sample, "After 7 days") == 1
    (sample,) = _build(tokenizer, data=data, split="all", metric="f1")
    assert TASK.score(sample, "7 days") == pytest.approx(2 / 3)


def test_a_long_history_loses_its_end(tokenizer, tmp_path):
    whole = _build(tokenizer, data=_write(tmp_path / "a.json", _row()), split="all")[0]
    length = encode(whole, tokenizer).prompt_length
    (sample,) = _build(tokenizer, data=str(tmp_path / "a.json"), split="all", length=length - 20)
    assert encode(sample, tokenizer).prompt_length <= length - 20
    assert whole.context.startswith(sample.context)
    assert sample.question == whole.question
    source = _build(
        tokenizer,
        data=_write(tmp_path / "b.json", _row(), _row(answer_session_ids=["s2"])),
        split="all",
        length=length - 20,
    )
    assert len(source) == 1
    assert "row 2 loses a session that answers its question" in source.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question_id": "q_abs"}, "asks for a refusal, which only a judge can score"),
        ({"question_type": "single-session-preference"}, "has a rubric instead of an answer"),
        ({"haystack_sessions": []}, "has no haystack_sessions"),
        ({"haystack_dates": ["x"]}, "has not as many haystack_dates as haystack_sessions"),
        ({"haystack_sessions": [[], [], [{"role": 1}]]}, "has cells of another form"),
        ({"answer": None}, "has no answer"),
    ],
)
def test_bad_rows_are_skipped_and_counted(tokenizer, tmp_path, change, message):
    data = _write(tmp_path / "rows.json", _row(), _row(**change))
    source = _build(tokenizer, data=data, split="all")
    assert len(source) == 1
    assert f"skipped 1 of 2 rows: row 2 {message}" in source.notes[0]
    alone = _write(tmp_path / "one.json", _row(**change))
    with pytest.raises(UsageError, match="none of its 1 rows can be used for longmemeval: row 1"):
        _build(tokenizer, data=alone, split="all")
