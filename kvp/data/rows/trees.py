"""Message trees of the OpenAssistant exports: one message per row, or one tree per row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvp.data.rows.cells import RowError
from kvp.data.rows.forms import Turn, alternating, role_of

Message = Mapping[str, Any]


def is_message(row: Mapping[str, Any]) -> bool:
    """Whether a row is one message of a tree."""
    return "message_id" in row and "text" in row and "messages" not in row


def is_tree(row: Mapping[str, Any]) -> bool:
    """Whether a row is a whole tree: a `prompt` with nested `replies`."""
    prompt = row.get("prompt")
    return isinstance(prompt, Mapping) and "text" in prompt


def check_message(row: Message) -> None:
    """Raise RowError unless a message has an id that others can name, and a parent or none."""
    for column in ("message_id", "parent_id"):
        value = row.get(column)
        if value is None and column == "parent_id":
            continue
        if not isinstance(value, str | int) or value == "":
            raise RowError(f"has no usable {column}")


def nested_messages(
    message: Message, name: str = "0", parent: str | None = None
) -> Iterator[Message]:
    """A message of a nested tree and all below it, each with an id and that of its parent."""
    yield {**message, "message_id": name, "parent_id": parent}
    for number, reply in enumerate(message.get("replies") or []):
        yield from nested_messages(reply, f"{name}.{number}", name)


def tree_names(messages: Sequence[Message]) -> list[str]:
    """Name of the tree of each message: `message_tree_id`, or the id at the end of its parents."""
    parents = {message["message_id"]: message.get("parent_id") for message in messages}

    def root(name: object) -> object:
        for _ in parents:  # no more steps than there are messages
            if parents.get(name) is None:
                break
            name = parents[name]
        return name

    return [str(one.get("message_tree_id") or root(one["message_id"])) for one in messages]


def threads(messages: Iterable[Message]) -> Iterator[tuple[Turn, ...]]:
    """Threads of a message tree from the root to a last reply, the best-ranked first.

    Messages have `message_id`, `parent_id`, `role`, `text` and optionally `rank` (0 is best) and
    `deleted`. User and assistant take turns; a message of the user that nobody answers ends no
    thread. Then follow the threads that leave the best reply once, at the root first, then those
    that do so twice, or take a worse one, and so on. A thread with a message without text is left
    out; RowError where it is the only one.
    """
    replies: dict[object, list[Message]] = {}
    for message in messages:
        if not message.get("deleted"):
            replies.setdefault(message.get("parent_id"), []).append(message)
    refusal: RowError | None = None
    usable = 0
    found = list(enumerate(_threads(replies, (), 0)))  # the best first, then those next to them
    for _, (_, thread) in sorted(found, key=lambda one: (one[1][0], -one[0])):
        turns = [{"role": one.get("role"), "content": one.get("text")} for one in thread]
        try:
            yield alternating(turns)
            usable += 1
        except RowError as error:
            refusal = refusal or error
    if refusal and not usable:
        raise refusal


def _threads(
    replies: Mapping[object, Sequence[Message]], thread: tuple[Message, ...], lost: int
) -> Iterator[tuple[int, tuple[Message, ...]]]:
    """The threads that begin with these messages: better-ranked siblings passed by, messages."""
    role = ("user", "assistant")[len(thread) % 2]
    below = replies.get(thread[-1]["message_id"] if thread else None, ())
    fitting = [one for one in below if role_of(one.get("role")) == role]
    if role == "user":
        fitting = [one for one in fitting if _answered(one, replies)]
        if thread and not fitting:
            yield lost, thread
    for place, one in enumerate(sorted(fitting, key=_rank)):
        yield from _threads(replies, (*thread, one), lost + place)


def _answered(message: Message, replies: Mapping[object, Sequence[Message]]) -> bool:
    below = replies.get(message["message_id"], ())
    return any(role_of(one.get("role")) == "assistant" for one in below)


def _rank(message: Message) -> float:
    try:
        return float(message["rank"])
    except (KeyError, TypeError, ValueError):
        return math.inf
