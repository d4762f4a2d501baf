"""Start a server on a free port of this machine, and stop it: what the demonstrations share."""

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from kvp.errors import UsageError


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def answering(
    name: str, command: Sequence[str], port: int, folder: Path, env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a server once it answers; it ends with the block.

    Its log is in `folder`. Raises UsageError with the end of the log where the server ends.
    """
    log, url = folder / "server.log", f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        running = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        try:
            while True:
                if running.poll() is not None:
                    raise UsageError(f"{name} ended:\n{log.read_text()[-2000:]}")
                try:
                    urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:  # also any status but 200
                    time.sleep(1)
            yield url
        finally:
            running.terminate()
            running.wait(60)
