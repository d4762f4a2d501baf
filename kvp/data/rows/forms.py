"""Forms of a row: its columns decide whether it is a dialogue, a question or running text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvp.data.metrics import METRIC_NAMES, marked_number
from kvp.data.rows.values import RowError, name_in, plain_row, text_of, texts_of
from kvp.data.splits import split_of
from kvp.data.task import REPLY_TOKENS, Sample, Turn

_USER, _ASSISTANT = ("user", "prompter", "human"), ("assistant", "gpt")
"""Names of the two roles: OpenAI's, OpenAssistant's and ShareGPT's."""
_TURN_KEYS = (("role", "from"), ("content", "value"))
_ANSWERS = ("answer", "answers")
"""Columns with the texts of right answers; the first one that is there counts."""
_QUESTIONS = ("question", "questions")
_CHOICES = ("choices", "endings", "choice0")
_DIALOGUE = {"messages", "conversations", "prompt", "completion", "metric"}
_TARGET = {*_ANSWERS, "task", "metric", "answer_prefix", "max_new_tokens"}
_QUESTION = {"context", *_QUESTIONS}


@dataclass(frozen=True, kw_only=True, slots=True)  # there may be millions
class Document:
    """One row, one tree of rows or one text file, in one of four forms."""

    split: str
    location: str = ""
    """Where it is in its data, for messages."""
    text: str = ""
    """Running text; empty in the other forms."""
    long: bool = False
    """Running text of a whole file, which gives as many prompts as fit into it."""
    turns: tuple[Turn, ...] = ()
    """A dialogue: user and assistant in turn, the assistant last."""
    tree: str = ""
    """Name of the message tree that a dialogue is a thread of."""
    chat: bool = False
    """Whether its question was a chat or a prompt."""
    questions: tuple[Sample, ...] = ()
    """Questions of one context, or a chat that is a prompt of its own. Without the id, the split
    and the reply, which samples get later; their task is empty where the row names none."""


def document_of(row: Mapping[str, Any]) -> Document:
    """The document a row is; raises RowError with the reason where it is none."""
    for column in ("messages", "conversations"):
        if isinstance(row.get(column), list):
            return _dialogue(alternating_turns(row[column]), row)
    asks = any(row.get(name) is not None for name in _QUESTIONS)
    if asks and row.get("context") is not None:
        return _questions(row)
    if row.get("prompt") is not None:
        return _prompt(row)
    if row.get("text") is not None:
        text = text_of(row["text"])
        return Document(split=split_of(text), text=text)
    if asks:
        return _questions(row)
    if "text" in row:
        raise RowError("has no text")
    columns = ", ".join(sorted(row)[:20]) or "none"
    raise RowError(f"has none of the accepted columns (it has: {columns})")


def unread_keys(row: Mapping[str, Any], document: Document) -> set[str]:
    """Keys of a row, and of its questions, that its form does not have."""
    asked_of = _TARGET | (_DIALOGUE if document.chat else _QUESTION)
    read = {"text"} if document.text else _DIALOGUE if document.turns else asked_of
    unread = {key for key, cell in row.items() if key not in read and cell is not None}
    questions = row.get("questions")
    for question in questions if "questions" in read and isinstance(questions, list) else ():
        if isinstance(question, Mapping):
            unread |= {f"questions.{key}" for key in question.keys() - read}
    return unread


def role_of(name: object) -> str | None:
    """`user` or `assistant`, also by OpenAssistant's and ShareGPT's names."""
    word = name.strip().lower() if isinstance(name, str) else None
    return "user" if word in _USER else "assistant" if word in _ASSISTANT else None


