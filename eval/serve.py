"""kvp serve: an OpenAI-compatible server of a model that llama.cpp runs within a bounded cache.

llama-cpp-python formats chats and generates. Its own server is not used: there a request outlives
its client, and a grammar that cannot be read ends the process.
"""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from eval.config import ServeConfig
from kvp.errors import UsageError
from kvp.plugins import reason_of, require
from kvp.program.progress import say
from policies import load_policy, make_scorer
from policies.learned import LearnedScorer
from policies.policy_files import check_geometry

BODY = 1 << 20
"""Bytes that a request may have: llama.cpp needs time for special tokens that grows as a square."""
PATHS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
UNUSED = {"n", "best_of", "logprobs", "model", "user"}
Stop = Annotated[str, Field(min_length=1)]
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Literal["system", "user", "assistant"]
    content: str


class _Asked(BaseModel):
    """What a request may say: OpenAI's fields and llama.cpp's, with its server's defaults."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    prompt: str = ""
    messages: list[_Message] = []
    response_format: dict[Literal["type"], Literal["text", "json_object"]] = {"type": "text"}
    max_tokens: int = Field(
        0, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    stream: bool = False
    stop: list[Stop] = Field([], max_length=16)
    temperature: float = Field(0.8, ge=0, le=100)
    top_p: float = Field(0.95, ge=0, le=1)
    min_p: float = Field(0.05, ge=0, le=1)
    top_k: int = Field(40, ge=0, lt=1 << 31)
    repeat_penalty: float = Field(1.1, gt=0, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[Token, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    logprobs: Literal[False] = False
    model: str = ""
    user: str = ""


class _EndedError(Exception):
    """HTTP status and message of a request that has no (more) answer."""


class _Application:
    """Requests to one `llama_cpp.Llama`, one after the other in a thread; an ASGI application."""

    def __init__(self, llama: Any, name: str, cells: int) -> None:  # noqa: ANN401
        from llama_cpp import ggml_abort_callback, llama_set_abort_callback

        self.llama, self.name, self.cells = llama, name, cells
        self.thread, self.reads = ThreadPoolExecutor(1), False
        self.server: Any = None
        self.decode, llama._ctx.decode = llama._ctx.decode, self._decode
        self.abort = ggml_abort_callback(lambda _: self.reads and self._over())
        llama_set_abort_callback(llama.ctx, self.abort, None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401
        """Answer one request."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]]()
        stream, gone = False, Event()

        def put(status: int, piece: Any) -> None:  # noqa: ANN401 - a message, JSON or the end
            if isinstance(piece, str):
                kind = "invalid_request_error" if status < 500 else "server_error"
                field = piece.partition(":")[0] if status == 400 else None
                piece = {"error": {"message": piece, "type": kind, "param": field, "code": None}}
            loop.call_soon_threadsafe(pieces.put_nowait, (status, piece))

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            gone.set()

        try:
            if (scope["method"], scope["path"]) == ("GET", "/v1/models"):
                models = [{"id": self.name, "object": "model", "created": 0, "owned_by": "kvp"}]
                put(200, {"object": "list", "data": models})
            else:
                asked, field = await _read_request(scope, receive)
                stream = asked.stream
                self.thread.submit(self._answer, asked, field, gone, put)
        except _EndedError as error:
            put(*error.args)
        watching = asyncio.create_task(until_gone())
        status, piece = await pieces.get()
        stream = stream and status == 200
        kind = b"text/event-stream" if stream else b"application/json"
        start = {"type": "http.response.start", "headers": [(b"content-type", kind)]}
        await send({**start, "status": status})
        while stream and piece:
            event = f"data: {json.dumps(piece)}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            _, piece = await pieces.get()
        last = b"data: [DONE]\n\n" if stream else json.dumps(piece).encode()
        await send({"type": "http.response.body", "body": last})
        await watching

    def _over(self) -> bool:
        return self.gone.is_set() or self.server.should_exit

    def _decode(self, batch: Any) -> None:  # noqa: ANN401
        """In place of the context's: every piece of a prompt and every token comes by here."""
        if self._over():
            raise _EndedError(503, "the server ends")
        self.began, self.reads = True, batch.n_tokens() > 1  # a single token is not worth an abort
        self.left -= not self.reads
        if self.left < 0:  # llama-cpp-python does not count tokens that end within a character
            raise _EndedError(400, "max_tokens: reached within a character")
        self.decode(batch)

    def _answer(self, asked: _Asked, field: str, gone: Event, put: Any) -> None:  # noqa: ANN401
        """Put the answer or its pieces, and at the end None."""
        self.gone, self.began = gone, False
        most = min(asked.max_tokens or (16 if field == "prompt" else self.cells), self.cells)
        self.left = most + 2
        call, without = self.llama.create_chat_completion, {"prompt"}
        if field == "prompt":
            call, without = self.llama.create_completion, {"messages", "response_format"}
        options = asked.model_dump(exclude=UNUSED | without)
        try:
            if max(map(int, asked.logit_bias or ()), default=0) >= self.llama.n_vocab():
                raise _EndedError(400, "logit_bias: the model has no such token")
            answer = call(**options | {"max_tokens": most, "model": self.name})
            for piece in answer if asked.stream else [answer]:
                put(200, piece)
        except _EndedError as error:
            put(*error.args)
        except Exception as error:
            if self._over():
                self.llama.reset()  # an aborted piece may have been turning keys
                put(503, "the server ends")
            elif self.began:
                say(f"a request failed ({reason_of(error)})")
                put(500, "the server cannot go on with this answer")
            else:
                put(400, f"{field}: {reason_of(error)}")
        put(200, None)


