"""Requests to object stores: buckets by obstore, repositories of the hub by huggingface_hub.

Credentials and endpoints come from the environment, as these libraries read it (docs/scaling.md).
What fails for a while (5xx, cut connections, no answer) is asked again with growing pauses, for
`KVP_RETRY_SECONDS`; what fails for good is an AddressError of one line. An object appears whole or
not at all, and a list shows what was written before (S3 and GCS promise both).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvp.artifacts.addresses import read_only
from kvp.errors import AddressError

if TYPE_CHECKING:
    from zarr.abc.store import Store

T = TypeVar("T")

RETRY_VARIABLE = "KVP_RETRY_SECONDS"
_RETRY_SECONDS = 180.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
}


@dataclass(frozen=True)
class ObjectFacts:
    """What a store says about an object."""

    key: str
    size: int
    """Bytes."""
    modified: datetime
    """When it was last written, by the server's clock, to the second."""
    version: tuple[tuple[str, str], ...] = ()
    """What tells this content from a later one, for `write_if`: `e_tag`, `version`."""


class Objects(Protocol):
    """A bucket; keys are paths in it. All raise AddressError when it cannot be asked."""

    def facts(self, key: str) -> ObjectFacts | None:
        """Size and time of an object, None where there is none."""

    def listed(self, folder: str) -> Iterator[ObjectFacts]:
        """All objects below a folder."""

    def read(self, key: str) -> bytes:
        """A whole object; FileNotFoundError where there is none."""

    def write(self, key: str, content: bytes) -> None:
        """Write a whole object."""

    def write_if(self, key: str, content: bytes, there: ObjectFacts | None) -> bool:
        """Write unless another writer was quicker.

        The object must still be the one of `there`, or absent for None; False, and nothing
        written, otherwise.
        """

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""

    def zarr_store(self, folder: str) -> Store:
        """A folder as a read-only store of zarr."""


def opened(root: str) -> Objects:
    """The bucket of an address without a path (`s3://bucket`), opened once per process."""
    return _opened(root, os.getpid())


@lru_cache(maxsize=64)
def _opened(root: str, process: int) -> Objects:
    del process  # connections do not survive a fork
    return HubFiles(root) if root.startswith("hf://") else Bucket(root)


def forget_connections() -> None:
    """Open every bucket anew when it is used next, with what the environment says by then."""
    _opened.cache_clear()


