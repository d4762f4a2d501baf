"""RULER's qa_1 and qa_2: template, filling, splits and metric."""

import json
import re

import pytest

from kvp.data.encode import encode
from kvp.data.sources import data_identity, plan_collection
from kvp.data.splits import SPLITS, split_of
from kvp.data.task import TaskSettings
from kvp.data.tasks import build_samples, find_task
from kvp.data.tasks.ruler_qa import read_questions
from kvp.errors import UsageError

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)


def write_squad(folder, articles=30, paragraphs=4):
    data = [
        {
            "title": f"Article {a}",
            "paragraphs": [
                {
                    "context": f"Text {a}.{p} says that the colour of house {a}.{p} is c{a}x{p}.",
                    "qas": [{"question": f"What colour has house {a}.{p}?", "is_impossible": False,
                             "answers": [{"text": f"c{a}x{p}"}, {"text": f"the c{a}x{p}"}]}],
                }
                for p in range(paragraphs)
            ],
        }
        for a in range(articles)
    ]  # fmt: skip
    return write_json(folder / "squad.json", {"version": "v2.0", "data": data})


def write_hotpotqa(folder, questions=60):
    rows = [
        {
            "question": f"Who is {n}?", "answer": "yes",
            "supporting_facts": [[f"T{n}", 0], [f"U{n}", 0]],
            "context": [[name, [f"First of {name}.", " Second."]] for name in (
                *(f"{letter}{n}" for letter in "TUABC"), f"T{(n + 1) % questions}")],
        }
        for n in range(questions)
    ]  # fmt: skip
    return write_json(folder / "hotpot.json", rows)


def settings(**changes):
    base = {"split": "test", "count": 4, "seed": 0, "length": 1500}
    return TaskSettings(**(base | changes))


def documents(sample):
    head = f"{INSTRUCTION}\n\nThe following are given documents.\n\n"
    assert sample.context.startswith(head)
    assert sample.context.endswith("\n\n")
    texts = sample.context[len(head) : -2].split("\n\n")
    for number, text in enumerate(texts, start=1):
        assert text.startswith(f"Document {number}:\n")
    return [text.partition("\n")[2] for text in texts]


def test_the_prompt_is_rulers_to_the_letter(tmp_path, tokenizer):
    given = settings(squad=write_squad(tmp_path), split="all")
    sample = build_samples("qa_1", given, tokenizer)[0]
    house = re.fullmatch(
        rf"{re.escape(INSTRUCTION)}\n\nQuestion: What colour has house (\d+)\.(\d+)\?",
        sample.question,
    )
    a, p = house.groups()
    assert sample.answer_prefix == " Answer:"
    assert sample.references == (f"c{a}x{p}", f"the c{a}x{p}")
    assert (sample.reply, sample.metric, sample.max_new_tokens) == (f" c{a}x{p}", "part", 32)
    shown = documents(sample)
    assert shown.count(f"Text {a}.{p} says that the colour of house {a}.{p} is c{a}x{p}.") == 1
    assert sum(text.startswith(f"Text {a}.") for text in shown) == 4  # its article comes first
    assert len(set(shown)) == len(shown)
    assert 1500 - 90 < encode(sample, tokenizer).prompt_length <= 1500
    task = find_task("qa_1")
    assert task.score(sample, f"It is THE C{a}X{p}, I think") == 1
    assert task.score(sample, "red") == 0


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_splits_share_no_answering_document(tmp_path, tokenizer, task):
    files = {"squad": write_squad(tmp_path), "hotpotqa": write_hotpotqa(tmp_path)}
    questions = {}
    shown = {}
    for split in SPLITS:
        samples = build_samples(task, settings(split=split, count=200, **files), tokenizer)
        questions[split] = {sample.question for sample in samples}
        shown[split] = {text for sample in samples for text in documents(sample)}
        again = build_samples(task, settings(split=split, count=2, **files), tokenizer)
        assert list(again) == list(samples)[: len(again)]
    assert all(questions.values())
    assert len(set.union(*questions.values())) == sum(map(len, questions.values()))
    for split in SPLITS:
        for other in set(SPLITS) - {split}:
            for question in questions[other]:
                name = question.rpartition(" ")[2].rstrip("?")
                gold = {text for text in shown[split] if _answers(text, name)}
                assert not gold, f"{split} shows what answers a question of {other}"


