"""An S3 server (moto) that answers badly: `python -m benchmarks.faults.s3` prints its two ports.

The first spoils some answers, each of which a client may ask for again: 503, cut, late. The second
gives 503 alone, from a random request for a folder on.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

BUCKET = "bucket"


@contextmanager
def served() -> Iterator[tuple[str, str]]:
    """Run the server; addresses that answer badly, and that break down."""
    call = [sys.executable, "-m", "benchmarks.faults.s3"]
    with subprocess.Popen(call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        spoiled, broken = server.stdout.readline().split()
        yield f"http://127.0.0.1:{spoiled}", f"http://127.0.0.1:{broken}"
        server.communicate()


def environment(address: str, cache: Path) -> dict[str, str]:
    """What a program needs to find it, with patience for a second."""
    return {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true", "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1", "KVP_RETRY_SECONDS": "3", "XDG_CACHE_HOME": str(cache),
    }  # fmt: skip


def main() -> None:
    """Serve until the standard input ends."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server
    from werkzeug.test import Client

    app, draw, asked = DomainDispatcherApplication(create_backend_app), random.Random(0), Counter()
    Client(app).put(f"/{BUCKET}", base_url="http://127.0.0.1")

    def spoiled(environ: dict[str, Any], start: Any) -> Any:  # noqa: ANN401
        chance = draw.random()
        time.sleep(0.3 * (chance > 0.95))
        if chance < 0.05:
            return refuse(environ, start)
        answer = b"".join(app(environ, start))
        return [answer[: len(answer) // 2]] if chance < 0.08 else [answer]

    def broken(environ: dict[str, Any], start: Any) -> Any:  # noqa: ANN401
        folder = environ["PATH_INFO"].split("/")[2:3] or environ["QUERY_STRING"]
        asked[str(folder)] += 1
        limit = random.Random(str(folder)).randrange(40)
        return refuse(environ, start) if asked[str(folder)] > limit else app(environ, start)

    def refuse(environ: dict[str, Any], start: Any) -> list[bytes]:  # noqa: ANN401
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start("503 Slow Down", [("Content-Length", "0")])
        return [b""]

    WSGIRequestHandler.log_request = lambda *_: None  # type: ignore[method-assign]
    servers = [make_server("127.0.0.1", 0, each, threaded=True) for each in (spoiled, broken)]
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    print(*(server.port for server in servers), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
