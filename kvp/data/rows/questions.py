"""Rows with questions: a context, one or several questions about it, and what answers them.

A row asks one question, or several of its context, each of which becomes a `Question`. Answers are
texts, or choices of which one is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvp.data.metrics import CHOICE, METRIC_NAMES, marked_number
from kvp.data.rows.cells import RowError, text_of

ANSWER_COLUMNS = ("answer", "answers", "reference", "references")
"""Columns with the texts of right answers; the first one that is there counts."""
GOLD_COLUMNS = ("gold", "label", "answerKey", "answer")
"""Columns that name the right one of several choices; the first one that is there counts."""
_CHOICE_LISTS = ("choices", "endings")
_NUMBERED = re.compile(r"choice(\d+)")
_LISTS = ("questions", "multi_turns")
_PER_QUESTION = (*ANSWER_COLUMNS, *_CHOICE_LISTS, "gold", "label", "answerKey")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, and what its answer is compared with."""

    context: str
    """Text before the question; empty where the row has none."""
    question: str
    """Empty where the context is all of the prompt."""
    answers: tuple[str, ...]
    """References; empty when unknown."""
    answer_prefix: str
    task: str | None
    max_new_tokens: int | None
    metric: str
    """What the row says (`kvp.data.metrics`), or what rows of its form are measured by."""
    choices: tuple[str, ...] = ()
    """Texts to choose from; empty where an answer is written freely."""
    gold: int | None = None
    """Index of the right choice; None when unknown."""


def asks(row: Mapping[str, Any]) -> bool:
    """Whether a row has a context with a question, or with several."""
    asked = row.get("question") is not None
    listed = any(isinstance(row.get(name), list) for name in _LISTS)
    return row.get("context") is not None and (asked or listed)


def asks_in_short(row: Mapping[str, Any]) -> bool:
    """Whether a row has a question alone, or a context with an answer to it."""
    answered = any(row.get(name) is not None for name in ANSWER_COLUMNS) or _has_choices(row)
    return row.get("question") is not None or (row.get("context") is not None and answered)


def questions_of(row: Mapping[str, Any]) -> tuple[Question, ...]:
    """The questions of a row, at least one; raises RowError with the reason where it has none."""
    parts = _separated(row)
    if parts is None:
        return (_question(row),)
    if not parts:
        raise RowError("has an empty list of questions")
    found = []
    for number, part in enumerate(parts, start=1):
        try:
            text_of(part.get("question"), " in question")
            found.append(_question(part))
        except RowError as error:
            raise RowError(f"{error} (its question {number})") from None
    return tuple(found)


def target_of(row: Mapping[str, Any]) -> Question:
    """What the answer to a row's `prompt` is compared with: a question without texts."""
    return _target(row, context="", question="")