def _answers(text, name):
    return text.startswith((f"Text {name} ", f"T{name}\n", f"U{name}\n"))


def test_documents_are_repeated_where_there_are_too_few(tmp_path, tokenizer):
    given = settings(squad=write_squad(tmp_path, articles=1), split="all", length=3000)
    sample = build_samples("qa_1", given, tokenizer)[0]
    shown = documents(sample)
    own = [text for text in shown if sample.references[0] in text]
    assert len(own) == 1
    assert len(shown) > 20
    assert len(set(shown)) == 4
    alone = settings(squad=write_squad(tmp_path, articles=1, paragraphs=1), split="all")
    (only,) = build_samples("qa_1", alone, tokenizer)
    assert len(documents(only)) == 1


def test_what_does_not_fit_is_left_out_and_counted(tmp_path, tokenizer, jsonl):
    rows = [{"context": "long " * size, "question": f"q{size}", "answer": "a"} for size in (5, 300)]
    path = jsonl(tmp_path / "s.jsonl", *rows)
    given = settings(squad=path, split="all", length=600)
    source = build_samples("qa_1", given, tokenizer)
    assert len(source) == 1
    notes = getattr(source, "notes", ())
    assert notes == (
        f"--squad {path}: all split: left out 1 of its questions, whose own documents are longer "
        "than --length 600",
    )
    with pytest.raises(UsageError, match="--length 100: the smallest qa_1 prompt already has"):
        build_samples("qa_1", settings(squad=path, split="all", length=100), tokenizer)


def test_missing_files_are_named_by_their_flags(tmp_path, tokenizer):
    with pytest.raises(UsageError, match="--tasks qa_2 needs --hotpotqa FILE"):
        build_samples("qa_2", settings(), tokenizer)
    path = write_json(tmp_path / "s.json", [{"context": "c", "question": "q", "answer": "a"}])
    other = "test" if split_of("c") == "train" else "train"
    with pytest.raises(UsageError, match=f": no question of the {other} split"):
        build_samples("qa_1", settings(squad=path, split=other), tokenizer)


def test_ruler_has_questions_where_their_files_are_given(tmp_path, tokenizer):
    files = {"squad": write_squad(tmp_path), "hotpotqa": write_hotpotqa(tmp_path)}
    request = TaskSettings(data="ruler", tasks=("ruler",), length=3000, seed=0, **files)
    plan = plan_collection(request, {"train": 13}, tokenizer)
    assert {"qa_1", "qa_2", "vt"} <= set(plan.tasks)
    assert "squad" in data_identity(request, plan.tasks)
    without = TaskSettings(data="ruler", tasks=("ruler",), length=3000, seed=0)
    assert set(plan.tasks) - set(plan_collection(without, {"train": 1}, tokenizer).tasks) == {
        "qa_1", "qa_2",
    }  # fmt: skip
    assert set(data_identity(without, ())) == {"name", "digest", "tasks", "length", "essays"}


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def test_the_published_file_of_squad_is_read(tmp_path):
    answers = [{"text": text, "answer_start": 0} for text in ("Aare", "The Aare", "Aare")]
    asked = [
        {"question": "What is long? ", "answers": answers, "is_impossible": False},
        {"question": "Why?", "answers": answers, "is_impossible": True},
    ]
    paragraphs = [{"context": "The Aare is long.", "qas": asked},
                  {"context": "Nothing is asked here.", "qas": []}]  # fmt: skip
    content = {"version": "v2.0", "data": [{"title": "Rivers", "paragraphs": paragraphs}]}
    read = read_questions(write_json(tmp_path / "dev.json", content), "squad")
    (question,) = read.questions
    assert (question.text, question.answers) == ("What is long?", ("Aare", "The Aare"))
    assert question.documents == question.answering == ("The Aare is long.",)
    assert question.article == "Rivers"
    assert read.documents == dict.fromkeys(
        ["Nothing is asked here.", *question.documents], "Rivers"
    )
    assert list(read.owners) == ["The Aare is long."]


