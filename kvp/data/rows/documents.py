"""Everything in a file, a folder or a hub data set as documents, and what had to be skipped.

Rows belong to splits by a hash of their content, so equal rows never meet in two splits; trees by
a hash of their id, all threads of one together; a running text by position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvp.data.rows.cells import RowError
from kvp.data.rows.files import TEXT_SUFFIXES, files_of, read_rows, read_text, share_of
from kvp.data.rows.forms import ACCEPTED, Document, document_of
from kvp.data.rows.ruler_rows import published_form
from kvp.data.rows.tally import EVERY_ROW, RowChoice, Skipped, Tally, listed
from kvp.data.rows.trees import (
    Message,
    check_message,
    is_message,
    is_tree,
    nested_messages,
    threads,
    tree_names,
)
from kvp.data.synthetic.text import SPLITS, split_of
from kvp.errors import UsageError


@dataclass(frozen=True)
class Documents:
    """Documents of some data, and a count of the rows that are none."""

    usable: tuple[Document, ...]
    tally: Tally

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Rows that cannot be used."""
        return tuple(self.tally.skipped)

    def note(self) -> str | None:
        """One line on the rows that were skipped or not chosen, None without any."""
        return self.tally.note()


def read_documents(
    data: str,
    flag: str = "data",
    columns: Mapping[str, str] | None = None,
    choice: RowChoice = EVERY_ROW,
) -> Documents:
    """Everything in `data` that is chosen, in its order; message trees follow the other rows.

    `columns` renames columns of every row first: new name -> the file's. Raises UsageError naming
    `flag`: no such data, nothing in it, or no row that can be used.
    """
    path = Path(data)
    if path.suffix.lower() in TEXT_SUFFIXES or _only_texts(path):
        return _texts(data, flag)
    tally = Tally(choice=choice, columns=columns)
    messages: list[tuple[str, Message]] = []
    usable: list[Document] = []

    def documents(location: str, row: Mapping[str, Any]) -> list[Document]:
        if not is_message(row):
            return _of_row(row, location, path, choice)
        check_message(row)
        messages.append((location, row))
        return []

    for _, made in tally.parsed(read_rows(data, flag), documents):
        usable += made
    _add_trees(messages, usable, tally.skipped, choice)
    tally.check(f"--{flag} {data}")
    if not usable:
        raise UsageError(
            f"--{flag} {data}: none of its {tally.rows} rows can be used: "
            f"{listed(tally.skipped[:1])}; accepted columns are {ACCEPTED} (docs/data.md)"
        )
    return Documents(tuple(usable), tally)


def _of_row(row: Mapping[str, Any], location: str, data: Path, choice: RowChoice) -> list[Document]:
    """The documents of a row that stands for itself."""
    if is_tree(row):
        return _threads(list(nested_messages(row["prompt"])), _tree_name(row), location, choice)
    form = published_form(row, f"{data}/{location}")
    return [replace(document_of(form), location=location)]


def _add_trees(
    messages: Sequence[tuple[str, Message]],
    usable: list[Document],
    skipped: list[Skipped],
    choice: RowChoice,
) -> None:
    trees: dict[str, list[tuple[str, Message]]] = {}
    for name, member in zip(tree_names([one for _, one in messages]), messages, strict=True):
        trees.setdefault(name, []).append(member)
    for name, members in trees.items():
        location = members[0][0]
        try:
            usable += _threads([message for _, message in members], name, location, choice)
        except (RowError, RecursionError) as error:  # ids in a circle
            skipped += [(location, str(error)) for location, _ in members]


def _threads(
    messages: Sequence[Message], name: str | None, location: str, choice: RowChoice
) -> list[Document]:
    """The first threads of one message tree, all of one split."""
    found = list(threads(messages))[: None if choice.all_threads else 1]
    if not found:
        raise RowError("is of a message tree without a reply")
    name = name or json.dumps(found[0])
    split = split_of(name)
    return [Document(split=split, turns=turns, location=location, tree=name) for turns in found]


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
    usable = [
        Document(split=split, text=part, long=True, location=Path(data).name)
        for split in SPLITS
        if (part := share_of(whole, split))
    ]
    return Documents(tuple(usable), Tally(rows=1))
