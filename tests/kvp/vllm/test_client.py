"""The client against servers that answer as vLLM's does, as others do, and as broken ones do."""

import gzip
import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvp.errors import UsageError
from kvp.vllm.client import Client

KEY = "a-secret-key"
DIGEST = "0123456789abcdef" * 2
IDS = list(range(40))
TOLD = {"digest": DIGEST, "tokens": 40, "kept": 32, "placeholders": list(range(32))}
MODELS = {"data": [{"id": "ours"}]}


@contextmanager
def serving(key="", **answers):
    """The address of a server: what each path's last part answers, as JSON or bytes."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            allowed = self.headers.get("Authorization") == (f"Bearer {key}" if key else None)
            answer = answers.get(self.path.rpartition("/")[2], MODELS)
            self.send_response(200 if allowed else 401)
            self.end_headers()
            said = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.wfile.write(said)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def playing(parts, pause=0.0):
    """The address of a server that sends these bytes to whoever asks, and closes."""
    listening = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def play():
        while not stop.is_set():
            try:
                asking, _ = listening.accept()
            except OSError:
                return
            with asking:
                asking.recv(65536)
                for part in parts:
                    try:
                        asking.sendall(part)
                    except OSError:
                        break
                    if stop.wait(pause):
                        break

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def refused(action, *arguments, **options):
    """What an action is refused with: one short line without the key."""
    with pytest.raises(UsageError) as caught:
        action(*arguments, **options)
    line = str(caught.value)
    assert line.isprintable(), line
    assert len(line) <= 320
    assert KEY not in line
    return line


@pytest.mark.parametrize("key", ["", KEY])
def test_requests_carry_the_key_of_the_server(key):
    with serving(key) as url:
        assert Client(f"{url}/v1", api_key=key).model == "ours"


def test_a_context_is_remembered_and_asked():
    told = {"kv_transfer_params": {"kvp_context": TOLD}}
    text = {"choices": [{"text": " Four.", "finish_reason": "stop"}]}
    with serving(tokenize={"tokens": IDS}, completions={**told, **text}) as url:
        client = Client(url)
        found = client.remember("A text.")
        assert (found.digest, found.tokens, found.kept) == (DIGEST, 40, 32)
        assert client.prompt("And?") == [*TOLD["placeholders"], *IDS]
        assert client.ask("And?") == " Four."


def http(body, status="200 OK", *headers):
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


GOOD = json.dumps(MODELS).encode()
PAGE = f"<html>\n<body>\x1b[2J Not found: Bearer {KEY}\n</body></html>\n".encode() * 99
FOREIGN = {
    "cut": (http(GOOD)[:-5], "more expected"),
    "no status": (b"nonsense\r\n\r\n", "BadStatusLine"),
    "nothing": (b"", "RemoteDisconnected"),
    "a long header": (b"HTTP/1.1 200 OK\r\nA: " + b"b" * 99999, "LineTooLong"),
    "a page": (http(PAGE, "404 Not Found"), "404 <html>"),
    "elsewhere": (http(b"", "302 Found", "Location: http://127.0.0.1:9/"), "302"),
    "compressed": (http(gzip.compress(GOOD), "200 OK", "Content-Encoding: gzip"), "Unicode"),
    "not UTF-8": (http(b'{"data": "\xff"}'), "Unicode"),
    "nested": (http(b"[" * 10**6), "Recursion"),
    "of a proxy": (http(b'{"detail": "login"}'), "'data'"),
    "no models": (http(b'{"data": []}'), "IndexError"),
    "a number": (http(b'{"data": [{"id": 5}]}'), "of type int"),
    "half a pair": (http(b'{"data": [{"id": "\\ud800"}]}'), "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_answer_is_one_line(name):
    answer, said = FOREIGN[name]
    with playing([answer]) as url:
        line = refused(Client, url, api_key=KEY, timeout=30)
    assert line.startswith(f"{url}/v1/models: ")
    assert said in line


def test_a_server_that_says_nothing_is_given_up():
    started = time.monotonic()
    with playing([b""] * 999, 0.1) as url:
        assert "no answer within 0.5 s" in refused(Client, url, timeout=0.5)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "file:///etc/hostname", "http://127.0.0.1:port",
     "http://127.0.0.1/a b\n", "http://[::1", "http://me:a-secret-key@127.0.0.1", "http://\ud800",
     "http://127.0.0.1:1", None],
    ids=range(10),
)  # fmt: skip
def test_an_address_without_a_server_is_one_line(url):
    refused(Client, url, timeout=20)


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"api_key": KEY + "\n"}, {"api_key": KEY + "é"}, {"api_key": 5}],
    ids=str,
)
def test_options_that_make_no_request(options):
    with serving() as url:
        refused(Client, url, **options)


BAD_TOKENS = [
    {}, None, {"tokens": []}, {"tokens": [1, -1]}, {"tokens": [1.0]}, {"tokens": [True]},
    {"tokens": "12"}, {"tokens": 5}, {"tokens": [2**40]},
]  # fmt: skip
BAD_CONTEXTS = [
    {}, None, {"kv_transfer_params": 5}, {"kv_transfer_params": {"other": 1}},
    *({"kv_transfer_params": {"kvp_context": told}} for told in (
        5, {}, {"error": "a\nb" * 999}, {**TOLD, "kept": 33}, {**TOLD, "tokens": 41},
        {**TOLD, "digest": DIGEST.upper()}, {**TOLD, "digest": 5},
        {**TOLD, "placeholders": [-1] * 32}, {**TOLD, "placeholders": [1] * 41, "kept": 41},
    )),
]  # fmt: skip
BAD_TEXTS = [
    {}, None, {"choices": []},
    *({"choices": [choice]} for choice in (
        {"text": "a"}, {"text": "a", "finish_reason": None}, {"finish_reason": "stop"},
        {"text": None, "finish_reason": "stop"}, {"text": "", "finish_reason": "error"},
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("page", "bad"),
    [("tokenize", BAD_TOKENS), ("v1/completions", BAD_CONTEXTS)],
    ids=["tokens", "contexts"],
)
def test_tokens_and_contexts_that_are_none_are_not_remembered(page, bad):
    for answer in bad:
        with serving(**{"tokenize": {"tokens": IDS}, page.removeprefix("v1/"): answer}) as url:
            client = Client(url)
            assert f"{url}/{page}: " in refused(client.remember, "A text.")
            assert client.remembered is None


def test_answers_that_are_none():
    answers = {"tokenize": {"tokens": IDS}, "completions": {"kv_transfer_params": {
        "kvp_context": TOLD}}}  # fmt: skip
    with serving(**answers) as url:
        context = Client(url).remember("A text.")
    for answer in BAD_TEXTS:
        with serving(**{**answers, "completions": answer}) as url:
            assert f"{url}/v1/completions: " in refused(Client(url).ask, "Who?", context)


@pytest.mark.parametrize(
    "text", ["\ud800", [], None, [{"role": "user"}], [{"role": "user", "content": "\udfff"}]],
    ids=range(5),
)  # fmt: skip
def test_texts_that_are_none_are_not_sent(text):
    with serving(tokenize={"tokens": IDS}) as url:
        refused(Client(url).remember, text)


def test_options_that_are_no_json():
    told = {"kv_transfer_params": {"kvp_context": TOLD}}
    with serving(tokenize={"tokens": IDS}, completions=told) as url:
        client = Client(url)
        client.remember("A text.")
        for stop in (object(), float("nan"), {1: {2}}, b"a"):
            refused(client.ask, "Who?", stop=stop)