def test_rows_of_squad_from_the_hub_and_plain_rows_are_read(tmp_path, jsonl):
    rows = [
        {"context": "c1", "question": "q1", "title": "t", "answers": {"text": ["a", "b"]}},
        {"context": "c2", "question": "q2", "answers": {"text": []}},
        {"context": "c3", "question": "q3", "answer": "a"},
        {"context": "c4", "question": "q4", "answers": ["a", "a"]},
    ]
    read = read_questions(jsonl(tmp_path / "s.jsonl", *rows), "squad")
    assert [(one.text, one.answers) for one in read.questions] == [
        ("q1", ("a", "b")), ("q3", ("a",)), ("q4", ("a",)),
    ]  # fmt: skip
    assert list(read.documents) == ["c1", "c2", "c3", "c4"]
    assert not read.tally.notes("x")


OFFICIAL = {
    "_id": "1", "question": "Who?", "answer": "Ada",
    "supporting_facts": [["A", 0], ["B", 1]],
    "context": [["A", ["Ada was", " born."]], ["B", ["Be."]], ["C", ["Sea."]]],
}  # fmt: skip
OF_THE_HUB = {
    "id": "1", "question": "Who?", "answer": "Ada",
    "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]},
    "context": {"title": ["A", "B", "C"], "sentences": [["Ada was", " born."], ["Be."], ["Sea."]]},
}  # fmt: skip


@pytest.mark.parametrize("row", [OFFICIAL, OF_THE_HUB])
def test_both_forms_of_hotpotqa_are_read(tmp_path, row):
    (question,) = read_questions(write_json(tmp_path / "h.json", [row]), "hotpotqa").questions
    assert question.documents == ("A\nAda was born.", "B\nBe.", "C\nSea.")
    assert question.answering == ("A\nAda was born.", "B\nBe.")
    assert question.answers == ("Ada",)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"context": "c"}, "has neither 'paragraphs' nor 'context' and 'question'"),
        ({"context": "c", "question": "", "answer": "a"}, "has no text in question"),
        ({"paragraphs": [3]}, "has cells of another form (AttributeError"),
    ],
)
def test_bad_rows_of_squad_are_counted(tmp_path, row, reason, one_line, jsonl):
    good = {"context": "c", "question": "q", "answer": "a"}
    read = read_questions(jsonl(tmp_path / "s.jsonl", good, row, good), "squad")
    assert len(read.questions) == 2
    assert read.tally.notes("x")[0].startswith(f"x: skipped 1 of 3 rows: line 2 {reason}")
    with one_line(UsageError, "none of its 1 rows has a question with an answer: line 1 has"):
        read_questions(jsonl(tmp_path / "t.jsonl", row), "squad")


def test_questions_that_share_a_document_are_of_one_split(tmp_path):
    """Question n shares a document with question n + 1 in every block of three."""
    rows = []
    for number in range(120):
        block, place = divmod(number, 3)
        titles = [f"{block}-{place}", f"{block}-{place + 1}", f"far {number % 7}"]
        rows.append(
            {
                "question": f"q{number}", "answer": "a",
                "supporting_facts": [[title, 0] for title in titles[:2]],
                "context": [[title, [f"about {title}"]] for title in titles],
            }
        )  # fmt: skip
    read = read_questions(write_json(tmp_path / "h.json", rows), "hotpotqa")
    blocks = [{int(one.text[1:]) // 3 for one in read.of_split(split)} for split in SPLITS]
    assert all(blocks)
    assert sum(map(len, blocks)) == 40
    assert len(read.of_split("all")) == 120
    assert all(read.may_show("far 1\nabout far 1", split) for split in (*SPLITS, "all"))
    first = read.questions[0].answering[0]
    assert [read.may_show(first, split) for split in SPLITS].count(True) == 1
