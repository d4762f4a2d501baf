"""Forms of a row: its columns decide whether it is a dialogue, a question or running text.

A row of no known form, or without its text, raises RowError; the caller skips and counts it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvp.data.rows.cells import RowError, text_of
from kvp.data.rows.questions import Question, asks, asks_in_short, questions_of, target_of
from kvp.data.synthetic.text import split_of

Turn = Mapping[str, str]

ACCEPTED = (
    "text; messages or conversations; prompt, with or without completion; context and question, "
    "with answer or choices; question alone; questions or multi_turns of a context; message trees "
    "(message_id, parent_id, role, text, or prompt with replies); --columns renames others"
)
"""Columns that a row may have, for messages."""

_ROLES = {
    "user": "user", "prompter": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Document:
    """One row, one tree of rows or one text file, in one of four forms."""

    split: str
    """Split that owns it."""
    location: str = ""
    """Where it is in its data, for messages."""
    text: str = ""
    """Running text; empty in the other forms."""
    long: bool = False
    """Running text of a whole file, which gives as many prompts as fit into it."""
    turns: tuple[Turn, ...] = ()
    """A dialogue: user and assistant in turn, the assistant last."""
    alone: bool = False
    """A dialogue that is a prompt of its own. Its last turn, the assistant's, is empty where the
    row has no reply."""
    tree: str = ""
    """Name of the message tree that a dialogue is a thread of."""
    questions: tuple[Question, ...] = ()
    """Questions of one context, at least one; of a dialogue that is `alone` at most one, without
    texts: what the answer is compared with."""


def document_of(row: Mapping[str, Any]) -> Document:
    """The document a row is; raises RowError with the reason where it is none."""
    for column in ("messages", "conversations"):
        if isinstance(row.get(column), Sequence) and not isinstance(row[column], str):
            return _measured(_dialogue(alternating(row[column])), row)
    if asks(row):
        return _questions(row)
    if row.get("prompt") is not None:
        return _prompt(row)
    if "text" in row:
        text = _text(row["text"])
        return Document(split=split_of(text), text=text)
    if asks_in_short(row):
        return _questions(row)
    columns = ", ".join(sorted(map(str, row))) or "none"
    raise RowError(f"has none of the accepted columns (it has: {columns})")


def role_of(name: object) -> str | None:
    """`user` or `assistant` for any of the names that data give them."""
    return _ROLES.get(name) if isinstance(name, str) else None


def alternating(turns: Sequence[object]) -> tuple[Turn, ...]:
    """The longest start of a dialogue in which user and assistant take turns, assistant last.

    Turns have `role` and `content`, or `from` and `value`. System messages are left out; a role of
    any other name ends the dialogue. Raises RowError for a turn without its keys or its text.
    """
    kept: list[Turn] = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise RowError("has a message that is not an object")
        role, content = (turn.get(key, turn.get(other)) for key, other in _TURN_KEYS)
        if not isinstance(role, str):
            raise RowError("has a message without 'role' and 'content' (or 'from' and 'value')")
        if role == "system":
            continue
        known = role_of(role)
        if known is None or known != ("user", "assistant")[len(kept) % 2]:
            break
        kept.append({"role": known, "content": text_of(content, " in a message")})
    return tuple(kept[: len(kept) // 2 * 2])


_TURN_KEYS = (("role", "from"), ("content", "value"))


def _questions(row: Mapping[str, Any]) -> Document:
    questions = questions_of(row)
    shared = questions[0].context or questions[0].question
    return Document(split=split_of(shared), questions=questions)


def _dialogue(turns: tuple[Turn, ...]) -> Document:
    if not turns:
        raise RowError("has no exchange that begins with the user and ends with the assistant")
    return Document(split=split_of(json.dumps(turns)), turns=turns)


def _measured(document: Document, row: Mapping[str, Any]) -> Document:
    """A dialogue with a metric of its own: a prompt that is answered, its reply the reference."""
    if row.get("metric") in (None, "", "none"):
        return document
    target = target_of({**row, "answer": document.turns[-1]["content"]})
    return replace(document, alone=True, questions=(target,))


def _prompt(row: Mapping[str, Any]) -> Document:
    """`prompt` and `completion`, each a text or a list of messages; without one, no reply."""
    prompt, completion = (
        [{"role": role, "content": value}] if isinstance(value, str) else value
        for role, value in (("user", row["prompt"]), ("assistant", row.get("completion")))
    )
    if not isinstance(prompt, Sequence) or not isinstance(completion, Sequence | None):
        raise RowError("has a prompt or completion that is neither text nor a list of messages")
    if completion:
        return _measured(_dialogue(alternating([*prompt, *completion])), row)
    turns = alternating([*prompt, {"role": "assistant", "content": "-"}])
    document = _dialogue(turns)
    target = target_of(row)
    questions = (target,) if target.answers or target.choices else ()
    reply = {**turns[-1], "content": ", ".join(target.answers)}
    return replace(document, turns=(*turns[:-1], reply), alone=True, questions=questions)


def _text(content: object) -> str:
    if content is not None and not isinstance(content, str):
        raise RowError("has a value that is not text")
    return text_of(content)