async def _read_request(scope: Any, receive: Any) -> tuple[_Asked, str]:  # noqa: ANN401
    """Read a request, and which field is its text. Raises _EndedError on what is none."""
    if (field := PATHS.get(scope["path"])) is None:
        raise _EndedError(404, "there are /v1/models, " + " and ".join(PATHS))
    if scope["method"] != "POST":
        raise _EndedError(405, "use POST")
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > BODY:
            raise _EndedError(413, f"a request has at most {BODY:,} bytes")
    try:
        given = {name: value for name, value in json.loads(body).items() if value is not None}
        json.dumps(given, ensure_ascii=False).encode()  # lone surrogates are no text
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        asked = _Asked.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise _EndedError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (AttributeError, ValueError, RecursionError):
        raise _EndedError(400, "body: give a JSON object of Unicode text") from None
    if not getattr(asked, field):
        raise _EndedError(400, f"{field}: is empty or missing")
    return asked, field


def run(config: ServeConfig) -> None:
    """Serve until interrupted; requests run one after the other.

    Raises KvpError where the file, the method, the model, the extra or the address cannot work.
    """
    if not Path(config.gguf).is_file():
        raise UsageError(f"{config.gguf}: no such file; kvp serve reads a GGUF file")
    require("the server", "llama-cpp", "llama_cpp", "gguf", "uvicorn")
    scorer = load_policy(config.policy) if config.policy else make_scorer(config.label)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family)
    except OSError as error:
        why = f"--host {config.host} --port {config.port}: {str(error.strerror).partition(' (')[0]}"
        raise UsageError(f"{why}: give another --port or --host") from None
    import uvicorn
    from llama_cpp import Llama

    from kvp.llamacpp import bounded
    from kvp.llamacpp.engine import Engine

    try:
        llama = Llama(config.gguf, n_ctx=config.cells, flash_attn=True, verbose=False)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{config.gguf}: llama.cpp cannot load it ({error})") from None
    if isinstance(scorer, LearnedScorer):
        check_geometry(scorer, Engine.of(llama).geometry)
    with bounded(llama, scorer, config.cells), listener, suppress(KeyboardInterrupt):
        app = _Application(llama, Path(config.gguf).stem, config.cells)
        app.server = server = uvicorn.Server(
            uvicorn.Config(
                app, log_level="critical", lifespan="off", ws="none", proxy_headers=False,
                timeout_graceful_shutdown=3,  # seconds for clients to take what was sent
            )
        )  # fmt: skip
        with app.thread:
            say(f"http://{config.host}:{config.port}/v1: {config.cells} cells, {config.label}")
            server.run(sockets=[listener])
