"""kvp serve: what it refuses, and SmolLM2 in llama.cpp: conversations, limits, ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval.config import ServeConfig
from eval.serve import run
from kvp.data.synthetic.text import prose
from kvp.errors import KvpError

SUPPRESSED = {"0": -100, "2": -100}
"""The tokens that end an answer of SmolLM2."""
GGUF = Path(__file__).parents[2] / "models" / "smollm2.gguf"
WITH_MODEL = pytest.mark.skipif(
    not GGUF.exists(), reason="recipes/real_models/fetch.py --to models/smollm2.gguf"
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gguf": "none.gguf", "method": "keydiff"}, "none.gguf: no such file"),
        ({"gguf": __file__, "policy": "none"}, r"pip install -e '\.\[llama-cpp\]'"),
        ({"gguf": __file__, "policy": "none"}, "there is no folder 'none'"),
        ({"gguf": __file__, "method": "keydif"}, "did you mean keydiff"),
    ],
    ids=["file", "extra before policy", "policy", "method"],
)
def test_one_line_says_what_cannot_work(settings, expected, monkeypatch):
    place = "kvp.plugins.find_spec" if "pip install" in expected else "eval.serve.require"
    monkeypatch.setattr(place, lambda *_: None)
    with pytest.raises(KvpError, match=expected):
        run(ServeConfig(**settings))


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr("eval.serve.require", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(KvpError, match=f"--port {port}: Address already in use: give another"):
            run(ServeConfig(__file__, method="keydiff", port=port))


@dataclass
class Server:
    """A running kvp serve."""

    process: subprocess.Popen[str]
    port: int

    def ask(self, body, path="/v1/chat/completions"):
        """Status and text of an answer; `body` is JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def answer(self, **body):
        status, text = self.ask(body)
        assert status == 200, text
        return json.loads(text)

    def begin(self, **body):
        """Ask, and wait for nothing."""
        data = json.dumps(body).encode()
        client = socket.create_connection(("127.0.0.1", self.port))
        path = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        client.sendall(f"{path}content-length: {len(data)}\r\n\r\n".encode() + data)
        time.sleep(1)
        return client


@contextmanager
def serving(*options, cells=512, **environment):
    pytest.importorskip("llama_cpp")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvp", "serve", str(GGUF), *options, "--port", str(port)]
    process = subprocess.Popen(
        [*command, "--cells", str(cells)],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip
    server = Server(process, port)
    try:
        assert process.stderr is not None
        assert f"{cells} cells" in process.stderr.readline()
        for _ in range(100):
            try:
                server.ask({})
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server():
    """Of an environment that means to change llama-cpp-python's server."""
    with serving(
        INTERRUPT_REQUESTS="1", CONFIG_FILE="none.json", API_KEY="secret", HOST="0.0.0.0",
        PORT="1", MODEL="none.gguf", N_CTX="8", CHAT_FORMAT="llava-1-5",
    ) as running:  # fmt: skip
        yield running


def said(text="Say hello."):
    return [{"role": "user", "content": text}]


@pytest.mark.real
@WITH_MODEL
def test_a_conversation_is_read_once_within_its_cells():
    with serving("--policy", "smollm2-135m-instruct", cells=1024) as server:
        fact = "The code of the north gate is 48213. "
        document = f"{prose(0, words=600, split='test')} {fact}{prose(1, words=600, split='test')}"
        messages = said(f"{document}\n\nWhat is the code of the north gate?")
        greedy = {"max_tokens": 24, "temperature": 0}
        started = time.monotonic()
        first = server.answer(messages=messages, **greedy)
        reading = time.monotonic() - started
        assert first["usage"]["prompt_tokens"] > 1024
        answer = first["choices"][0]["message"]
        assert "48213" in answer["content"]
        held = []
        for _ in range(3):
            messages += [answer, *said("What is the code of the north gate?")]
            started = time.monotonic()
            answer = server.answer(messages=messages, **greedy)["choices"][0]["message"]
            assert "48213" in answer["content"]
            assert time.monotonic() - started < reading / 2  # the document is not read again
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            held.append(int(status.partition("VmRSS:")[2].split()[0]))  # KiB
        assert max(held) - min(held) < 0.01 * min(held), held


@pytest.mark.real
@WITH_MODEL
def test_streams_at_once_all_complete(server):
    def stream(number):
        return server.ask({"messages": said(f"{number}?"), "stream": True, "max_tokens": 5})

    with ThreadPoolExecutor(8) as pool:
        for status, text in pool.map(stream, range(8)):
            *_, last, end = text.strip().split("\n\n")
            assert (status, end) == (200, "data: [DONE]")
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"]


@pytest.mark.real
@WITH_MODEL
def test_an_answer_ends_at_the_cells():
    with serving(cells=256) as server:
        for most in ({}, {"max_completion_tokens": 2**70}):
            told = server.answer(messages=said(), logit_bias=SUPPRESSED, **most)
            assert told["usage"]["completion_tokens"] == 256
            assert told["choices"][0]["finish_reason"] == "length"
            assert told["model"] == "smollm2"


@pytest.mark.real
@WITH_MODEL
@pytest.mark.parametrize("stream", [True, False])
def test_generation_ends_with_its_client(server, stream):
    long = said("word " * 4000)
    with server.begin(messages=long, stream=stream):
        pass  # while the text is read
    with server.begin(messages=said(), stream=stream, logit_bias=SUPPRESSED):
        pass  # while the answer is written
    started = time.monotonic()
    assert server.answer(messages=said(), max_tokens=2)["usage"]["completion_tokens"] == 2
    assert time.monotonic() - started < 25  # the text alone takes longer


@pytest.mark.real
@WITH_MODEL
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_signal_ends_the_server_while_it_answers(sent, code):
    with serving() as server:
        with server.begin(messages=said("word " * 4000)) as client:
            started = time.monotonic()
            server.process.send_signal(sent)
            assert server.process.wait(30) == code
            assert time.monotonic() - started < 10
            assert client.recv(1000).startswith(b"HTTP/1.1 503")
        assert server.process.stderr is not None
        assert "Traceback" not in server.process.stderr.read()


@pytest.mark.real
@WITH_MODEL
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * 100_000}, "stop"),
        ({"stop": ""}, "stop.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"grammar": "no grammar"}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"tools": []}, "tools"),
        ({"stream": True, "n": 2}, "n"),
    ],
)
def test_400_names_the_field(server, fields, named):
    status, text = server.ask({"messages": said(), "max_tokens": 1, **fields})
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, named)
    assert error["message"].startswith(f"{named}: ")
    assert "\n" not in error["message"]
    assert "/" not in error["message"]


@pytest.mark.real
@WITH_MODEL
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000],
    ids=["empty", "cut", "list", "bytes", "surrogate", "deep"],
)
def test_400_for_what_is_no_json_object(server, body):
    status, text = server.ask(body, "/v1/completions")
    assert (status, json.loads(text)["error"]["param"]) == (400, "body")


@pytest.mark.real
@WITH_MODEL
def test_null_is_as_absent_and_other_paths_are_not_there(server):
    assert server.answer(messages=said(), max_tokens=1, stop=None, temperature=None)
    assert server.ask({"prompt": "1, 2, 3", "max_tokens": None}, "/v1/completions")[0] == 200
    assert server.ask({"prompt": ["a", "b"]}, "/v1/completions")[0] == 400
    assert server.ask({}, "/v1/embeddings")[0] == 404
    assert server.ask(b" " * (1 << 21))[0] == 413
