"""Samples' raw material from outside: JSONL files, hub data sets, folders of text.

A row is running text (`text`), a dialogue (`messages`: role and content), a question about a
context (`context`, `question`, `answer`, the columns of published RULER sets) or one message of a
tree (`message_id`, `parent_id`, the OpenAssistant export). Anything else is refused with its place.
Rows belong to splits by a hash of what they say, so equal rows never meet in two splits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvp.data.synthetic.needles import split_of
from kvp.errors import UsageError

Turn = Mapping[str, str]
_ROLES = {"user": "user", "prompter": "user", "human": "user", "assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Document:
    """One row, or one tree of rows, in one of three forms."""

    split: str
    """Split that owns it."""
    text: str = ""
    """Running text; empty in the other forms."""
    turns: tuple[Turn, ...] = ()
    """A dialogue: user and assistant in turn, the assistant last."""
    question: Mapping[str, Any] | None = None
    """A row with context, question and answer."""


def read_text(path: str, flag: str) -> str:
    """A text file, or all `*.txt` of a folder in the order of their names.

    Raises UsageError naming `flag` when there is none or it cannot be read.
    """
    place = Path(path)
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    if not files:
        raise UsageError(f"--{flag} {path}: no .txt file in this folder")
    try:
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--{flag} {path}: cannot be read as text ({error})") from error
    if not text.strip():
        raise UsageError(f"--{flag} {path}: there is no text in it")
    return text


def documents(data: str) -> list[Document]:
    """Everything in a JSONL file or a hub data set, in its order; a tree counts where it begins.

    `data` is a path that ends in `.jsonl`, or a name for `datasets.load_dataset`, a configuration
    behind a colon. All splits of a data set are read one after another.

    Raises:
        UsageError: no such file or data set, or a row of no known form; names file and line.
    """
    found: list[Document] = []
    trees: dict[str, list[Mapping[str, Any]]] = {}
    rows = _jsonl(Path(data)) if data.endswith(".jsonl") else _dataset(data)
    for place, row in rows:
        if "message_id" in row and "parent_id" in row and "text" in row:
            tree = str(row.get("message_tree_id") or row["message_id"])
            trees.setdefault(tree, []).append(row)
        else:
            found.append(_document(row, place))
    for tree, messages in trees.items():
        turns = best_thread(messages)
        if turns:
            found.append(Document(split=split_of(tree), turns=turns))
    if not found:
        raise UsageError(f"--data {data}: there is nothing in it")
    return found


def best_thread(messages: Iterable[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """The thread of a message tree that follows the best-ranked reply from the root on.

    Messages have `message_id`, `parent_id`, `role`, `text` and optionally `rank` (0 is best) and
    `deleted`. A final message of the user is dropped; empty when nothing is left.
    """
    replies: dict[object, list[Mapping[str, Any]]] = {}
    for message in messages:
        if not message.get("deleted"):
            replies.setdefault(message["parent_id"], []).append(message)
    thread = []
    parent: object = None
    while parent in replies:
        best = min(replies[parent], key=_rank)
        thread.append({"role": best["role"], "content": best["text"]})
        parent = best["message_id"]
    return alternating(thread)


def _rank(message: Mapping[str, Any]) -> float:
    rank = message.get("rank")
    return math.inf if rank is None else float(rank)


def alternating(turns: Sequence[Mapping[str, Any]]) -> tuple[Turn, ...]:
    """The longest start of a dialogue in which user and assistant take turns, assistant last.

    System messages are left out; a role of any other name ends the dialogue.
    """
    kept: list[Turn] = []
    for turn in turns:
        if turn["role"] == "system":
            continue
        role = _ROLES.get(turn["role"])
        if role != ("user", "assistant")[len(kept) % 2]:
            break
        kept.append({"role": role, "content": str(turn["content"])})
    return tuple(kept[: len(kept) // 2 * 2])


def _document(row: Mapping[str, Any], place: str) -> Document:
    if isinstance(messages := row.get("messages"), list):
        if not all(
            isinstance(turn, dict) and {"role", "content"} <= set(turn) for turn in messages
        ):
            raise UsageError(f"{place}: a message needs 'role' and 'content'")
        turns = alternating(messages)
        return Document(split=split_of(json.dumps(turns)), turns=turns)
    if isinstance(row.get("context"), str) and isinstance(row.get("question"), str):
        return Document(split=split_of(row["context"]), question=row)
    if isinstance(text := row.get("text"), str):
        return Document(split=split_of(text), text=text)
    columns = ", ".join(sorted(map(str, row))) or "none"
    raise UsageError(f"{place}: neither a 'text' nor a 'messages' column (columns: {columns})")


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                place = f"--data {path}, line {number}"
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UsageError(f"{place}: not JSON ({error})") from error
                if not isinstance(row, dict):
                    raise UsageError(f"{place}: not a JSON object")
                yield place, row
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--data {path}: cannot be read ({error})") from error


def _dataset(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from datasets import DatasetDict, load_dataset

    base, _, configuration = name.partition(":")
    try:
        loaded = load_dataset(base, configuration or None)
    except Exception as error:  # whatever a hub, a cache or a foreign file format can raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(
            f"--data {name}: not ruler, chat, a .jsonl file or a data set that loads ({reason})"
        ) from error
    parts = loaded if isinstance(loaded, DatasetDict) else {"data": loaded}
    for part, rows in parts.items():
        for number, row in enumerate(rows):
            yield f"--data {name}, {part} row {number}", row
