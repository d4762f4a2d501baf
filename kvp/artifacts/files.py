"""Files written atomically, files of records, and copies between this disk and an object store.

After any crash a file has its old or its whole new content: it is written aside, flushed, renamed,
and the folder flushed as well. Of two writers of one path the later one wins. The user's umask
decides who may read it. In an object store one request writes a file, as a whole.

Artefacts of many small files (policies, checkpoints, results) are made in a folder on this disk and
sent when they are whole, and fetched before they are read. Trace stores stay where they lie.

A file of records holds JSON objects, one per line, each with its own checksum. All that a kill can
leave is one torn last line: readers leave it out, the next writer cuts it off. Damage anywhere else
is an error that names the file and the line. Imports no torch.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from weakref import WeakValueDictionary

from kvp.artifacts.addresses import ObjectPath, Place
from kvp.errors import KvpError, ResultsError

Record = dict[str, Any]

SEAL = "sha256"
"""Key under which a sealed object keeps the digest of all its other keys."""
CHECKSUM, _DIGITS = "checksum", 16
"""Key of the digest of a line, and how many of its digits stand there."""
_DAMAGED = "is damaged or not what kvp writes"
_PARTIAL = re.compile(r".+\.[0-9a-f]{8}\.partial", re.DOTALL)


class _Claim(Protocol):
    def check(self) -> None: ...


CLAIMED: WeakValueDictionary[Path, _Claim] = WeakValueDictionary()
"""Folders that this process writes (`kvp.artifacts.claim`), by their paths."""


def parse_json(text: bytes | str, **options: Any) -> Any:  # noqa: ANN401 - anything JSON can hold
    """A JSON value; ValueError where it is none or has a key twice, RecursionError if too deep."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(entries := dict(pairs)) < len(pairs):
            raise ValueError("a key is there twice")
        return entries

    return json.loads(text, object_pairs_hook=distinct, **options)


def digest_json(content: object) -> str:
    """SHA-256 (hex) of a JSON value, independent of key order and white space."""
    return _digest(json.loads(json.dumps(content, allow_nan=False)))


def _digest(plain: object) -> str:
    """Digest of a value as JSON gives it back."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal_json(content: Mapping[str, Any], key: str = SEAL, digits: int = 64) -> dict[str, Any]:
    """A JSON object with its own digest, or the first digits of it, under `key`."""
    assert key not in content, "already sealed"
    return {**content, key: digest_json(content)[:digits]}


def unseal(content: object, key: str = SEAL, digits: int = 64) -> dict[str, Any]:
    """A sealed object that was read, without its digest; ValueError where it was altered."""
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if key not in content:
        raise ValueError("no checksum in it")
    if content.pop(key) != _digest(content)[:digits]:
        raise ValueError("its checksum does not match its content")
    return content


@contextmanager
def raising_as(
    path: Place | str, error: type[KvpError], what: str = _DAMAGED, done: str = ""
) -> Iterator[None]:
    """Turn an exception of the block into `error`, whose message names `path` and says `what`.

    A KvpError passes. So does an OSError, unless `done` says what the block does: read or written.
    """
    try:
        yield
    except KvpError:
        raise
    except OSError as problem:
        if not done:
            raise
        missing = done == "read" and isinstance(problem, FileNotFoundError)
        why = "is missing" if missing else f"cannot be {done}: {problem.strerror or problem}"
        raise error(f"{path} {why}") from None
    except Exception as problem:
        first = next(iter(getattr(problem, "errors", list)()), None)  # the first one of pydantic's
        reason = first and f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        reason = " ".join((reason or f"{type(problem).__name__}: {problem}").split())[:200]
        raise error(f"{path} {what} ({reason})") from problem


def read_checked(path: Place, error: type[KvpError], digest: str | None = None) -> bytes:
    """A file's content; `error`, naming it, if it cannot be read or its SHA-256 is not `digest`."""
    with raising_as(path, error, done="read"):
        content = path.read_bytes()
    if digest not in (None, hashlib.sha256(content).hexdigest()):
        raise error(f"{path} is damaged: its checksum is not the one that was recorded")
    return content


def is_partial(name: str) -> bool:
    """Whether a file of this name, or path, is not complete."""
    return _PARTIAL.fullmatch(name) is not None


