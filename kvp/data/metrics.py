"""Metrics of an answer: from a prediction and its references to a score from 0 to 1.

`METRICS` holds those that rows and `--metric` name, `BENCHMARK_METRICS` those of LongBench and
SCBench by their published definitions; of several references the best one counts, except in `all`.
`none` is measured without a generated answer, by the likelihood of the reply.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import TYPE_CHECKING, Any

from kvp.errors import UsageError
from kvp.plugins import require

if TYPE_CHECKING:
    from kvp.data.task import Sample

Metric = Callable[[str, Sequence[str]], float]
"""From a prediction and one or more references to a score from 0 to 1."""

NONE = "none"
"""No metric: nothing is generated, the likelihood of the reply is measured."""
CLASSIFICATION = "classification"
"""The metric that also needs the classes of the sample."""

_CONTROL = re.compile(r"[\x00-\x1f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SIGNED = re.compile(
    r"(?P<sign>(?<![\w)])[-\u2212])?\$?(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)
_MARKED = re.compile(r"#### ?(-?[0-9.,]+)")
_COMMENT_MARKS = ("`", "#", "//")
_RECURSION = 100_000
"""Depth that `rouge` may need: it walks back through two sentences word by word."""
_WHOLE = re.compile(r"\d+")
_REAL = re.compile(r"\d+\.\d+|\d+")
_LETTERS = "ABCD"
_CUES = ("answer is:", "answer:", "answer is", "option is")  # of a choice
_BREAKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """The fraction of `references` contained in `prediction`, ignoring case (RULER)."""
    return sum(_find_references(prediction, references)) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1 when any of `references` is contained in `prediction`, ignoring case, else 0 (RULER)."""
    return float(any(_find_references(prediction, references)))


