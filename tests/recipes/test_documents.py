"""Documents with questions: exact answers, the same for the same files, no text added."""

import json

import pytest

from kvp.data.rows.forms import questions_of
from recipes.real_models import lookups
from recipes.real_models.documents import QUESTIONS, main

PROSE = "Then Walter saw the Maid of Westing near the 14 ships and said nothing to her.\n" * 400
DIALOGUE = [
    {"role": "user", "content": "I need a table at Casa Roja for 3 people."},
    {"role": "assistant", "content": "It is booked for 19:30 on March 4th."},
]


@pytest.fixture
def sources(tmp_path, jsonl):
    (tmp_path / "novels_train").mkdir()
    (tmp_path / "novels_train/one.txt").write_text(PROSE, encoding="utf-8")
    rows = {
        "wiki_train": {"text": PROSE},
        "sgd": {"messages": DIALOGUE},
        "gsm8k": {"question": "Ann has 3 pens. How many?", "answer": "She has 3.\n#### 3"},
    }
    for name, row in rows.items():
        jsonl(tmp_path / f"{name}.jsonl", row)
    return tmp_path


@pytest.mark.parametrize("files", [True, False])
def test_answers_stand_in_the_document(sources, files):
    out = sources / "out.jsonl"
    texts = sources if files else None
    main(out, texts)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 400
    inexact = 0
    for row in rows:
        messages = [*row["prompt"], {"role": "assistant", "content": row["answer"]}]
        assert [turn["role"] for turn in messages] == ["user", "assistant"] * QUESTIONS
        document = messages[0]["content"]
        inexact += any(turn["content"] not in document for turn in messages[1::2])
    assert len(rows) / 12 < inexact < len(rows) / 4  # rules, and labels that no example has
    again = sources / "again.jsonl"
    main(again, texts)
    assert again.read_bytes() == out.read_bytes()


def test_answers_of_lookups_stand_in_the_context(sources):
    (sources / "novels_test").mkdir()
    (sources / "novels_test/other.txt").write_text(PROSE, encoding="utf-8")
    out = sources / "lookups.jsonl"
    lookups.main(out, sources)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6 * lookups.CONTEXTS
    for row in rows:
        context = " ".join(row["context"].split())
        questions = questions_of(row)  # as `kvp eval --tasks data` takes them
        assert len(questions) == lookups.ASKED
        assert all(" ".join(asked.references[0].split()) in context for asked in questions)
