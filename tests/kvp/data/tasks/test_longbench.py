"""LongBench's tasks: published prompts and metrics on rows in the published form."""

from dataclasses import replace

import pytest

from kvp.data.encode import encode
from kvp.data.task import TaskSettings
from kvp.data.tasks import TASKS, expand_tasks
from kvp.data.tasks.longbench import DATA_SETS
from kvp.errors import UsageError

SETTINGS = TaskSettings(split="all", count=10, seed=0, length=4000)


def _row(dataset, **columns):
    return {
        "input": "Who was it?", "context": "It was Ada. ", "answers": ["Ada", "Lovelace"],
        "length": 3, "dataset": dataset, "language": "en", "all_classes": None, "_id": "0",
        **columns,
    }  # fmt: skip


def _build(tokenizer, path, dataset="hotpotqa", **changes):
    settings = replace(SETTINGS, data=str(path), **changes)
    return TASKS[f"longbench_{dataset}"].build(settings, tokenizer)


def test_every_data_set_has_its_prompt_and_metric(tokenizer, tmp_path, jsonl):
    assert len(DATA_SETS) == 18
    for name, of in DATA_SETS.items():
        answers = {"share_of_numbers": ["Paragraph 3"], "code": ["x = 1"]}.get(of.metric, ["Ada"])
        row = _row(name, answers=answers, all_classes=["Ada", "Bob"])
        path = jsonl(tmp_path / f"{name}.jsonl", row)
        (sample,) = _build(tokenizer, path, name)
        text = of.prompt.replace("{context}", "It was Ada. ").replace("{input}", "Who was it?")
        assert sample.context + sample.question == text
        assert sample.context.endswith("It was Ada. ")
        assert sample.max_new_tokens == of.new_tokens
        task = TASKS[sample.task]
        assert task.score(sample, answers[0]) == pytest.approx(1)
        assert task.score(sample, "?!") == 0


def test_some_prompts_get_no_chat_template(tokenizer, tmp_path, jsonl):
    plain = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    for name in ("trec", "lcc", "hotpotqa"):
        path = jsonl(tmp_path / f"{name}.jsonl", _row(name, all_classes=["Ada"]))
        text = tokenizer.decode(encode(_build(tokenizer, path, name)[0], tokenizer).ids)
        assert ("<|start|>" in text) == (name not in plain)
    assert {name for name, of in DATA_SETS.items() if of.few_shot or of.plain} == plain


@pytest.mark.parametrize(("name", "score"), [("triviaqa", 1), ("hotpotqa", 0.5)])
def test_few_shot_answers_are_scored_by_their_first_line(tokenizer, tmp_path, jsonl, name, score):
    (sample,) = _build(tokenizer, jsonl(tmp_path / f"{name}.jsonl", _row(name)), name)
    assert TASKS[sample.task].score(sample, "\nLovelace\nb c") == pytest.approx(score)


def test_a_long_prompt_loses_its_middle(tokenizer, tmp_path, jsonl):
    context = "".join(f"<{n}>" for n in range(2000))
    path = jsonl(tmp_path / "hotpotqa.jsonl", _row("hotpotqa", context=context))
    (sample,) = _build(tokenizer, path, length=1000)
    encoded = encode(sample, tokenizer)
    assert 998 <= encoded.prompt_length <= 1000
    text = sample.context + sample.question
    assert text.startswith("Answer the question based on the given passages. Only give me")
    assert sample.question.endswith("Question: Who was it?\nAnswer:")
    # one token per byte: as many of the first as of the last ones, the template left out
    whole = DATA_SETS["hotpotqa"].prompt.replace("{context}", context)
    whole = whole.replace("{input}", "Who was it?")
    half = len(text) // 2
    assert text == whole[:half] + whole[-half:]


def test_rows_come_from_a_folder_or_from_one_file_of_all_data_sets(tokenizer, tmp_path, jsonl):
    folder = tmp_path / "data"
    folder.mkdir()
    jsonl(folder / "hotpotqa.jsonl", _row("hotpotqa"), _row("hotpotqa", input="Why?"))
    jsonl(folder / "hotpotqa_e.jsonl", _row("hotpotqa", input="When?"))
    jsonl(folder / "musique.jsonl", _row("musique"))
    assert len(_build(tokenizer, folder)) == 2  # LongBench-E is another benchmark
    assert len(_build(tokenizer, folder / "hotpotqa_e.jsonl")) == 1
    mixed = jsonl(tmp_path / "all.jsonl", _row("hotpotqa"), _row("musique"))
    assert len(_build(tokenizer, mixed)) == 1
    nameless = {key: value for key, value in _row("x").items() if key != "dataset"}
    assert len(_build(tokenizer, jsonl(tmp_path / "musique.jsonl", nameless), "musique")) == 1
    with pytest.raises(UsageError, match="it has nothing for longbench_hotpotqa: neither a file"):
        _build(tokenizer, tmp_path / "musique.jsonl")
    assert set(expand_tasks(["longbench"])) == {f"longbench_{name}" for name in DATA_SETS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": None}, "has no text in context"),
        ({"answers": []}, "has no answers"),
        ({"input": "q" * 4000}, "has a question that half of --length 4000 is too short for"),
    ],
)
def test_bad_rows_are_skipped_and_counted(tokenizer, tmp_path, change, message, jsonl):
    path = jsonl(tmp_path / "hotpotqa.jsonl", _row("hotpotqa"), _row("hotpotqa", **change))
    source = _build(tokenizer, path)
    assert len(source) == 1
    assert f"longbench_hotpotqa: skipped 1 of 2 rows: line 2 {message}" in source.notes[0]


def test_what_cannot_be_scored_is_refused(tokenizer, tmp_path, jsonl):
    path = jsonl(tmp_path / "trec.jsonl", _row("trec"))
    with pytest.raises(UsageError, match=r"none of its 1 rows can be used .* has no all_classes"):
        _build(tokenizer, path, "trec")
    with pytest.raises(UsageError, match="--tasks longbench_trec needs --data FILE"):
        TASKS["longbench_trec"].build(SETTINGS, tokenizer)
