"""Metrics of answers against values worked out by hand and published ones."""

import sys
from decimal import Decimal

import pytest

from kvp.data.metrics import METRICS, last_number, score_answer
from kvp.errors import UsageError


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "score"),
    [
        ("all", "ONE, three", ["one", "two"], 0.5),
        ("all", "  they are AbCde,\x00FGH \n", ["abcde", "fgh", "XYZ", "they"], 0.75),
        ("part", "ONE, three", ["one", "two"], 1.0),
        ("part", "ONE, three", ["two"], 0.0),
        # SQuAD: case, punctuation, articles and white space do not count
        ("exact", " The Eiffel-Tower!\n", ["eiffeltower"], 1.0),
        ("exact", "Eiffel Tower in Paris", ["Eiffel Tower"], 0.0),
        ("exact", "theory", ["ory"], 0.0),  # articles are whole words
        ("f1", "the cat sat", ["a cat"], 2 * (1 / 2) * 1 / (1 / 2 + 1)),
        ("f1", "cat cat dog", ["cat dog dog"], 2 / 3),  # a word counts as often as both have it
        ("f1", "x", ["y"], 0.0),
        ("f1", "...", ["the"], 1.0),  # nothing is left of either
        ("f1", "...", ["cat"], 0.0),
        # Lin 2004, section 3.1: the subsequences have 3 and 2 of 4 words
        ("rouge_l", "police killed the gunman", ["police kill the gunman"], 3 / 4),
        ("rouge_l", "the gunman kill police", ["x", "police kill the gunman"], 2 / 4),
        # Of two sentences the union counts: w1 w2 w3 w5 are 4 of 5 words, 8 are written (Lin 2004)
        ("rouge_l", "w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", ["w1 w2 w3 w4 w5"],
         2 * (4 / 8) * (4 / 5) / (4 / 8 + 4 / 5)),
        # as in LongBench, words are distinct and order is of sentences; `rouge_score`: 2 / 3 each
        ("rouge_l", "the cat sat. the dog sat", ["the dog sat. the cat sat"], 1.0),
        # GSM8K: the last number, or the one behind ####
        ("number", "So 3 + 15 = 18 eggs.", ["It is 9 * 2.\n#### 18"], 1.0),
        ("number", "$1,200.00", ["#### 1,200"], 1.0),
        ("number", "10-5, so 7,5", ["5"], 1.0),
        ("number", "x = -3", ["3"], 0.0),
        # LongBench: the first line of code; 2 insertions in 5 + 7 letters
        ("code", "abcde", ["abcdefg"], 1 - 2 / 12),
        ("code", "# note\n\nx = 1\ny = 2", ["x = 1"], 1.0),
        ("code", "```\n// a\n", ["x = 1"], 0.0),
        # LongBench and SCBench
        ("contains", "it is Ab-1.", ["Ab-1"], 1),
        ("contains", "it is ab-1.", ["Ab-1"], 0),
        ("contains", "second", ["first", "second"], 1),
        ("share_of_numbers", "7 or 8 or 17", ["Paragraph 7"], 1 / 3),
        ("share_of_numbers", "段落12", ["段落12"], 1),
        ("share_of_numbers", "none", ["5"], 0),
        ("first_number", " 12.9, then 3", ["12"], 1),
        ("first_number", 5000 * "9" + ".9", ["5", 5000 * "9" + ".9"], 1),
        ("first_number", "none", ["4"], 0),
        ("choice_letter", "B. because A", ["B"], 1),
        ("choice_letter", "Because", ["B"], 1),
        ("choice_letter", "the answer is\nC", ["C"], 1),
        ("choice_letter", "the answer is C", ["D"], 0),
        ("choice_letter", "I say C, not D", ["C"], 1),
        ("choice_letter", "the river", ["A", "the river"], 1),
        ("rouge_recall", "the cat sat", ["the cat sat down there"], 0.6),
        ("rouge_l_sum", "one two\nthree four", ["three four\none two"], 1),
    ],
)  # fmt: skip
def test_scores_of_known_answers(metric, prediction, references, score):
    assert score_answer(prediction, metric, references) == pytest.approx(score, abs=1e-7)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("prediction", ["", " ", "...", "?!", "\n\n", "\x00", "Ünï ¿ 中文", "😀"])
def test_odd_predictions_are_scored(metric, prediction):
    assert score_answer(prediction, metric, ["18"]) == 0
    with pytest.raises(ValueError, match="no reference"):
        score_answer(prediction, metric, [])
    with pytest.raises(UsageError, match="metric first_number: a reference is no number"):
        score_answer("12", "first_number", ["twelve", metric])


def test_a_long_sentence_is_no_error_and_leaves_the_limit_of_recursion():
    before = sys.getrecursionlimit()
    words = [str(number) for number in range(1500)]
    assert score_answer(" ".join(words), "rouge_l", [" ".join(words[::2])]) == pytest.approx(2 / 3)
    assert sys.getrecursionlimit() == before


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-7", "-7"), ("\u22124 degrees", "-4"), (".5", "0.5"), ("3.", "3"), ("1,234.50", "1234.5"),
        ("costs 5-6 dollars", "6"), ("(-2)", "-2"), ("$-5", "-5"), ("no", None), ("...", None),
    ],
)  # fmt: skip
def test_the_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        ("Type: Other entity", 1),  # `entity` is part of its name
        ("Date or Other entity", 0.5),
        ("entity", 0),
        ("", 0),
    ],
)
def test_classes_are_counted(prediction, score):
    classes = ["Date", "entity", "Other entity"]
    assert score_answer(prediction, "classification", ["Other entity"], classes) == score
