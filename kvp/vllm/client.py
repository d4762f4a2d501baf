r"""A client of a vLLM server with kvp's connector: remember a context once, ask it often.

    client = Client("http://127.0.0.1:8000")
    manual = client.remember(open("manual.txt").read(), budget="12.5%")
    print(client.ask("\n\nHow is the filter changed? Answer:"))

Everything goes through the server's own interface, so any OpenAI client can do the same: a question
is a completion whose prompt is `Remembered.prompt(...)`, token ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvp.errors import UsageError

Text = str | Sequence[Mapping[str, str]]
"""A document, or messages (`role`, `content`) that begin a conversation."""
_TOKENS = 4
"""Tokens that a request to remember decodes: what was compressed is told after the first."""


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
    """Talks to one server; UsageError, in one line, on what the server refuses."""

    def __init__(
        self, url: str, model: str | None = None, *, timeout: float = 600.0, api_key: str = ""
    ) -> None:
        """`url` without `/v1`; `model` as the server calls it, or the one that it serves.

        `timeout` in seconds is that of every request; `api_key` is the server's `--api-key`.
        """
        self._url, self._timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._send("/v1/models")["data"][0]["id"]
        self.remembered: Remembered | None = None
        """The context that was remembered last."""

    def remember(self, text: Text, budget: str = "12.5%") -> Remembered:
        """Let the server read `text` once and keep `budget` of it."""
        ids = self._tokens(text)
        answer = self._send("/v1/completions", {
            "model": self.model, "prompt": ids, "temperature": 0,
            "max_tokens": _TOKENS, "min_tokens": _TOKENS,
            "kv_transfer_params": {"kvp_compress": budget},
        })  # fmt: skip
        told = (answer.get("kv_transfer_params") or {}).get("kvp_context") or {}
        if "placeholders" not in told:
            why = told.get("error", "the server has no kvp connector (--kv-transfer-config)")
            raise UsageError(f"{self._url} did not compress the context: {why}")
        self.remembered = Remembered(
            text=text, digest=told["digest"], tokens=told["tokens"], kept=told["kept"],
            token_ids=ids, placeholders=told["placeholders"],
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
        answer = self._send("/v1/completions", {
            "model": self.model, "prompt": self.prompt(question, context), "temperature": 0,
            "max_tokens": max_tokens, **options,
        })  # fmt: skip
        choice = answer["choices"][0]
        if choice["finish_reason"] == "error":
            raise UsageError(f"{self._url} refused the context: its log says why")
        return str(choice["text"])

    def _tokens(self, text: Text, *, begins: bool = True, answer: bool = False) -> list[int]:
        body: dict[str, Any] = {"model": self.model}
        if isinstance(text, str):
            body |= {"prompt": text, "add_special_tokens": begins}
        else:
            body |= {"messages": list(text), "add_generation_prompt": answer}
        return list(self._send("/tokenize", body)["tokens"])

    def _send(self, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401
        content = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, content, self._headers)
        try:
            with urlopen(request, timeout=self._timeout) as got:
                return json.load(got)
        except HTTPError as error:
            said = error.read(500).decode(errors="replace")
            raise UsageError(f"{self._url}{path}: {error.code} {said}") from None
        except (URLError, OSError, ValueError) as error:
            raise UsageError(f"{self._url}{path}: no answer ({error})") from None