def check_claims(path: Place) -> None:
    """Raise the kind's error where a claimed folder above `path` was deleted, moved or replaced."""
    for claim in filter(None, map(CLAIMED.get, getattr(path, "parents", ()))):
        claim.check()


@contextmanager
def replacing(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """Yield a stream for new content; it takes the place of `path` unless the block fails.

    With `new` a file that is there stays as it is, and FileExistsError is raised.
    """
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    with naming(path):
        if path.exists() and not path.is_file() and not path.is_dir():  # /dev/null would be gone
            raise OSError(errno.EINVAL, "is no regular file: name another path", path)
        try:
            with partial.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            check_claims(path)
            if new:
                _create(partial, path)
            else:
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _create(partial: Path, path: Path) -> None:
    """Give a file its name; FileExistsError where there is one of that name."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links, where the last one wins
        partial.replace(path)


@contextmanager
def naming(path: Place) -> Iterator[None]:
    """Name the file in an OSError of the block: a write to a full disk does not say where.

    Libraries that write for the block may answer one by a RuntimeError (torch.save).
    """
    try:
        yield
    except (OSError, RuntimeError) as problem:
        cause: BaseException = problem
        while not isinstance(cause, OSError):
            if cause.__context__ is None:
                raise
            cause = cause.__context__
        check_claims(path)
        raise OSError(cause.errno, cause.strerror or str(cause), str(path)) from problem


def atomic_write_bytes(path: Place, content: bytes, *, new: bool = False) -> bool:
    """Write a file as a whole, or not at all: OSError, in an object store AddressError.

    With `new` a file that is there stays as it is, and the result is False: of several programs
    that create it at once, on this machine or others, one gets True.
    """
    if isinstance(path, ObjectPath):
        return path.write_bytes(content, new=new)
    another = suppress(FileExistsError) if new else nullcontext()
    with another, replacing(path, new=new) as stream:
        stream.write(content)
        return True
    return False


def copy_files(source: Place, target: Place, names: Iterable[str]) -> None:
    """Copy files, named by POSIX paths in `source`, in this order; missing ones are skipped."""
    for name in names:
        with suppress(FileNotFoundError):
            content = (source / name).read_bytes()
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(target / name, content)


def staging_folder(address: Place) -> Path:
    """Where all processes of this user on this machine make what goes to an address."""
    digest = hashlib.sha256(str(address.absolute()).encode()).hexdigest()
    return cache_folder() / "staging" / digest[:16]


def cache_folder() -> Path:
    """Where fetched artefacts are kept: `$XDG_CACHE_HOME/kvp`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvp"


@dataclass(frozen=True)
class JsonLines:
    """The records of one file; in an object store it is only read and replaced."""

    path: Place
    check: Callable[[Record], object] | None = None
    """Raises where a record is wrong; such a record is neither written nor read (ResultsError)."""

    def __iter__(self) -> Iterator[Record]:
        return (record for _, record in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Record]]:
        """Line numbers, from 1, and records; ResultsError where the file is missing or damaged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            raise ResultsError(f"{self.path} does not exist") from None
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            with raising_as(f"{self.path} line {number}", ResultsError, f"{_DAMAGED}; delete it"):
                record = unseal(parse_json(line), CHECKSUM, _DIGITS)
                if self.check is not None:
                    self.check(record)
            yield number, record

    def cut_torn_line(self) -> None:
        """Delete a torn last line; only for the file's writer."""
        if isinstance(self.path, Path) and self.path.exists():
            os.truncate(self.path, self.path.read_bytes().rfind(b"\n") + 1)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add records in one write and bring them to the disk."""
        assert isinstance(self.path, Path), "an object is only replaced as a whole"
        lines = b"".join(map(self._line, records))
        check_claims(self.path)
        with naming(self.path), self.path.open("ab") as stream:
            stream.write(lines)
            stream.flush()
            os.fsync(stream.fileno())

    def rewrite(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace all records, as a whole."""
        atomic_write_bytes(self.path, b"".join(map(self._line, records)))

    def _line(self, record: Mapping[str, Any]) -> bytes:
        plain = json.loads(json.dumps(record))  # as a reader sees it
        refused = "cannot hold a record, and nothing of it is written"
        with raising_as(self.path, ResultsError, refused):
            if self.check is not None:
                self.check(plain)
            text = json.dumps(seal_json(plain, CHECKSUM, _DIGITS), ensure_ascii=False)
            return text.encode() + b"\n"
