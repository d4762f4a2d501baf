"""A file of JSON objects, one per line, each with its own checksum.

Records are appended in one write and flushed, so all that a kill can leave is one torn last line:
readers leave it out, the next writer cuts it off. Damage anywhere else is an error that names the
file and the line. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvp.artifacts.addresses import Place
from kvp.artifacts.files import atomic_write_bytes, naming
from kvp.errors import ResultsError

Record = dict[str, Any]

CHECKSUM = "checksum"
"""Key of a line's checksum: the first 16 hex digits of the SHA-256 of all its other keys."""


class JsonLines:
    """The records of one file. Reading changes nothing; see `cut_torn_line` for writers.

    In an object store it is only read and replaced.
    """

    def __init__(self, path: Place) -> None:
        """Open nothing yet."""
        self.path = path

    def __iter__(self) -> Iterator[Record]:
        """Records in order, without their checksums; raises the error of `numbered`."""
        return (record for _, record in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Record]]:
        """Line numbers, from 1, and records.

        Raises:
            ResultsError: the file is missing, or a line but the torn last one is damaged.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise ResultsError(f"{self.path} does not exist") from None
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            yield number, self._record(number, line)

    def cut_torn_line(self) -> None:
        """Delete a torn last line; only for the file's writer."""
        if isinstance(self.path, Path) and self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records in one write and bring them to the disk."""
        assert isinstance(self.path, Path), "an object is only replaced as a whole"
        with naming(self.path), self.path.open("ab") as stream:
            stream.write(b"".join(map(_line, records)))
            stream.flush()
            os.fsync(stream.fileno())

    def rewrite(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace all records, as a whole."""
        atomic_write_bytes(self.path, b"".join(map(_line, records)))

    def _record(self, number: int, line: bytes) -> Record:
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is no JSON object")
            if record.pop(CHECKSUM, None) != _checksum(record):
                raise ValueError("its checksum differs")
        except (ValueError, RecursionError) as problem:
            raise ResultsError(
                f"{self.path} line {number} is damaged ({problem}); delete that line"
            ) from None
        return record


def _line(record: Mapping[str, Any]) -> bytes:
    assert CHECKSUM not in record, "a checksum is the file's own"
    plain = json.loads(json.dumps(record))  # as a reader sees it
    text = json.dumps({**plain, CHECKSUM: _checksum(plain)}, ensure_ascii=False)
    return text.encode() + b"\n"


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
