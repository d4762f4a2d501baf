"""Reads a file, a folder or a hub data set as documents, and counts the rows that are skipped.

Rows belong to splits by a hash of their content, so equal rows never meet in two splits; message
trees (OpenAssistant's exports, one message per row) by a hash of their id, all threads of one
together; a running text by position.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvp.data.rows import forms
from kvp.data.rows.files import Tally, files_of, other_form, read_rows, read_text
from kvp.data.rows.forms import Document
from kvp.data.rows.values import RowError
from kvp.data.splits import SPLITS, share_of, split_of
from kvp.data.task import TaskSettings, Turn

Message = Mapping[str, Any]


def read_documents(
    data: str, flag: str, settings: TaskSettings
) -> tuple[tuple[Document, ...], Tally]:
    """Everything in `data`, in its order, and a count of the rows that are not used.

    Message trees follow the other rows; `settings.tree_paths` chooses their threads. Raises
    UsageError naming `flag`: no such data, nothing in it, or no row that can be used.
    """
    files, texts, _ = files_of(data, f"--{flag}")
    if texts and not files:
        whole, tally = read_text(data, f"--{flag}")
        parts = {split: share_of(whole, split) for split in SPLITS}  # by position
        name = Path(data).name
        return tuple(
            Document(split=split, text=part, long=True, location=name)
            for split, part in parts.items()
            if part
        ), tally
    tally = Tally()
    trees: dict[str, list[tuple[str, Message]]] = {}
    usable: list[Document] = []

    def documents(location: str, row: Mapping[str, Any]) -> list[Document]:
        if "message_id" in row and "text" in row and row.get("messages") is None:
            trees.setdefault(str(row["message_tree_id"]), []).append((location, row))
            return []
        document = replace(forms.document_of(row), location=location)
        tally.unread |= forms.unread_keys(row, document)
        return [document]

    for _, made in tally.parse_rows(read_rows(data, f"--{flag}", tally.left_out), documents):
        usable += made
    for name, members in trees.items():
        try:
            tree = [message for _, message in members]
            chats = [*islice(threads(tree), None if settings.tree_paths == "all" else 1)]
            if not chats:
                raise RowError("is of a message tree without a reply")
            usable += [
                Document(split=split_of(name), turns=turns, location=members[0][0], tree=name)
                for turns in chats
            ]
        except (RowError, RecursionError) as error:  # ids that come twice
            tally.skipped += [(location, str(error)) for location, _ in members]
        except (TypeError, ValueError) as error:
            tally.skipped += [(location, other_form(error)) for location, _ in members]
    tally.check(f"--{flag} {data}", usable)
    return tuple(usable), tally


def threads(messages: Iterable[Message]) -> Iterator[tuple[Turn, ...]]:
    """Threads of a message tree from the root to a last reply, the best-ranked first.

    Messages have `message_id`, `parent_id`, `role`, `text` and optionally `rank` (0 is best) and
    `deleted`. User and assistant take turns; a message of the user that nobody answers ends no
    thread. Then follow the threads that leave the best reply once, at the root first, then those
    that do so twice, or take a worse one, and so on. Raises RowError at a message without text.
    """
    replies: dict[object, list[Message]] = {}
    for message in messages:
        if not message.get("deleted"):
            replies.setdefault(message.get("parent_id"), []).append(message)
    pairs = [*_threads(replies, (), 0)]  # the best first, then those next to them
    for _, thread in sorted(reversed(pairs), key=lambda pair: pair[0]):
        yield forms.alternating_turns(
            [{"role": reply.get("role"), "content": reply.get("text")} for reply in thread]
        )


def _threads(
    replies: Mapping[object, Sequence[Message]], thread: tuple[Message, ...], lost: int
) -> Iterator[tuple[int, tuple[Message, ...]]]:
    """The threads that begin with these messages: better-ranked siblings passed by, messages."""
    role = ("user", "assistant")[len(thread) % 2]

    def replies_to(parent: object, role: str) -> list[Message]:
        return [
            reply for reply in replies.get(parent, ()) if forms.role_of(reply.get("role")) == role
        ]

    fitting = replies_to(thread[-1]["message_id"] if thread else None, role)
    if role == "user":
        fitting = [reply for reply in fitting if replies_to(reply["message_id"], "assistant")]
        if thread and not fitting:
            yield lost, thread
    for place, reply in enumerate(sorted(fitting, key=_rank)):
        yield from _threads(replies, (*thread, reply), lost + place)


def _rank(message: Message) -> float:
    rank = message.get("rank")
    return math.inf if rank is None else float(rank)
