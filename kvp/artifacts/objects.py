"""The libraries of object stores: obstore for buckets, huggingface_hub for repositories.

Credentials and endpoints come from the environment, as these libraries read it (docs/scaling.md).
What fails for a while (5xx, cut connections, no answer) is asked again with growing pauses, for
`KVP_RETRY_SECONDS`; what fails for good is an AddressError of one line. An object appears whole or
not at all, and a list shows what was written before (S3 and GCS promise both).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from textwrap import shorten
from typing import Any

from kvp.errors import AddressError

RETRY_VARIABLE = "KVP_RETRY_SECONDS"
_RETRY_SECONDS = 180.0
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for another server, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT",
}


def read_only(address: str) -> str | None:
    """Why nothing can be written to an address, and what to do; None where it can be."""
    if not address.startswith("hf://"):
        return None
    return (
        f"{address}: kvp only reads from the hub; write to a local folder, then hf upload ORG/NAME "
        "FOLDER --repo-type dataset, or hf buckets sync FOLDER hf://buckets/ORG/NAME"
    )


@lru_cache(maxsize=64)
def opened(address: str, process: int) -> Any:  # noqa: ANN401 - a store of obstore, or the hub's
    """What the library of a bucket or repository calls it, or of a folder in it; once per process.

    Connections do not survive a fork. `opened.cache_clear()` has the environment read again.
    """
    del process
    if address.startswith("hf://"):
        from huggingface_hub import HfFileSystem

        return HfFileSystem(expand_info=False)
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


@contextmanager
def told(address: str) -> Iterator[None]:
    """Turn what a library raises into an AddressError of one line, with what to do.

    FileNotFoundError of a single object goes through.
    """
    try:
        yield
    except (AddressError, GeneratorExit):
        raise
    except ImportError:
        root = "/".join(address.split("/")[:3])
        raise AddressError(
            f"{root} needs the package obstore: pip install 'kvp-toolkit[object-stores]'"
        ) from None
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