def alternating_turns(turns: Sequence[object]) -> tuple[Turn, ...]:
    """The longest start of a dialogue in which user and assistant take turns, assistant last.

    Turns have `role` and `content`, or `from` and `value`. Messages of the system and the developer
    are left out; a role of any other name ends the dialogue, and so does a call of a tool. Raises
    RowError for a turn without its keys or its text, and where there is no exchange.
    """
    kept: list[Turn] = []
    end = ""
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise RowError("has a message that is not an object")
        filled = {key: value for key, value in turn.items() if value not in (None, "")}
        role, content = (filled.get(key, filled.get(other)) for key, other in _TURN_KEYS)
        if not isinstance(role, str):
            raise RowError("has a message without 'role' and 'content' (or 'from' and 'value')")
        if role.strip().lower() in ("system", "developer"):
            continue
        usual_role = role_of(role)
        called = not content and bool(turn.get("tool_calls") or turn.get("function_call"))
        if usual_role is None or called or usual_role != ("user", "assistant")[len(kept) % 2]:
            what = "calls a tool" if called else f"has the role {role!r:.40}"
            end = f": its message {number} {what}"
            break
        kept.append({"role": usual_role, "content": text_of(content, " in a message")})
    if len(kept) < 2:
        missing = "has no exchange that begins with the user and ends with the assistant"
        raise RowError(missing + end)
    return tuple(kept[: len(kept) // 2 * 2])


def _dialogue(turns: tuple[Turn, ...], row: Mapping[str, Any]) -> Document:
    """A dialogue; with a metric of its own a prompt that is answered, its reply the reference."""
    if row.get("metric") in (None, "none"):
        return Document(split=split_of(json.dumps(turns)), turns=turns)
    return _answered(turns, {**row, "answer": turns[-1]["content"]})


def _answered(turns: tuple[Turn, ...], row: Mapping[str, Any]) -> Document:
    """A chat whose last turn is answered; a single message is a question."""
    target = _target(row)
    if len(turns) == 2:
        sample = replace(target, question=turns[0]["content"])
    else:
        reply = {**turns[-1], "content": ", ".join(target.references)}
        sample = replace(target, messages=(*turns[:-1], reply))
    return Document(split=split_of(json.dumps(turns)), questions=(sample,), chat=True)


def _prompt(row: Mapping[str, Any]) -> Document:
    """`prompt` and `completion`, each a text or a list of messages; without one, no reply."""
    prompt: Any
    completion: Any
    prompt, completion = (
        [{"role": role, "content": value}] if isinstance(value, str) else value
        for role, value in (("user", row["prompt"]), ("assistant", row.get("completion")))
    )
    if completion:
        return _dialogue(alternating_turns([*prompt, *completion]), row)
    turns = alternating_turns([*prompt, {"role": "assistant", "content": "-"}])
    if turns[-1]["content"] != "-":
        raise RowError("has a prompt in which user and assistant do not take turns")
    return _answered(turns, row)


def _questions(row: Mapping[str, Any]) -> Document:
    questions = questions_of(row)
    shared = questions[0].context or questions[0].question
    return Document(split=split_of(shared), questions=questions)


def questions_of(row: Mapping[str, Any]) -> tuple[Sample, ...]:
    """The questions of a row, at least one; raises RowError with the reason where it has none."""
    questions = row.get("questions")
    if questions is None:
        return (_question(row),)
    if not isinstance(questions, list) or not questions:
        raise RowError("has questions that are not a list with an object for each")
    shared = {key: value for key, value in row.items() if key not in (*_ANSWERS, *_QUESTIONS)}
    samples = []
    for number, question in enumerate(questions, start=1):
        try:
            if not isinstance(question, Mapping):
                raise RowError("has a question that is not an object")
            samples.append(_question({**shared, **plain_row(question)}))
        except RowError as error:
            raise RowError(f"{error} (its question {number})") from None
    return tuple(samples)


def _question(row: Mapping[str, Any]) -> Sample:
    context = "" if row.get("context") is None else text_of(row["context"], " in context")
    question = text_of(row.get("question"), " in question")
    return replace(_target(row), context=context, question=question)


def _target(row: Mapping[str, Any]) -> Sample:
    """What an answer is compared with: a question without texts."""
    if any(row.get(name) is not None for name in _CHOICES):
        raise RowError("is multiple choice (metric choice), which kvp lm-eval measures")
    given = next((row[name] for name in _ANSWERS if row.get(name) is not None), None)
    answers, task = texts_of(given, " in answer"), name_in(row, "task")
    # Of an object (SQuAD's), or of a task so named, any of several spellings is right.
    default = "part" if isinstance(given, Mapping) or task.startswith("qa") else "all"
    if answers and all(marked_number(answer) is not None for answer in answers):
        default = "number"  # GSM8K
    metric = name_in(row, "metric") or default
    if metric not in METRIC_NAMES:
        raise RowError(f"has metric {metric!r}, which is not one of {', '.join(METRIC_NAMES)}")
    new_tokens = row.get("max_new_tokens")
    if new_tokens is None:
        new_tokens = REPLY_TOKENS
    if type(new_tokens) is not int or new_tokens < 1:  # True is no number
        raise RowError(f"has max_new_tokens {new_tokens!r:.40}, which is no whole number above 0")
    return Sample(
        id="", task=task, split="", answer_prefix=name_in(row, "answer_prefix"),
        references=answers, max_new_tokens=new_tokens, metric=metric,
    )  # fmt: skip
