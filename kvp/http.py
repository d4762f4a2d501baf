"""A request to a server; whatever else is answered is one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http.client import HTTPException
from textwrap import shorten
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from kvp.errors import KvpError, UsageError, one_line
from kvp.plugins import reason_of

T = TypeVar("T")


def fetch(
    url: str, read: Callable[[bytes], T], body: Mapping[str, Any] | None = None, *,
    timeout: float = 600.0, api_key: str = "",
) -> T:  # fmt: skip
    """What `read` makes of a server's answer to GET or, with a `body` for JSON, to POST.

    `timeout` is that of every part of the answer, seconds. Redirections are not followed: `api_key`
    is for one server. Raises UsageError, in one line without the key, for what is no request and no
    answer with a status of 200 to 299, and where `read` fails.
    """
    opener = OpenerDirector()
    for handler in (ProxyHandler(), HTTPHandler(), HTTPSHandler()):  # any status is an answer
        opener.add_handler(handler)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError("an address is http://HOST:PORT or https://HOST, without a user")
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key has characters that no header holds")
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        with opener.open(Request(url, content, headers), timeout=timeout) as got:
            said = got.read()
        if 200 <= got.status < 300:
            return read(said)
        why = f"{got.status} {said[:2000].decode(errors='replace')}"
    except TimeoutError:
        why = f"no answer within {timeout:g} s"
    except (ArithmeticError, AttributeError, HTTPException, KvpError, LookupError, OSError,
            RecursionError, TypeError, ValueError) as error:  # fmt: skip
        why = f"no usable answer ({reason_of(error)})"
    line = f"{url}".partition("?")[0].rpartition("@")[2] + f": {why}"
    line = line.replace(str(api_key or "\0"), "...")
    raise UsageError(shorten(one_line(line), 300))
