"""Message trees of the OpenAssistant exports: one message per row, or one tree per row.

Ids come from outside: a message without one is a bad row, and cycles end a walk instead of
repeating it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvp.data.rows.forms import RowError, Turn, alternating

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


def nested_messages(tree: Mapping[str, Any]) -> Iterator[Message]:
    """The messages of a nested tree, numbered, each with the number of its parent."""
    waiting: list[tuple[object, str | None]] = [(tree["prompt"], None)]
    for number in range(_MAX_MESSAGES):
        if not waiting:
            return
        message, parent = waiting.pop()
        if not isinstance(message, Mapping):
            raise RowError("has a reply that is not an object")
        name = str(number)
        yield {**message, "message_id": name, "parent_id": parent}
        replies = message.get("replies") or []
        if not isinstance(replies, list):
            raise RowError("has replies that are not a list")
        waiting += [(reply, name) for reply in reversed(replies)]
    raise RowError(f"has more than {_MAX_MESSAGES} messages")


_MAX_MESSAGES = 100_000


def tree_names(messages: Sequence[Message]) -> list[str]:
    """Name of the tree of each message: `message_tree_id`, or the id at the end of its parents.

    In a cycle it is the id at which the walk came round.
    """
    parents = {message["message_id"]: message.get("parent_id") for message in messages}
    roots: dict[object, object] = {}
    names = []
    for message in messages:
        name = message["message_id"]
        walked: dict[object, None] = {}
        while name not in roots and name not in walked and parents.get(name) is not None:
            walked[name] = None
            name = parents[name]
        root = roots.get(name, name)
        roots.update(dict.fromkeys(walked, root))  # each message is walked over once
        names.append(str(message.get("message_tree_id") or root))
    return names


def best_thread(messages: Iterable[Message]) -> tuple[Turn, ...]:
    """The thread of a message tree that follows the best-ranked reply from the root on.

    Messages have `message_id`, `parent_id`, `role`, `text` and optionally `rank` (0 is best) and
    `deleted`. A final message of the user is dropped; empty when nothing is left. Raises RowError
    for a message without text on the way.
    """
    replies: dict[object, list[Message]] = {}
    for message in messages:
        if not message.get("deleted"):
            replies.setdefault(message.get("parent_id"), []).append(message)
    thread = []
    parent: object = None
    met: set[object] = set()
    while parent in replies and parent not in met:
        met.add(parent)
        best = min(replies[parent], key=_rank)
        thread.append({"role": best.get("role"), "content": best.get("text")})
        parent = best["message_id"]
    return alternating(thread)


def _rank(message: Message) -> float:
    try:
        return float(message["rank"])
    except (KeyError, TypeError, ValueError):
        return math.inf