def _find_references(prediction: str, references: Sequence[str]) -> list[bool]:
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def normalise(text: str) -> str:
    """Lower case without ASCII punctuation, English articles and repeated white space (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1 when the prediction equals a reference after SQuAD's normalisation, else 0."""
    return float(normalise(prediction) in map(normalise, references))


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Largest F1 of the words shared with a reference, after SQuAD's normalisation.

    Where prediction or reference has no word left, 1 if both have none, else 0 (SQuAD 2.0).
    """
    return max(_f1(normalise(prediction).split(), normalise(text).split()) for text in references)


def _f1(prediction: list[str], reference: list[str]) -> float:
    if not prediction or not reference:
        return float(prediction == reference)
    shared = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * shared / (len(prediction) + len(reference))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """Largest ROUGE-L F1 of a reference as LongBench and kvpress compute it (PyPI `rouge` 1.0.1).

    Sentences end at full stops, words are distinct ones. 0 without a sentence to compare.
    """
    return max(_rouge_l(prediction, reference, "f") for reference in references)


def rouge_recall(prediction: str, references: Sequence[str]) -> float:
    """Largest ROUGE-L recall of a reference (as `rouge_l`): the share of it that was written."""
    return max(_rouge_l(prediction, reference, "r") for reference in references)


def _rouge_l(prediction: str, reference: str, part: str) -> float:
    if not prediction.replace(".", "") or not reference.replace(".", ""):
        return 0.0  # no sentence, which the library refuses
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _RECURSION))
    try:
        (scores,) = _rouge().get_scores([prediction], [reference])
    finally:
        sys.setrecursionlimit(limit)
    return float(scores["rouge-l"][part])


@cache
def _rouge() -> Any:  # noqa: ANN401
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


def number_match(prediction: str, references: Sequence[str]) -> float:
    """1 when the last number of the prediction is that of a reference, else 0.

    A reference's number is the one behind `####` (GSM8K), or its last one. Numbers are compared by
    value: `$1,200.00` is 1200. A minus sign behind a letter or digit is none.
    """
    number = last_number(prediction)
    return float(number is not None and number in map(number_of_reference, references))


def number_of_reference(reference: str) -> Decimal | None:
    """What `number_match` compares with: the number behind `####`, or the last one."""
    marked = marked_number(reference)
    return last_number(reference) if marked is None else marked


def last_number(text: str) -> Decimal | None:
    """The last number of a text, without currency and commas of thousands; None without any."""
    every = list(_SIGNED.finditer(text))
    if not every:
        return None
    value = Decimal(every[-1]["digits"].replace(",", ""))
    return -value if every[-1]["sign"] else value


def marked_number(text: str) -> Decimal | None:
    """The first number of the form `#### 18`; None without one."""
    match = _MARKED.search(text)
    return None if match is None else last_number(match[1])


def code_similarity(prediction: str, references: Sequence[str]) -> float:
    """Edit similarity of the first line of code to a reference (LongBench's lcc, repobench-p).

    The line is the first one that is not blank and has none of ` # //, as lm-evaluation-harness
    takes it; empty without one. 1 - insertions and deletions / length of both.
    """
    from rapidfuzz import fuzz

    lines = (line for line in prediction.split("\n") if line.strip())
    code = next((line for line in lines if not any(mark in line for mark in _COMMENT_MARKS)), "")
    return max(fuzz.ratio(code, reference) for reference in references) / 100


def contains(prediction: str, references: Sequence[str]) -> float:
    """1 when the prediction contains a reference, letter by letter (SCBench's retrieval)."""
    return float(any(reference in prediction for reference in references))


def share_of_numbers(prediction: str, references: Sequence[str]) -> float:
    """Share of the whole numbers in the prediction that are the reference's first (LongBench).

    A reference is a number, or text with one, such as `Paragraph 7`.
    """
    numbers = _WHOLE.findall(prediction)
    wanted = [match[0] for reference in references if (match := _WHOLE.search(reference))]
    return max(map(numbers.count, wanted), default=0) / len(numbers) if numbers else 0.0


def first_number(prediction: str, references: Sequence[str]) -> float:
    """1 when the first number of the prediction has a reference's value (SCBench's math find).

    A whole number is compared with the prediction's cut down to one. UsageError for non-numbers.
    """
    match = _REAL.search(prediction)
    if match is None:
        return 0.0
    value = Decimal(match[0])
    whole = map(Decimal, filter(str.isdecimal, references))
    try:
        return float(value in map(Decimal, references) or Decimal(int(value)) in whole)
    except InvalidOperation:
        raise UsageError(f"metric first_number: a reference is no number: {references}") from None


def choice_letter(prediction: str, references: Sequence[str]) -> float:
    """1 when the prediction's letter, A to D, is a reference (SCBench's multiple choice).

    It is the first character, or follows `answer is`, `answer:`, `option is`, or is a word alone.
    """
    text = prediction.strip()
    if text[:1] and text[0] in _LETTERS:
        return float(text[0] in references)
    if text in references:
        return 1.0
    words = " ".join(text.translate(_BREAKS).split())
    for cue in _CUES:
        _, separator, after = words.partition(cue)
        if separator:
            return float(any(after[1:].startswith(reference) for reference in references))
    letters = (word for word in words.split() if word in _LETTERS)
    return float(next(letters, None) in references)


def rouge_l_sum(prediction: str, references: Sequence[str]) -> float:
    """Largest ROUGE-Lsum F1 of a reference (PyPI `rouge_score`, without stemming; SCBench)."""
    scorer = rouge_scorer()
    return max(
        float(scorer.score(reference, prediction)["rougeLsum"].fmeasure) for reference in references
    )


@cache
def rouge_scorer() -> Any:  # noqa: ANN401
    """Google's ROUGE; UsageError where it is not installed."""
    require("--tasks scbench_summary", "benchmarks", "rouge_score")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeLsum"])


def classification(prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """1 / number of classes that the prediction names, if a reference is among them (LongBench).

    A class whose name is part of the reference's does not count as named.
    """
    scores = [0.0]
    for reference in references:
        named = [
            name
            for name in classes
            if name in prediction and (name == reference or name not in reference)
        ]
        scores.append(1 / len(named) if reference in named else 0.0)
    return max(scores)


METRICS: Mapping[str, Metric] = {
    "all": string_match_all, "part": string_match_part, "exact": exact_match, "f1": token_f1,
    "rouge_l": rouge_l, "rouge_recall": rouge_recall, "number": number_match,
    "code": code_similarity,
}  # fmt: skip
BENCHMARK_METRICS: Mapping[str, Metric] = {
    "contains": contains,
    "share_of_numbers": share_of_numbers,
    "first_number": first_number,
    "choice_letter": choice_letter,
    "rouge_l_sum": rouge_l_sum,
}
"""Metrics that only benchmarks name, except `CLASSIFICATION`, which has one more argument."""
METRIC_NAMES = (*METRICS, NONE)
"""Everything that `metric` of a row may be."""


def score_answer(
    prediction: str, metric: str, references: Sequence[str], classes: Sequence[str] = ()
) -> float:
    """Score of a generated answer by the name of a metric; ValueError without references."""
    if not references:
        raise ValueError("no reference to compare the prediction with")
    if metric == CLASSIFICATION:
        return classification(prediction, references, classes)
    return {**METRICS, **BENCHMARK_METRICS}[metric](prediction, references)


class ScoredByMetric:
    """What a task inherits whose samples name the metric of their answers."""

    def score(self, sample: Sample, answer: str) -> float:
        """Score of a generated answer by the metric of its sample."""
        return score_answer(answer, sample.metric, sample.references, sample.classes)
