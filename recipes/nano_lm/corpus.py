"""Reads a folder of text into documents, split into training and held-out ones.

Every `.txt` file is one document, every `.jsonl` record another: its `messages` (role, content),
its `turns` (speaker, text) or its `text`. Files whose name says `valid`, `dev` or `test` are held
out whole, and so is one further document in sixteen by a stable hash. Licences and other file
formats are skipped; nothing is cleaned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_NAMES = ("valid", "dev", "test")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: a plain text, or a dialogue when `messages` is given."""

    source: str
    """File stem, for reports by source."""
    text: str
    """Plain text; empty for a dialogue."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Turns of a dialogue, `role` in user or assistant, and `content`."""
    held_out: bool = False
    """Never trained on, neither by the tokenizer nor by the model."""


def read_documents(folders: Sequence[Path]) -> Iterator[Document]:
    """All documents below `folders`, in a stable order.

    Raises FileNotFoundError when a folder does not exist or holds no text.
    """
    files = sorted(
        path
        for folder in folders
        for child in [folder, *sorted(p for p in folder.iterdir() if p.is_dir())]
        for path in child.iterdir()
        if path.suffix in {".txt", ".jsonl"} and not path.stem.lower().startswith("license")
    )
    if not files:
        raise FileNotFoundError(f"no .txt or .jsonl file in {', '.join(map(str, folders))}")
    for path in files:
        whole = any(name in path.stem.lower() for name in HELD_OUT_NAMES)
        for index, (text, messages) in enumerate(_records(path)):
            held_out = whole or _hash16(f"{path.name}:{index}") == 0
            yield Document(source=path.stem, text=text, messages=messages, held_out=held_out)


def _hash16(name: str) -> int:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()[0] % 16


def _records(path: Path) -> Iterator[tuple[str, tuple[Mapping[str, str], ...]]]:
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8", errors="replace"), ()
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if "messages" in record:
                yield "", tuple(record["messages"])
            elif "turns" in record:
                yield "", tuple(_turns(record["turns"]))
            elif "text" in record:
                yield record["text"], ()


def _turns(turns: Sequence[Sequence[str]]) -> Iterator[Mapping[str, str]]:
    for index, (_, text) in enumerate(turns):
        yield {"role": "assistant" if index % 2 else "user", "content": text}
