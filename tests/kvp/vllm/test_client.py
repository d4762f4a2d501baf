"""The client against a server that answers as vLLM's `/v1/models` does."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvp.errors import UsageError
from kvp.vllm.client import Client


@contextmanager
def serving(key):
    class Models(BaseHTTPRequestHandler):
        def do_GET(self):
            allowed = self.headers.get("Authorization") == (f"Bearer {key}" if key else None)
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "ours"}]}).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("key", ["", "secret"])
def test_requests_carry_the_key_of_the_server(key):
    with serving(key) as url:
        assert Client(f"{url}/v1", api_key=key).model == "ours"


def test_a_wrong_key_is_said_in_one_line():
    with serving("secret") as url, pytest.raises(UsageError, match=r"/v1/models: 401"):
        Client(url, api_key="other")
