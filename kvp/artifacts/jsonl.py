"""A file of JSON objects, one per line, each with its own checksum.

Records are appended in one write and flushed, so all that a kill can leave is one torn last line:
readers leave it out, the next writer cuts it off. Damage anywhere else is an error that names the
file and the line, and so is a record that is there twice. Imports no torch.
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
from kvp.errors import KvpError, ResultsError

Record = dict[str, Any]

CHECKSUM = "checksum"
"""Key of a line's checksum: the first 16 hex digits of the SHA-256 of all its other keys."""


class JsonLines:
    """The records of one file. Reading changes nothing; see `cut_torn_line` for writers.

    In an object store it is only read and replaced.
    """

    def __init__(self, path: Place, error: type[KvpError] = ResultsError) -> None:
        """Open nothing yet; `error` is raised on damage."""
        self.path = path
        self._error = error

    def __iter__(self) -> Iterator[Record]:
        """Records in order, without their checksums; raises the error of `numbered`."""
        return (record for _, record in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Record]]:
        """Line numbers, from 1, and records.

        Raises:
            KvpError: the file is missing, or a line but the torn last one is damaged or repeated.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise self._error(f"{self.path} does not exist") from None
        lines: dict[str, int] = {}
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            record, checksum = self._record(number, line)
            first = lines.setdefault(checksum, number)
            if first != number:
                raise self._damaged(number, f"repeats line {first}")
            yield number, record

    @property
    def torn(self) -> bool:
        """Whether the last line has no end."""
        return self.path.exists() and self.path.read_bytes()[-1:] not in (b"", b"\n")

    def cut_torn_line(self) -> None:
        """Delete a torn last line; only for the file's writer."""
        if isinstance(self.path, Path) and self.torn:
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

    def _record(self, number: int, line: bytes) -> tuple[Record, str]:
        """A line's record and the checksum of its content."""
        try:
            record = json.loads(line)
        except ValueError:
            raise self._damaged(number, "is damaged") from None
        if not isinstance(record, dict):
            raise self._damaged(number, "is no record")
        written = record.pop(CHECKSUM, None)
        checksum = _checksum(record)
        if written != checksum:
            how = "it has no checksum" if written is None else "its checksum differs"
            raise self._damaged(number, f"is damaged: {how}")
        return record, checksum

    def _damaged(self, number: int, how: str) -> KvpError:
        return self._error(f"{self.path} line {number} {how}; delete that line")


def _line(record: Mapping[str, Any]) -> bytes:
    assert CHECKSUM not in record, "a checksum is the file's own"
    plain = json.loads(json.dumps(record))  # as a reader sees it
    text = json.dumps({**plain, CHECKSUM: _checksum(plain)}, ensure_ascii=False)
    return text.encode() + b"\n"


def _checksum(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
