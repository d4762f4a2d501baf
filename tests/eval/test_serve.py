"""kvp serve: what it refuses, and a conversation with SmolLM2 in llama.cpp."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from eval.config import ServeConfig
from eval.serve import run
from kvp.data.synthetic.text import prose
from kvp.errors import KvpError

GGUF = Path(__file__).parents[2] / "models" / "smollm2.gguf"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"gguf": "none.gguf"}, "none.gguf: no such file"),
        ({"gguf": __file__, "policy": "none"}, r"pip install 'kvp-toolkit\[llama-cpp\]'"),
        ({"gguf": __file__, "policy": "none"}, "there is no folder 'none'"),
        ({"gguf": __file__, "method": "keydif"}, "did you mean keydiff"),
    ],
    ids=["file", "extra before policy", "policy", "method"],
)
def test_one_line_says_what_cannot_work(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "kvp.plugins.find_spec" if "pip install" in expected else "eval.serve.require"
    monkeypatch.setattr(place, lambda *_: None)
    with pytest.raises(KvpError, match=expected):
        run(ServeConfig(**settings))


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.serve.require", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(KvpError, match=f"--port {port}: Address already in use: give another"):
            run(ServeConfig(__file__, port=port))


@pytest.mark.real
@pytest.mark.skipif(not GGUF.exists(), reason="recipes/smollm2/fetch.py --to models/smollm2.gguf")
def test_a_conversation_is_read_once_within_its_cells() -> None:
    pytest.importorskip("llama_cpp")
    options = ["--policy", "smollm2-135m-instruct", "--cells", "1024", "--port", "8765"]
    command = [sys.executable, "-m", "kvp", "serve", str(GGUF), *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        assert "1024 cells, policy smollm2-135m-instruct" in server.stderr.readline()
        fact = "The code of the north gate is 48213. "
        document = f"{prose(0, words=600, split='test')} {fact}{prose(1, words=600, split='test')}"
        messages = [
            {"role": "user", "content": f"{document}\n\nWhat is the code of the north gate?"}
        ]
        started = time.monotonic()
        first = _asked(messages)
        reading = time.monotonic() - started
        assert first["usage"]["prompt_tokens"] > 1024
        assert "48213" in first["choices"][0]["message"]["content"]
        question = {"role": "user", "content": "What is the code of the north gate?"}
        held = []
        answer = first["choices"][0]["message"]
        for _ in range(3):
            messages += [answer, question]
            started = time.monotonic()
            answer = _asked(messages)["choices"][0]["message"]
            assert "48213" in answer["content"]
            assert time.monotonic() - started < reading / 2  # the document is not read again
            status = Path(f"/proc/{server.pid}/status").read_text()
            held.append(int(status.partition("VmRSS:")[2].split()[0]))  # KiB
        assert max(held) - min(held) < 0.01 * min(held), held
    finally:
        server.terminate()
        server.communicate()


def _asked(messages: list[dict[str, str]]) -> dict[str, Any]:
    body = json.dumps({"messages": messages, "max_tokens": 24, "temperature": 0}).encode()
    request = urllib.request.Request(
        "http://127.0.0.1:8765/v1/chat/completions", body, {"content-type": "application/json"}
    )
    for _ in range(100):
        try:
            with urllib.request.urlopen(request) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except ConnectionError:
            time.sleep(0.2)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
            time.sleep(0.2)
    raise AssertionError("the server does not answer")
