"""One buffer of several processes: a folder with a file per sequence, made by one, read by all.

The processes of `--devices` train on different contexts, which in time are of all sequences. A
sequence is traced by the process that needs it first, under a lock; the others wait for its file
and map it into memory, so a machine holds it once. A file is written in one step and is a function
of the run and of the sequence's number, so that a run that was killed goes on with the files that
are there. What is left out: which sequences are still needed (`train.online.training_data`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from kvp.artifacts.locks import FileLock
from kvp.artifacts.tensors import read_safetensors, read_safetensors_header, write_safetensors
from kvp.errors import StoreError
from kvp.ranks import Rank
from kvp.store import SequenceRecord, Trace
from train.online.shared_work import SharedWork

Attention = tuple[str, int, int]
"""Label, prefix length and stop of one importance."""
Entry = tuple[Trace, dict[Attention, Tensor]]
"""What is kept of a sequence: its trace, and importance by point, [L, H, N] float32."""
Make = Callable[[Iterable[int]], Iterable[tuple[int, Entry]]]
"""Makes sequences, several at a time; yields them by number in the order in which they end."""

_TENSORS = ("queries", "keys", "values")
_LABEL, _ATTENTION = "label ", "attention "
"""What names of the other tensors begin with."""


class SharedBuffer:
    """The sequences of a run by number; every process of the run has one of the same folder."""

    def __init__(self, folder: Path, rank: Rank, *, together: int) -> None:
        """Touch nothing yet.

        `rank` says which sequences this process makes first, `together` how many at a time.
        """
        self._folder = folder
        self._rank = rank
        self._together = together
        self._deleted_below = 0

    def get(self, number: int, make: Make, following: Sequence[int] = ()) -> Entry:
        """One sequence; if it is not there, it is made with some of those `following` it.

        Waits while another process makes it. Raises StoreError where its file is damaged or cannot
        be written.
        """
        entry = self._read(self._path(number))
        while entry is None:
            self._work(make).one(number, following)
            entry = self._read(self._path(number))
        return entry

    def make_all(self, numbers: Sequence[int], make: Make) -> None:
        """See to it that sequences are there, each made by one process; waits until all are."""
        self._work(make).all(numbers)

    def delete_below(self, number: int) -> None:
        """Delete the sequences of lower numbers."""
        for passed in range(self._deleted_below, number):
            self._path(passed).unlink(missing_ok=True)
        self._deleted_below = max(number, self._deleted_below)

    def _work(self, make: Make) -> SharedWork:
        def written(numbers: Iterable[int]) -> Iterator[int]:
            for number, entry in make(numbers):
                self._write(number, entry)
                yield number

        return SharedWork(
            is_there=lambda number: self._path(number).exists(),
            claim=self._lock,
            make=written,
            together=self._together,
            rank=self._rank,
        )

    def _lock(self, number: int) -> FileLock | None:
        try:
            self._folder.mkdir(exist_ok=True)
            return FileLock.take(self._folder / f"{number:06d}.lock")
        except OSError as problem:
            raise StoreError(f"{self._folder} cannot be locked: {problem.strerror}") from None

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.safetensors"

    def _write(self, number: int, entry: Entry) -> None:
        trace, attention = entry
        tensors = {name: getattr(trace, name) for name in _TENSORS}
        tensors |= {f"{_LABEL}{name}": label for name, label in trace.labels.items()}
        tensors |= {f"{_ATTENTION}{json.dumps(at)}": value for at, value in attention.items()}
        written = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        record = json.dumps(trace.record.to_dict())
        try:
            write_safetensors(self._path(number), written, {"record": record})
        except OSError as problem:
            raise StoreError(f"cannot write {problem.filename}: {problem.strerror}") from None

    def _read(self, path: Path) -> Entry | None:
        """The content of a file, mapped into memory; None where there is none."""
        try:
            header = read_safetensors_header(path, StoreError)
            tensors = read_safetensors(path, StoreError)
        except StoreError:
            if not path.exists():  # also where another process deletes it meanwhile
                return None
            raise
        trace = Trace(
            record=SequenceRecord.from_dict(json.loads(header["record"])),
            queries=tensors.get("queries"),
            keys=tensors["keys"],
            values=tensors["values"],
            labels=_named(tensors, _LABEL),
        )
        points = {tuple(json.loads(at)): v for at, v in _named(tensors, _ATTENTION).items()}
        return trace, {(str(at[0]), int(at[1]), int(at[2])): v for at, v in points.items()}


def _named(tensors: dict[str, Tensor], beginning: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(beginning): tensor
        for name, tensor in tensors.items()
        if name.startswith(beginning)
    }