def _separated(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """One row per question, None for a row that has no list of questions."""
    name = next((name for name in _LISTS if isinstance(row.get(name), list)), None)
    if name is None:
        return None
    asked: list[Any] = row[name]
    listed = [column for column in _PER_QUESTION if row.get(column) is not None]
    shared = {key: value for key, value in row.items() if key not in (name, *listed)}
    parts: list[Mapping[str, Any]] = []
    for index, one in enumerate(asked):
        own = dict(one) if isinstance(one, Mapping) else {"question": one}
        if "question" not in own and "input" in own:  # SCBench
            own["question"] = own.pop("input")
        for column in listed:
            values = row[column]
            if not isinstance(values, list) or len(values) != len(asked):
                raise RowError(f"has {len(asked)} questions but not as many {column}")
            own.setdefault("answer" if column == "answers" else column, values[index])
        parts.append({**shared, **own})
    return parts


def _question(row: Mapping[str, Any]) -> Question:
    context, question = row.get("context"), row.get("question")
    if context is None:
        return _target(row, context="", question=text_of(question, " in question"))
    blank = question is None or (isinstance(question, str) and not question.strip())
    target = _target(row, context=text_of(context, " in context"), question="")
    if blank and (target.answers or target.choices):
        return target
    return _target(row, context=target.context, question=text_of(question, " in question"))


def _target(row: Mapping[str, Any], *, context: str, question: str) -> Question:
    choices, labels = _choices(row)
    gold = _gold(row, choices, labels) if choices else None
    if choices:
        answers: tuple[str, ...] = () if gold is None else (choices[gold],)
        default = CHOICE
    else:
        answers, default = _answers(row)
    if not choices and isinstance(row.get("answer"), bool):  # BoolQ
        choices, gold = ("no", "yes"), int(row["answer"])
        answers, default = (choices[gold],), CHOICE
    task = row.get("task")
    if default == "all" and str(task).startswith("qa"):
        default = "part"
    metric = row.get("metric") or default
    if metric not in METRIC_NAMES:
        raise RowError(f"has metric {metric!r}, which is not one of {', '.join(METRIC_NAMES)}")
    return Question(
        context=context,
        question=question,
        answers=answers,
        answer_prefix=str(row.get("answer_prefix") or ""),
        task=str(task) if task else None,
        max_new_tokens=int(row.get("max_new_tokens") or 0) or None,
        metric=str(metric),
        choices=choices,
        gold=gold,
    )


def _answers(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """References, and the metric of their form."""
    given = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
    default = "all"
    if isinstance(given, Mapping):
        given, default = given.get("text"), "part"  # SQuAD's: any of several spellings
    if given in (None, ""):
        given = ()
    listed = [given] if isinstance(given, str | int | float) else given
    if not isinstance(listed, Sequence) or not all(
        isinstance(one, str | int | float) for one in listed
    ):
        raise RowError("has an answer that is neither text nor a list of texts")
    answers = tuple(dict.fromkeys(text_of(str(one), " in answer") for one in listed))
    if answers and all(marked_number(answer) is not None for answer in answers):
        default = "number"  # GSM8K
    return answers, default


def _has_choices(row: Mapping[str, Any]) -> bool:
    return any(
        cell is not None and (name in _CHOICE_LISTS or _NUMBERED.fullmatch(name))
        for name, cell in row.items()
    )


def _choices(row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Texts to choose from, and their labels where the row has some; both empty without choices.

    Labels of columns `choice0`, `choice1` and so on are their numbers.
    """
    if not _has_choices(row):
        return (), None
    given: Any = next((row[name] for name in _CHOICE_LISTS if row.get(name) is not None), None)
    labels: Any = None
    if given is None:
        columns = sorted((int(found[1]), key) for key in row if (found := _NUMBERED.fullmatch(key)))
        given = [row[key] for _, key in columns]
        labels = [str(number) for number, _ in columns]
    if isinstance(given, Mapping):
        given, labels = given.get("text"), given.get("label")
    if not isinstance(given, list) or len(given) < 2:
        raise RowError("has choices that are not a list of at least two")
    plain = [str(one) if isinstance(one, int | float) else one for one in given]
    texts = tuple(text_of(one, " in a choice") for one in plain)
    if labels is not None and (not isinstance(labels, list) or len(labels) != len(texts)):
        raise RowError(f"has {len(texts)} choices but not as many labels")
    return texts, None if labels is None else tuple(map(str, labels))


def _gold(
    row: Mapping[str, Any], choices: tuple[str, ...], labels: tuple[str, ...] | None
) -> int | None:
    """Index of the right choice: a label, an index from 0, a text or a letter; None without one."""
    column = next((name for name in GOLD_COLUMNS if row.get(name) not in (None, "")), None)
    if column is None:
        return None
    value = row[column]
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    meant = _meanings(value, choices, labels)
    if len(meant) != 1:
        many = "more than one" if meant else "none"
        raise RowError(f"has {column} {value!r:.40}, which names {many} of its choices")
    return meant.pop()


def _meanings(
    value: int | str, choices: tuple[str, ...], labels: tuple[str, ...] | None
) -> set[int]:
    """Indices of the choices that a value can name; labels go before everything else."""
    text = str(value).strip()
    if labels is not None and labels.count(text) == 1:
        return {labels.index(text)}
    by_index = {int(text)} if text.isdecimal() and int(text) < len(choices) else set()
    if isinstance(value, int):
        return by_index
    texts = [choice.strip() for choice in choices]
    meant = by_index | {index for index, choice in enumerate(texts) if choice == text}
    if not meant and len(text) == 1 and text.isascii() and text.isalpha():
        letter = ord(text.upper()) - ord("A")
        meant = {letter} if letter < len(choices) else set()
    return meant
