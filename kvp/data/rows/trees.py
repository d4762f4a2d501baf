"""Message trees of the OpenAssistant exports: one message per row, or one tree per row.

Ids come from outside: a message without one is a bad row, and cycles end a walk instead of
repeating it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


def nested_messages(tree: Mapping[str, Any]) -> Iterator[Message]:
    """The messages of a nested tree, numbered, each with the number of its parent."""
    waiting: list[tuple[Message, str | None]] = [(tree["prompt"], None)]
    for number in range(_MAX_MESSAGES):
        if not waiting:
            return
        message, parent = waiting.pop()
        name = str(number)
        yield {**message, "message_id": name, "parent_id": parent}
        waiting += [(reply, name) for reply in reversed(message.get("replies") or [])]
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
    ends = sorted(_ends(replies), key=lambda end: (end.lost, -end.number))
    refusal: RowError | None = None
    usable = 0
    for end in ends:
        try:
            thread = _turns(end)
        except RowError as error:
            refusal = refusal or error
            continue
        usable += 1
        yield thread
    if refusal and not usable:
        raise refusal


@dataclass(frozen=True)
class _Node:
    """A message on its thread."""

    message: Message
    parent: _Node | None
    lost: int
    """Better-ranked siblings that the thread passes by, all messages together."""
    number: int
    """When it was met, best first and depth first."""


def _ends(replies: Mapping[object, Sequence[Message]]) -> list[_Node]:
    """Last replies of all threads."""
    ends: dict[int, _Node] = {}
    met: set[object] = set()
    waiting: list[tuple[Message, _Node | None, int]] = []

    def add(parent: _Node | None, role: str, lost: int) -> None:
        name = None if parent is None else parent.message["message_id"]
        fitting = [one for one in replies.get(name, ()) if role_of(one.get("role")) == role]
        if role == "user":  # those that are answered
            fitting = [one for one in fitting if _answered(one, replies)]
        fitting.sort(key=_rank)
        waiting.extend(
            (one, parent, lost + place) for place, one in reversed(list(enumerate(fitting)))
        )

    add(None, "user", 0)
    while waiting:
        message, parent, lost = waiting.pop()
        if message["message_id"] in met:
            continue
        met.add(message["message_id"])
        node = _Node(message, parent, lost, len(met))
        if role_of(message.get("role")) == "assistant":
            ends[node.number] = node
            assert parent is not None, "a thread begins with the user"
            if parent.parent is not None:
                ends.pop(parent.parent.number, None)  # it goes on
            add(node, "user", lost)
        else:
            add(node, "assistant", lost)
    return list(ends.values())


def _answered(message: Message, replies: Mapping[object, Sequence[Message]]) -> bool:
    below = replies.get(message["message_id"], ())
    return any(role_of(one.get("role")) == "assistant" for one in below)


def _turns(end: _Node) -> tuple[Turn, ...]:
    node: _Node | None = end
    backwards = []
    while node is not None:
        backwards.append({"role": node.message.get("role"), "content": node.message.get("text")})
        node = node.parent
    return alternating(backwards[::-1])


def _rank(message: Message) -> float:
    try:
        return float(message["rank"])
    except (KeyError, TypeError, ValueError):
        return math.inf
