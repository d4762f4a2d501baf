"""A proxy in front of the S3 server that spoils answers, and what is collected and trained."""

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from kvp.artifacts.addresses import files_below
from kvp.artifacts.files import copy_files


@dataclass
class Faults:
    """What happens to requests that go through the proxy; each takes numbers from 0."""

    url: str = ""
    status: Callable[[int, str], int] = lambda _, __: 0
    """Number and method of a request -> status to answer with, 0 to pass it on."""
    cut: Callable[[int, str], bool] = lambda _, __: False
    """Whether the connection ends in the middle of the answer."""
    seconds: Callable[[int, str], float] = lambda _, __: 0.0
    """Time to wait before the request is passed on."""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range of every request."""

    def reset(self):
        """Pass everything on, and forget the requests."""
        self.status = lambda _, __: 0
        self.cut = lambda _, __: False
        self.seconds = lambda _, __: 0.0
        self.requests.clear()


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults
    server_address: tuple[str, int]

    def log_message(self, *_):
        """Keep quiet."""

    def answer(self):
        faults, number = self.faults, len(self.faults.requests)
        faults.requests.append((self.command, self.path, self.headers.get("Range", "")))
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(faults.seconds(number, self.command))
        if status := faults.status(number, self.command):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(*self.server_address, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name != "Host"}
        connection.request(self.command, self.path, sent, headers)
        answer = connection.getresponse()
        content = answer.read()
        if faults.cut(number, self.command):
            self.close_connection = True
            if self.command == "GET" and content:
                self._answer(answer)
                self.wfile.write(content[: len(content) // 2])
            return
        self._answer(answer)
        self.wfile.write(content)
        connection.close()

    def _answer(self, answer):
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "server", "date", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()


for _method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
    setattr(_Proxy, f"do_{_method}", _Proxy.answer)


@pytest.fixture
def faults(s3_server, s3_environment):
    """A proxy between this process (and those it starts) and the server."""
    address = urlsplit(s3_server)
    found = Faults()
    handler = type(
        "Proxy", (_Proxy,), {"faults": found, "server_address": (address.hostname, address.port)}
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def through_proxy(faults, prefix, monkeypatch):
    """A new folder of the bucket, reached by this process through the proxy."""
    from kvp.artifacts.addresses import open_bucket

    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
    open_bucket.cache_clear()
    yield prefix
    open_bucket.cache_clear()


@pytest.fixture(scope="session")
def collecting(model_folder):
    """Flags of a small collection."""
    sizes = "--length 300 --train 6 --validation 2 --max-new-tokens 2 --tasks niah_single_1"
    return ["--model", str(model_folder), *sizes.split()]


@pytest.fixture(scope="session")
def collected(collecting, tmp_path_factory):
    """A trace store on a disk: 6 training and 2 validation sequences of about 300 tokens."""
    from kvp.program.table import collect as main

    store = tmp_path_factory.mktemp("collected") / "store"
    assert main([*collecting, "--out", str(store)]) == 0
    return store


TRAINING = """
--contexts 2 --hidden 16 --permutations 4 --min_prefix 40 --steps 24 --validate_every 8
--checkpoint_every 4 --validation_contexts 2
"""


@pytest.fixture(scope="session")
def training():
    """Flags of a short training."""
    return TRAINING.split()


@pytest.fixture(scope="session")
def trained(collected):
    """A policy on a disk, trained on the store on a disk with `TRAINING`."""
    from kvp.program.table import train as main

    policy = collected.parent / "policy"
    assert main(["--traces", str(collected), "--out", str(policy), *TRAINING.split()]) == 0
    return policy


@pytest.fixture
def on_s3(collected, prefix):
    """The trace store, copied to S3."""
    copy_files(collected, prefix / "traces", [name for name, _ in files_below(collected)])
    return prefix / "traces"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """What is fetched stays out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
