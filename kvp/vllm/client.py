r"""A client of a vLLM server with kvp's connector: remember a context once, ask it often.

    client = Client("http://127.0.0.1:8000")
    manual = client.remember(open("manual.txt").read(), budget="12.5%")
    print(client.ask("\n\nHow is the filter changed? Answer:"))

Everything goes through the server's own interface, so any OpenAI client can do the same: a question
is a completion whose prompt is `Remembered.prompt(...)`, token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvp.errors import UsageError
from kvp.http import fetch
from kvp.messages import Text, check_messages, check_text

T = TypeVar("T")
_TOKENS = 4
"""Tokens that a request to remember decodes: what was compressed comes after the first."""


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """A context that the server goes on from."""

    text: Text
    digest: str
    tokens: int
    """Of the context; the server counts `kept` of them in `usage`."""
    kept: int
    token_ids: Sequence[int]
    """The context's own tokens, [tokens]."""
    placeholders: Sequence[int]
    """What stands for it in a prompt, [kept]."""


class Client:
    """Talks to one server; UsageError, in one line, on what it refuses or answers wrongly."""

    def __init__(
        self, url: str, model: str | None = None, *, timeout: float = 600.0, api_key: str = ""
    ) -> None:
        """`url` without `/v1`; `model` as the server calls it, or the one that it serves.

        `timeout`, seconds, is that of every part of an answer, `api_key` the server's `--api-key`.
        """
        self._url = str(url).rstrip("/").removesuffix("/v1")
        self._options: dict[str, Any] = {"timeout": timeout, "api_key": api_key}
        self.model = model or self._send(
            "/v1/models", lambda got: check_text(got["data"][0]["id"] or None, "what it wrote")
        )
        self.remembered: Remembered | None = None
        """The context that was remembered last."""

    def remember(self, text: Text, budget: str = "12.5%") -> Remembered:
        """Let the server read `text` once and keep `budget` of it."""
        ids = self._tokens(text)
        self.remembered = self._send(
            "/v1/completions",
            lambda got: _read_context(
                (got.get("kv_transfer_params") or {}).get("kvp_context"), text, ids
            ),
            {
                "model": self.model, "prompt": ids, "temperature": 0,
                "max_tokens": _TOKENS, "min_tokens": _TOKENS,
                "kv_transfer_params": {"kvp_compress": budget},
            },
        )  # fmt: skip
        return self.remembered

    def prompt(self, question: str, context: Remembered | None = None) -> list[int]:
        """Token ids of a question about a context, for any client.

        After messages the question is the user's next message, in the model's template.
        """
        about = context or self.remembered
        if about is None:
            raise UsageError("nothing was remembered yet: call remember(text) first")
        if isinstance(about.text, str):
            return [*about.placeholders, *self._tokens(question, begins=False)]
        ids = self._tokens([*about.text, {"role": "user", "content": question}], answer=True)
        if ids[: about.tokens] != list(about.token_ids):
            raise UsageError("the model's template changes these messages when another follows")
        return [*about.placeholders, *ids[about.tokens :]]

    def ask(
        self, question: str, context: Remembered | None = None, *, max_tokens: int = 256,
        **options: Any,  # noqa: ANN401
    ) -> str:  # fmt: skip
        """The answer to a question about a context, or the one that was remembered last.

        `options` are those of a completion (`temperature`, `stop`, ...).
        """
        return self._send("/v1/completions", lambda got: _read_answer(got["choices"][0]), {
            "model": self.model, "prompt": self.prompt(question, context), "temperature": 0,
            "max_tokens": max_tokens, **options,
        })  # fmt: skip

    def _tokens(self, text: Text, *, begins: bool = True, answer: bool = False) -> list[int]:
        body: dict[str, Any] = {"model": self.model}
        if isinstance(text, str):
            check_text(text)
            body |= {"prompt": text, "add_special_tokens": begins}
        else:
            body |= {"messages": check_messages(text), "add_generation_prompt": answer}
        return self._send("/tokenize", lambda got: _token_ids(got["tokens"]), body)

    def _send(
        self, path: str, read: Callable[[Any], T], body: Mapping[str, Any] | None = None
    ) -> T:
        """What `read` makes of the server's JSON; it raises ValueError for what is foreign."""
        url = self._url + path
        return fetch(url, lambda content: read(json.loads(content)), body, **self._options)


def _token_ids(given: Any) -> list[int]:  # noqa: ANN401
    if not given or not all(type(token) is int and 0 <= token < 2**31 for token in given):
        raise ValueError("no token ids")
    return list(given)


def _read_context(answer: Any, text: Text, ids: list[int]) -> Remembered:  # noqa: ANN401
    if not answer:
        raise ValueError("the server has no kvp connector (--kv-transfer-config)")
    if "error" in answer:
        raise ValueError(f"the context is not compressed: {answer['error']}")
    placeholders, tokens, kept = _token_ids(answer["placeholders"]), len(ids), answer["kept"]
    if not re.fullmatch("[0-9a-f]{32,64}", answer["digest"]) or (
        (answer["tokens"], kept) != (tokens, len(placeholders)) or kept > tokens
    ):
        raise ValueError(f"no context of {tokens} tokens")
    return Remembered(
        text=text, digest=answer["digest"], tokens=tokens, kept=len(placeholders),
        token_ids=ids, placeholders=placeholders,
    )  # fmt: skip


def _read_answer(choice: Any) -> str:  # noqa: ANN401
    if check_text(choice["finish_reason"], "what it wrote") == "error":
        raise ValueError("the context is refused: the server's log says why")
    return check_text(choice["text"], "what it wrote")
