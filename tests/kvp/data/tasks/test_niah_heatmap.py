"""Needles at every depth of every length."""

from dataclasses import replace

import pytest

from kvp.data.encode import encode
from kvp.data.task import TaskSettings
from kvp.data.tasks import TASKS
from kvp.data.tasks.niah_heatmap import NiahHeatmapTask, insert_needle
from kvp.errors import UsageError

SETTINGS = TaskSettings(
    split="test", count=12, seed=0, length=900, depths=(0, 50, 100), lengths=(600, 900)
)


def _build(tokenizer, **changes):
    return TASKS["niah_heatmap"].build(replace(SETTINGS, **changes), tokenizer)


def _needle_at(sample):
    """Characters before the needle's answer and in the whole context."""
    return sample.context.index(sample.references[0]), len(sample.context)


@pytest.mark.parametrize(
    ("depth", "text"),
    [
        (0, "N. One two. Three four five. Six"),
        (40, "One two. N. Three four five. Six"),
        (60, "One two. N. Three four five. Six"),
        (90, "One two. Three four five. N. Six"),
        (100, "One two. Three four five. Six N."),
    ],
)
def test_a_needle_is_pushed_back_to_the_end_of_a_sentence(depth, text):
    assert insert_needle(["One", "two.", "Three", "four", "five.", "Six"], "N.", depth) == text


def test_samples_go_through_the_grid_cell_by_cell(tokenizer):
    source = _build(tokenizer)
    cells = [(sample.labels["depth"], sample.labels["prompt_length"]) for sample in source]
    wanted = [(depth, length) for length in (600, 900) for depth in (0, 50, 100)]
    assert cells == wanted * 2
    assert len({sample.references for sample in source}) == 12
    for sample in source:
        length = sample.labels["prompt_length"]
        assert length - 60 < encode(sample, tokenizer).prompt_length <= length
        before, whole = _needle_at(sample)
        share = {0.0: (0, 0.5), 50.0: (0.15, 0.75), 100.0: (0.6, 1)}[float(sample.labels["depth"])]
        assert share[0] <= before / whole <= share[1]
        assert sample.context.count(sample.references[0]) == 1


@pytest.mark.parametrize("name", ["niah_heatmap", "niah_single_2"])
def test_a_folder_of_essays_says_what_is_left_out(tmp_path, tokenizer, name):
    for file in ("a.TXT", "c.csv", "d.jsonl"):
        (tmp_path / file).write_text("One two. " * 300)
    source = TASKS[name].build(replace(SETTINGS, essays=str(tmp_path), count=3), tokenizer)
    assert source.notes == (f"--essays {tmp_path}: files that were not read (2): d.jsonl, c.csv",)
    assert "One two." in source[2].context
    (tmp_path / "a.TXT").unlink()
    for essays, message in ((str(tmp_path), "--essays .*: cannot be read as"), ("", "is empty")):
        with pytest.raises(UsageError, match=message):
            _build(tokenizer, essays=essays)


def test_needles_belong_to_the_split(tokenizer):
    for split in ("train", "validation"):
        found = {sample.question for sample in _build(tokenizer, split=split)}
        assert not found & {sample.question for sample in _build(tokenizer)}


def test_the_grid_has_a_default(tokenizer):
    source = _build(tokenizer, depths=None, lengths=None, length=2000, count=20)
    assert {sample.labels["prompt_length"] for sample in source} == {500, 1000, 1500, 2000}
    assert {sample.labels["depth"] for sample in source} == {0, 25, 50, 75, 100}


def test_answers_are_scored_by_containment_or_by_recall(tokenizer):
    task = NiahHeatmapTask()
    sample = _build(tokenizer)[0]
    answer = sample.references[0]
    assert task.score(sample, f"Go there and {answer}!") == 1
    assert task.score(sample, answer[: len(answer) // 2]) == 0
    recall = _build(tokenizer, metric="rouge_recall")[0]
    assert 0.2 < task.score(recall, answer[: len(answer) // 2]) < 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (600, 1200)}, "--lengths 1200: more than --length 900"),
        ({"lengths": (600, 30)}, "--lengths 30: the smallest niah_heatmap prompt already has"),
        ({"metric": "f1"}, "--metric f1: niah_heatmap has all or rouge_recall"),
        ({"split": "all"}, "--split all: generated prompts belong to one of"),
    ],
)
def test_settings_that_cannot_work(tokenizer, changes, message):
    with pytest.raises(UsageError, match=message):
        _build(tokenizer, **changes)
