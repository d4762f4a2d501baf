"""A request to a server: bounded in time and size, and whatever else is answered is one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from http.client import HTTPException, IncompleteRead
from textwrap import shorten
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from kvp.errors import KvpError, UsageError, one_line
from kvp.plugins import reason_of

T = TypeVar("T")
MOST_BYTES = 2**26
"""Of an answer."""


def fetch(
    url: str, read: Callable[[bytes], T], body: Mapping[str, Any] | None = None, *,
    timeout: float = 600.0, api_key: str = "",
) -> T:  # fmt: skip
    """What `read` makes of a server's answer to GET or, with a `body` for JSON, to POST.

    `timeout`, seconds, is that of the whole request. Redirections are not followed: `api_key` is
    for one server. Raises UsageError, in one line without the key, for what is no request and no
    answer of at most `MOST_BYTES` with a status of 200 to 299, and where `read` fails.
    """
    answer: Future[tuple[int, bytes]] = Future()
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError("an address is http://HOST:PORT or https://HOST, without a user")
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key has characters that no header holds")
        if not 0 < timeout < 1e9:
            raise ValueError(f"a timeout is some seconds, not {timeout!r}")
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        asked = Request(url, content, headers), timeout, answer
        Thread(target=_exchange, args=asked, daemon=True).start()
        status, said = answer.result(timeout)
        if 200 <= status < 300:
            return read(said)
        why = f"{status} {said[:2000].decode(errors='replace')}"
    except TimeoutError:
        why = f"no answer within {timeout:g} s"
    except (ArithmeticError, AttributeError, HTTPException, KvpError, LookupError, OSError,
            RecursionError, TypeError, ValueError) as error:  # fmt: skip
        why = f"no usable answer ({reason_of(error)})"
    line = f"{url}".partition("?")[0].rpartition("@")[2] + f": {why}"
    line = line.replace(str(api_key or "\0"), "...")
    raise UsageError(shorten(one_line(line), 300))


def _exchange(request: Request, timeout: float, answer: Future[tuple[int, bytes]]) -> None:
    """Send a request, in a thread that nobody waits for when the time is over."""
    opener, read = OpenerDirector(), bytearray()
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler()):  # any status is an answer
        opener.add_handler(handler)
    try:
        end = time.monotonic() + timeout
        with opener.open(request, timeout=timeout) as got:
            while time.monotonic() < end and (part := got.read(2**12)):
                read += part
                if len(read) > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES} bytes")
            if got.length:
                raise IncompleteRead(b"", got.length)
        answer.set_result((got.status, bytes(read)))
    except BaseException as error:
        answer.set_exception(error)