class Bucket:
    """A bucket of S3 or of a server that speaks its protocol, or of Google Cloud Storage."""

    def __init__(self, root: str) -> None:
        """Ask nothing yet; AddressError where obstore is not installed or the address is none."""
        try:
            import obstore
        except ImportError:
            raise AddressError(
                f"{root} needs the package obstore: pip install 'kvp-toolkit[object-stores]'"
            ) from None
        self._root = root
        self._api = obstore
        self._store = self._opened(root)
        self._answered = False
        """Whether the bucket has answered: it exists then."""

    def _opened(self, address: str) -> Any:  # noqa: ANN401 - one class per kind of store
        from obstore.store import from_url

        with told(address):
            return from_url(
                address,
                client_options={
                    "timeout": "10m",
                    "read_timeout": "30s",
                    "connect_timeout": "10s",
                    "allow_http": _allow_http(),
                },
                retry_config={
                    "max_retries": 30,
                    "retry_timeout": timedelta(seconds=retry_seconds()),
                    "backoff": {"max_backoff": timedelta(seconds=15)},
                },
            )

    def facts(self, key: str) -> ObjectFacts | None:
        """As `Objects`."""
        try:
            found = _facts(self._ask(key, lambda: self._api.head(self._store, key)))
        except FileNotFoundError:
            if not self._answered:  # this answer has no text: it may be the bucket that is missing
                next(self.listed(key), None)
            return None
        self._answered = True
        return found

    def listed(self, folder: str) -> Iterator[ObjectFacts]:
        """As `Objects`."""
        patience, prefix, last = Patience(), f"{folder}/" if folder else None, None
        with told(self._address(folder)):
            while True:
                try:
                    for batch in self._api.list(self._store, prefix=prefix, offset=last):
                        for entry in batch:
                            last = entry["path"]
                            yield _facts(entry)
                    break
                except self._api.exceptions.BaseError as problem:
                    time.sleep(patience.pause(problem))
        self._answered = True

    def read(self, key: str) -> bytes:
        """As `Objects`."""

        def content() -> bytes:
            return bytes(self._api.get(self._store, key).bytes())

        return self._ask(key, content)

    def write(self, key: str, content: bytes) -> None:
        """As `Objects`."""
        self._ask(key, lambda: self._api.put(self._store, key, content))

    def write_if(self, key: str, content: bytes, there: ObjectFacts | None) -> bool:
        """As `Objects`."""
        mode: Any = "create" if there is None else dict(there.version)
        errors = self._api.exceptions

        def write() -> bool:
            try:
                self._api.put(self._store, key, content, mode=mode, use_multipart=False)
            except (errors.AlreadyExistsError, errors.PreconditionError):
                return False
            return True

        try:
            return self._ask(key, write)
        except FileNotFoundError:  # what was there has been deleted meanwhile
            return False

    def delete(self, key: str) -> None:
        """As `Objects`."""
        with suppress(FileNotFoundError):
            self._ask(key, lambda: self._api.delete(self._store, key))

    def zarr_store(self, folder: str) -> Store:
        """As `Objects`."""
        from zarr.storage import ObjectStore

        return ObjectStore(self._opened(self._address(folder)), read_only=True)

    def _ask(self, key: str, request: Callable[[], T]) -> T:
        """The answer to a request that may be made twice."""
        patience = Patience()
        with told(self._address(key)):
            while True:
                try:
                    return request()
                except self._api.exceptions.BaseError as problem:
                    time.sleep(patience.pause(problem))

    def _address(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


class HubFiles:
    """A repository or a bucket of the Hugging Face hub, read through its file system; read-only."""

    def __init__(self, root: str) -> None:
        """Ask nothing yet."""
        from huggingface_hub import HfFileSystem

        self._root = root
        self._files: Any = HfFileSystem(expand_info=False)

    def facts(self, key: str) -> ObjectFacts | None:
        """As `Objects`; no time."""
        try:
            with told(self._address(key)):
                found = self._files.info(self._address(key))
        except FileNotFoundError:
            return None
        return _hub_facts(key, found) if found["type"] == "file" else None

    def listed(self, folder: str) -> Iterator[ObjectFacts]:
        """As `Objects`."""
        try:
            with told(self._address(folder)):
                found = self._files.find(self._address(folder), detail=True)
        except FileNotFoundError:
            return
        start = len(self._root.removeprefix("hf://")) + 1
        for path, entry in found.items():
            yield _hub_facts(path[start:], entry)

    def read(self, key: str) -> bytes:
        """As `Objects`."""
        with told(self._address(key)):
            content: bytes = self._files.cat_file(self._address(key))
            return content

    def write(self, key: str, content: bytes) -> None:
        """Refused."""
        raise AddressError(str(read_only(self._address(key))))

    def write_if(self, key: str, content: bytes, there: ObjectFacts | None) -> bool:
        """Refused."""
        raise AddressError(str(read_only(self._address(key))))

    def delete(self, key: str) -> None:
        """Refused."""
        raise AddressError(str(read_only(self._address(key))))

    def zarr_store(self, folder: str) -> Store:
        """As `Objects`."""
        from zarr.storage import FsspecStore

        address = self._address(folder).removeprefix("hf://")
        return FsspecStore.from_mapper(self._files.get_mapper(address), read_only=True)

    def _address(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


class Patience:
    """Repeats what obstore does not: requests whose answer was cut short."""

    def __init__(self) -> None:
        """Begin the time of one request, its repetitions by obstore included."""
        self._end = time.monotonic() + retry_seconds()
        self._next = 0.1

    def pause(self, problem: Exception) -> float:
        """Seconds to wait before asking again; raises `problem` where that is no use, or late."""
        text = str(problem)
        passing = type(problem).__name__ == "GenericError" and "status code: 4" not in text
        if not passing or time.monotonic() + self._next > self._end:
            raise problem
        pause, self._next = self._next, min(2 * self._next, 15.0)
        return pause


def retry_seconds() -> float:
    """How long a request that fails is repeated; AddressError where the variable is no number."""
    text = os.environ.get(RETRY_VARIABLE, str(_RETRY_SECONDS))
    try:
        return max(float(text), 0.0)
    except ValueError:
        raise AddressError(f"{RETRY_VARIABLE} is no number of seconds: {text!r}") from None


def _allow_http() -> bool:
    """Whether the environment asks for a server without TLS."""
    named = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return named or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


@contextmanager
def told(address: str) -> Iterator[None]:
    """Turn what a library raises into an AddressError of one line, with what to do.

    FileNotFoundError of a single object goes through.
    """
    try:
        yield
    except (AddressError, GeneratorExit):
        raise
    except Exception as problem:
        text = str(problem)
        if isinstance(problem, FileNotFoundError) and not _missing_root(text):
            raise FileNotFoundError(f"{address} does not exist") from None
        raise AddressError(f"{address}: {_reason(address, problem, text)}") from None


def _missing_root(text: str) -> bool:
    """Whether an error says that there is no bucket or repository of that name."""
    return any(word in text for word in ("NoSuchBucket", "Repository Not Found", "(repository"))


def _reason(address: str, problem: Exception, text: str) -> str:
    """Why a request failed, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    scheme = address.partition(":")[0]
    response = problem.response if isinstance(problem, HfHubHTTPError) else None
    status = re.search(r"status code: (\d+)", text)
    code = response.status_code if response is not None else int(status[1]) if status else 0
    if _missing_root(text):
        return "there is no such bucket or repository that you may see; make it, or mend the name"
    if isinstance(problem, OfflineModeIsEnabled):
        return "the hub is not asked while HF_HUB_OFFLINE is set"
    if code in (401, 403) or "PermissionDenied" in type(problem).__name__:
        access = _CREDENTIALS.get(scheme, "HF_TOKEN, or log in with `hf auth login`")
        return f"access denied (check {access})"
    if "169.254.169.254" in text or "metadata.google" in text:
        return f"no credentials were found (set {_CREDENTIALS.get(scheme, 'HF_TOKEN')})"
    first = shorten((text.strip().splitlines() or [""])[0], 300, placeholder=" ...")
    return (
        f"the store could not be reached, or refused ({first or type(problem).__name__}); "
        "the same command continues once it answers"
    )


def _facts(entry: Any) -> ObjectFacts:  # noqa: ANN401 - obstore's dictionary
    version = tuple((name, entry[name]) for name in ("e_tag", "version") if entry[name])
    return ObjectFacts(entry["path"], entry["size"], entry["last_modified"], version)


def _hub_facts(key: str, entry: Any) -> ObjectFacts:  # noqa: ANN401 - fsspec's dictionary
    return ObjectFacts(key, int(entry["size"]), _EPOCH)
