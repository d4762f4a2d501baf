"""Everything in a file, a folder or a hub data set as documents, and what had to be skipped.

Rows belong to splits by a hash of what they say, so equal rows never meet in two splits; trees by
a hash of their id; a running text by position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvp.data.rows.files import TEXT_SUFFIXES, Unreadable, files_of, read_rows
from kvp.data.rows.forms import ACCEPTED, Document, RowError, document_of
from kvp.data.rows.trees import (
    Message,
    best_thread,
    check_message,
    is_message,
    is_tree,
    nested_messages,
    root_of,
)
from kvp.data.synthetic.needles import SPLITS, split_of
from kvp.data.text_files import read_text, share_of
from kvp.errors import UsageError

Skipped = tuple[str, str]
"""Place of a row and why it cannot be used ("line 7", "has no text")."""
_NAMED = 3
"""Skipped rows that are named in a message."""


@dataclass(frozen=True)
class Documents:
    """What was read."""

    found: tuple[Document, ...]
    rows: int
    """Rows read, good and bad."""
    skipped: tuple[Skipped, ...]

    def note(self) -> str | None:
        """One line on the rows that were skipped, None without any."""
        if not self.skipped:
            return None
        return f"skipped {len(self.skipped)} of {self.rows} rows: {listed(self.skipped)}"


def listed(skipped: Sequence[Skipped]) -> str:
    """The first few places with their reasons, and how many more there are."""
    named = ", ".join(f"{place} {reason}" for place, reason in skipped[:_NAMED])
    more = len(skipped) - _NAMED
    return f"{named} and {more} more" if more > 0 else named


def read_documents(data: str, flag: str = "data") -> Documents:
    """Everything in `data`, in its order; message trees follow the other rows.

    Raises UsageError naming `flag`: no such data, nothing in it, or no row that can be used.
    """
    path = Path(data)
    if path.suffix.lower() in TEXT_SUFFIXES or _only_texts(path):
        return _texts(data, flag)
    found: list[Document] = []
    skipped: list[Skipped] = []
    messages: list[tuple[str, Message]] = []
    rows = 0
    for place, row in read_rows(data, flag):
        rows += 1
        try:
            if isinstance(row, Unreadable):
                raise RowError(row.reason)
            if is_message(row):
                check_message(row)
                messages.append((place, row))
            elif is_tree(row):
                found.append(_tree(list(nested_messages(row)), _tree_name(row), place))
            else:
                found.append(replace(document_of(row), place=place))
        except RowError as error:
            skipped.append((place, str(error)))
    _add_trees(messages, found, skipped)
    if not rows:
        raise UsageError(f"--{flag} {data}: there is nothing in it")
    if not found:
        raise UsageError(
            f"--{flag} {data}: none of its {rows} rows can be used: {listed(skipped[:1])}; "
            f"accepted columns are {ACCEPTED} (docs/data.md)"
        )
    return Documents(tuple(found), rows, tuple(skipped))


def _add_trees(
    messages: Sequence[tuple[str, Message]], found: list[Document], skipped: list[Skipped]
) -> None:
    parents = {message["message_id"]: message.get("parent_id") for _, message in messages}
    trees: dict[str, list[tuple[str, Message]]] = {}
    for place, message in messages:
        trees.setdefault(root_of(message, parents), []).append((place, message))
    for name, members in trees.items():
        place = members[0][0]
        try:
            found.append(_tree([message for _, message in members], name, place))
        except RowError as error:
            skipped += [(place, str(error)) for place, _ in members]


def _tree(messages: Sequence[Message], name: str | None, place: str) -> Document:
    turns = best_thread(messages)
    if not turns:
        raise RowError("is of a message tree without a reply")
    return Document(split=split_of(name or json.dumps(turns)), turns=turns, place=place)


def _tree_name(row: Mapping[str, object]) -> str | None:
    name = row.get("message_tree_id")
    return str(name) if name else None


def _only_texts(path: Path) -> bool:
    return (
        path.is_dir()
        and any(path.glob("*.txt"))
        and not files_of(path)
        and not (path / "state.json").is_file()
        and not (path / "dataset_dict.json").is_file()
    )


def _texts(data: str, flag: str) -> Documents:
    """A running text as one document per split, shared out by position."""
    whole = read_text(data, flag)
    found = [
        Document(split=split, text=part, long=True, place=Path(data).name)
        for split in SPLITS
        if (part := share_of(whole, split))
    ]
    return Documents(tuple(found), 1, ())
