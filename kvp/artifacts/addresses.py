"""Where artefacts lie: a path on a disk, or an address in an object store.

The one place that knows what an address is: `s3://bucket/prefix` or `gs://bucket/prefix`. Code that
reads and writes whole files is the same for both: `ObjectPath` has methods of `pathlib.Path`.

obstore makes the requests. Credentials and endpoints come from the environment, as it reads them
(docs/scaling.md). Requests that fail (5xx, cut connections, no answer) are repeated with growing
pauses, for `KVP_RETRY_SECONDS`. An object appears whole or not at all, and a list shows what was
written before (S3 and GCS promise both). Imports no torch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from kvp.errors import AddressError, first_line
from kvp.plugins import require

T = TypeVar("T")

_ADDRESS = re.compile(r"(?P<scheme>[a-z][a-z0-9]+):/(?P<rest>/.*)", re.DOTALL)

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
}
"""Scheme of an address -> the environment variables of its credentials, for messages."""


@dataclass(frozen=True)
class ObjectPath:
    """A file or folder of an object store; a folder is there as long as an object lies below it.

    Methods that ask the store raise AddressError in one line once retries are spent.
    """

    root: str
    """The bucket (`s3://bucket`)."""
    key: str = ""
    """The path in it."""

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.root, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """Last part."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The folder it lies in; the bucket itself lies in itself."""
        return ObjectPath(self.root, self.key.rpartition("/")[0])

    def absolute(self) -> ObjectPath:
        """The path itself: every address is absolute."""
        return self

    def exists(self) -> bool:
        """Whether there is an object of this name."""
        return size_of(self) is not None

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there with its first object."""

    def read_bytes(self) -> bytes:
        """The whole object; raises FileNotFoundError where there is none."""
        return self.ask(lambda store: bytes(store.get(self.key).bytes()))

    def write_bytes(self, content: bytes, *, new: bool = False) -> bool:
        """Replace the object as a whole: readers see the old or the new one, never a part.

        With `new` it is only created: the result is False where an object of other content is there
        already. Of several programs that create it at once (`If-None-Match`), one gets True.
        """
        mode = "create" if new else "overwrite"
        try:
            self.ask(lambda store: store.put(self.key, content, mode=mode))
        except FileExistsError:  # or this request was repeated after an answer was lost
            return self.read_bytes() == content
        return True

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; one that is not there is no error."""
        with suppress(FileNotFoundError):
            self.ask(lambda store: store.delete(self.key))

    def ask(self, request: Callable[[Any], T]) -> T:
        """The answer of a store of obstore to a request that may be made twice.

        Repeats what obstore does not: answers that were cut short. FileNotFoundError of a single
        object and FileExistsError go through; the rest is an AddressError of one line.
        """
        require(self.root, "object-stores", "obstore", error=AddressError)
        from obstore.exceptions import AlreadyExistsError, GenericError

        end, pause = time.monotonic() + retry_seconds(), 0.1
        while True:
            try:
                return request(open_bucket(self.root, os.getpid()))
            except AddressError:
                raise
            except AlreadyExistsError:
                raise FileExistsError(f"{self} exists") from None
            except Exception as problem:
                text = str(problem)
                if isinstance(problem, FileNotFoundError) and "NoSuchBucket" not in text:
                    raise FileNotFoundError(f"{self} does not exist") from None
                passing = isinstance(problem, GenericError) and "status code: 4" not in text
                if not passing or time.monotonic() + pause > end:
                    credentials = _CREDENTIALS[self.root.partition(":")[0]]
                    raise AddressError(
                        f"{self}: the store could not be reached, or refused "
                        f"({first_line(problem, 300)}): check the bucket's name and {credentials}; "
                        "the same command continues once it answers"
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 15.0)


Place = Path | ObjectPath


def is_address(text: str) -> bool:
    """Whether a text has the form of an address; its scheme may be one that kvp does not know."""
    return _ADDRESS.fullmatch(text) is not None


def place(name: str | Place) -> Place:
    """The place of a path or an address; AddressError for an unknown kind or no bucket."""
    if not isinstance(name, str):
        return name
    if not (match := _ADDRESS.fullmatch(name)):
        return Path(name)
    scheme, rest = match["scheme"], match["rest"]
    if scheme not in _CREDENTIALS:
        schemes = ", ".join(f"{kind}://" for kind in _CREDENTIALS)
        raise AddressError(
            f"{name} is no address that kvp knows ({schemes}); hf download fetches what lies on "
            "the hub"
        )
    parts = [part for part in rest.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise AddressError(f"{name} is no address: write {scheme}://bucket/folder")
    return ObjectPath(f"{scheme}://{parts[0]}", "/".join(parts[1:]))


def size_of(path: Place) -> int | None:
    """Bytes of a file; None where there is no file of that name."""
    if isinstance(path, Path):
        return path.stat().st_size if path.is_file() else None
    try:
        return int(path.ask(lambda store: store.head(path.key)["size"])) if path.key else None
    except FileNotFoundError:  # it has no text: the bucket itself may be missing
        path.ask(lambda store: next(iter(store.list(chunk_size=1)), None))
        return None


def read_ranges(path: Place, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of a file in each span [start, stop); fewer where the file ends before `stop`."""
    if isinstance(path, ObjectPath):
        starts, ends = zip(*spans, strict=True)
        parts = path.ask(lambda store: store.get_ranges(path.key, starts=starts, ends=ends))
        return [*map(bytes, parts)]
    with open(path, "rb") as stream:
        return [os.pread(stream.fileno(), stop - start, start) for start, stop in spans]


def files_below(folder: Place) -> Iterator[tuple[str, int]]:
    """Relative POSIX path and bytes of each file in a folder; files that vanish are left out."""
    if isinstance(folder, ObjectPath):
        prefix = f"{folder.key}/" if folder.key else ""
        pages = folder.ask(lambda store: [*store.list(prefix or None)])
        yield from ((one["path"][len(prefix) :], one["size"]) for page in pages for one in page)
        return
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            with suppress(FileNotFoundError):
                yield path.relative_to(folder).as_posix(), path.stat().st_size


@lru_cache(maxsize=64)
def open_bucket(address: str, process: int) -> Any:  # noqa: ANN401 - a store of obstore
    """A bucket or folder as obstore knows it, once per process: a fork ends connections."""
    del process
    from obstore.store import from_url

    plain, yes = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"), ("1", "true")
    return from_url(
        address,
        client_options={
            "timeout": "10m",
            "read_timeout": "30s",
            "connect_timeout": "10s",
            "allow_http": plain or os.environ.get("AWS_ALLOW_HTTP", "").lower() in yes,
        },
        retry_config={
            "max_retries": 30,
            "retry_timeout": timedelta(seconds=retry_seconds()),
            "backoff": {"max_backoff": timedelta(seconds=15)},
        },
    )


def retry_seconds() -> float:
    """How long a request that fails is repeated."""
    text = os.environ.get("KVP_RETRY_SECONDS", "180")
    try:
        return float(text)
    except ValueError:
        raise AddressError(f"KVP_RETRY_SECONDS is no number of seconds: {text!r}") from None
