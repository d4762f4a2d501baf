"""Metrics of LongBench and SCBench, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvp.data.benchmark_metrics import (
    METRICS,
    classification,
    score_sample,
)
from kvp.data.task import TaskSettings, blank_sample

TABLE = [
    ("contains", "it is Ab-1.", ["Ab-1"], 1),
    ("contains", "it is ab-1.", ["Ab-1"], 0),
    ("contains", "second", ["first", "second"], 1),
    ("share_of_numbers", "Paragraph 7", ["Paragraph 7"], 1),
    ("share_of_numbers", "7 or 8 or 17", ["Paragraph 7"], 1 / 3),
    ("share_of_numbers", "段落12", ["段落12"], 1),
    ("share_of_numbers", "none", ["5"], 0),
    ("share_of_numbers", "5", ["five"], 0),
    ("first_number", " 12.9, then 3", ["12"], 1),
    ("first_number", "12.9", ["12.9"], 1),
    ("first_number", "-3", ["4"], 0),
    ("first_number", "none", ["4"], 0),
    ("choice_letter", "B. because A", ["B"], 1),
    ("choice_letter", "Because", ["B"], 1),
    ("choice_letter", "the answer is: C", ["C"], 1),
    ("choice_letter", "the answer is\nC", ["C"], 1),
    ("choice_letter", "the answer is C", ["D"], 0),
    ("choice_letter", "I say C, not D", ["C"], 1),
    ("choice_letter", "the river", ["A", "the river"], 1),
    ("choice_letter", "", ["A"], 0),
    ("character_f1", "天 地。", ["天地"], 1),
    ("character_f1", "天地人", ["天"], 0.5),
    ("character_f1", "人", ["天"], 0),
    ("character_f1", "!", ["天"], 0),
    ("rouge_recall", "the cat sat", ["the cat sat down there"], 0.6),
    ("rouge_l_sum", "a b c d", ["a b x d"], 0.75),
    ("rouge_l_sum", "one two\nthree four", ["three four\none two"], 1),
]


@pytest.mark.parametrize(("metric", "prediction", "references", "score"), TABLE)
def test_scores(metric: str, prediction: str, references: list[str], score: float) -> None:
    assert METRICS[metric](prediction, references) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Type: Other entity", 1),  # `entity` is part of its name
        ("Date or Other entity", 0.5),
        ("entity", 0),
        ("", 0),
    ],
)
def test_classes_are_counted(prediction: str, score: float) -> None:
    classes = ["Date", "entity", "Other entity"]
    assert classification(prediction, ["Other entity"], classes) == score
    blank = blank_sample(TaskSettings(split="test", count=1, seed=0, length=9), "t", "0")
    sample = replace(
        blank, metric="classification", classes=tuple(classes), references=("Other entity",)
    )
    assert score_sample(sample, prediction) == score
    with pytest.raises(ValueError, match="has no reference"):
        score_sample(replace(sample, references=()), prediction)
