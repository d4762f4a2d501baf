"""SCBench's tasks: several questions of one context, generated or of rows."""

import json
import re
from dataclasses import replace
from statistics import median

import pytest

from kvp.data.encode import encode
from kvp.data.splits import split_of
from kvp.data.task import TaskSettings, context_key
from kvp.data.tasks import TASKS
from kvp.data.tasks.scbench import CONTEXTS, HOPS, TURNS
from kvp.errors import UsageError

SETTINGS = TaskSettings(split="test", count=10, seed=0, length=2000)


def _build(tokenizer, name="scbench_kv", **changes):
    return TASKS[name].build(replace(SETTINGS, **changes), tokenizer)


def _lines(sample):
    return sample.context.split("\n\n")[1].splitlines()


def _is_right(name, sample):
    """Whether the references follow from the context and the question alone."""
    question, (answer, *_) = sample.question, sample.references
    if name == "scbench_kv":
        pairs = json.loads(sample.context[sample.context.index("{") :])
        found = re.search(r'Key: "(.+?)"', question)
        return found is not None and [pairs[found[1]]] == [answer]
    if name == "scbench_hashhop":
        steps = dict(line.split(" = ") for line in _lines(sample))
        (place,) = re.findall(r"Start at (\w+)", question)
        for _ in range(HOPS):
            place = steps[place]
        return bool(place == answer) and answer not in steps
    if name == "scbench_mf":
        numbers = json.loads(sample.context[sample.context.index("[") :])
        ranked = sorted(set(numbers))
        named = re.sub("third ", "2 ", re.sub("second ", "1 ", question))
        place = int((re.findall(r"What is the (\d) ", named) or ["0"])[0])
        value = ranked[-1 - place] if "largest" in named else ranked[place]
        return answer == str(int(median(numbers)) if "median" in named else value)
    classes = dict(re.findall(r"the ([a-z]+)\.\nClass: (\(.\))", sample.context))
    (word,) = re.findall(r"the (\w+)\.\nClass:", question)
    return word not in classes and answer in classes.values()


@pytest.mark.parametrize("name", CONTEXTS)
def test_generated_answers_are_in_the_context(tokenizer, name):
    source = _build(tokenizer, name)
    task = TASKS[name]
    for sample in source:
        assert _is_right(name, sample)
        assert task.score(sample, sample.reply) == 1
        assert task.score(sample, "") == 0
    lengths = [encode(sample, tokenizer).prompt_length for sample in source]
    assert all(max(lengths[n : n + TURNS]) > 1850 for n in (0, TURNS))
    assert max(lengths) <= 2000


@pytest.mark.parametrize("name", CONTEXTS)
def test_questions_of_one_context_share_it(tokenizer, name):
    source = _build(tokenizer, name)
    names = [context_key(sample.id) for sample in source]
    assert names == [names[0]] * TURNS + [names[-1]] * TURNS
    assert len({sample.id for sample in source}) == 10
    assert len(set(names)) == len({sample.context for sample in source}) == 2
    assert len({sample.question for sample in list(source)[:TURNS]}) >= TURNS - 1
    train = _build(tokenizer, name, split="train")
    assert not {sample.context for sample in train} & {sample.context for sample in source}


def test_keys_and_values_belong_to_the_split(tokenizer):
    for name in ("scbench_kv", "scbench_hashhop", "scbench_mf"):
        for sample in _build(tokenizer, name):
            assert split_of(sample.references[0]) == "test"
    with pytest.raises(UsageError, match="--split all: generated prompts belong to one of"):
        _build(tokenizer, split="all")


def _row(number, **turn):
    turns = [{"input": f"What {n}?", "answer": f"a{n}", **turn} for n in range(2)]
    return {"id": number, "context": f"Text {number}. " * 20, "multi_turns": turns}


def test_rows_are_read(tokenizer, tmp_path, jsonl):
    path = jsonl(tmp_path / "scbench_qa_eng.jsonl", _row(0), _row(1))
    source = _build(tokenizer, "scbench_qa_eng", data=path, split="all")
    assert len(source) == 4
    first = source[0]
    assert first.context.startswith("Read the book and answer the question. Be very concise in ")
    assert first.question == "Question: What 0?\nAnswer:"
    assert (first.references, first.max_new_tokens) == (("a0",), 40)
    assert context_key(first.id) == context_key(source[1].id) != context_key(source[2].id)
    of_folder = _build(tokenizer, "scbench_qa_eng", data=str(tmp_path), split="all")
    assert list(of_folder) == list(source)


def test_options_become_letters(tokenizer, tmp_path, jsonl):
    rows = [_row(0, answer="red", options=["blue", "red", "pink", "grey"])]
    path = jsonl(tmp_path / "scbench_choice_eng.jsonl", *rows)
    sample = _build(tokenizer, "scbench_choice_eng", data=path, split="all")[0]
    assert "\nA. blue\nB. red\nC. pink\nD. grey\n" in sample.question
    assert sample.references == ("B", "red")
    assert TASKS["scbench_choice_eng"].score(sample, "B") == 1


BAD = [
    ({"multi_turns": []}, "line 2 has no column 'input'"),
    ({"context": "c", "multi_turns": []}, "line 2 has no multi_turns"),
    ({"context": "c", "multi_turns": [3]}, "line 2 has cells of another form (TypeError"),
    ({"context": "c", "multi_turns": [{"input": "q"}]}, "line 2 has no answer (its turn 1)"),
    (_row(1, input="q" * 5000), "line 2 has a question of more prompt tokens than --length 2000"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_skipped_and_counted(tokenizer, tmp_path, row, message, jsonl):
    path = jsonl(tmp_path / "scbench_kv.jsonl", _row(0), row)
    source = _build(tokenizer, data=path, split="all")
    assert len(source) == 2
    (note,) = source.notes
    assert "skipped 1 of 2 rows" in note
    assert message in note


def test_data_without_usable_rows_are_refused(tokenizer, tmp_path, jsonl):
    path = jsonl(tmp_path / "scbench_mf.jsonl", _row(0))
    with pytest.raises(UsageError, match="has the answer 'a0', which is no number"):
        _build(tokenizer, "scbench_mf", data=path)
    with pytest.raises(UsageError, match="--length 90: the smallest scbench_kv prompt already has"):
        _build(tokenizer, length=90)
