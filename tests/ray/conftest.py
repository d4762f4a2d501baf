"""One Ray for all of these tests, started as a user would who has a cluster already."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HOLD = """
import os, sys, ray
info = ray.init(
    address="local", num_cpus=2, object_store_memory=100_000_000, include_dashboard=False,
)
print(info.address_info["address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True, scope="session")
def _ray_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")


@dataclass
class Cluster:
    """A running Ray, and programs that use it."""

    holder: int
    environment: dict[str, str]

    def start(self, module: str, *flags: str | Path, own: bool = False) -> subprocess.Popen[str]:
        """A program with two workers of this Ray, or with `own` of one that it starts."""
        environment = dict(self.environment)
        if own:
            del environment["RAY_ADDRESS"]
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, flags), "--engine=ray", "--workers=2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def workers(self) -> list[int]:
        """Processes of the actors that are alive."""
        raylets = [child for child in _children(self.holder) if b"raylet/raylet" in _command(child)]
        return [
            worker for raylet in raylets for worker in _children(raylet)
            if _command(worker).startswith(b"ray::MapWorker")
        ]  # fmt: skip


def _children(process: int) -> list[int]:
    """Processes that another one started."""
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for thread in threads for child in _read(thread).split()]


def _command(process: int) -> bytes:
    return _read(Path(f"/proc/{process}/cmdline"))


def _read(file: Path) -> bytes:
    """A file of a process that may have ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp("home")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        environment = {
            **os.environ, "HOME": str(home), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        environment.pop("RAY_ADDRESS", None)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            address = next(line.strip() for line in holder.stdout if ":" in line)
            yield Cluster(holder.pid, {**environment, "RAY_ADDRESS": address})
        finally:
            holder.stdin.close()
            holder.stdout.close()
            try:
                holder.wait(60)
            except subprocess.TimeoutExpired:
                holder.send_signal(signal.SIGKILL)
                holder.wait()


@pytest.fixture
def end() -> Callable[[subprocess.Popen[str]], tuple[int, str, str]]:
    """Waits for a program: its exit code, and what it printed on both streams."""

    def wait(program: subprocess.Popen[str]) -> tuple[int, str, str]:
        output, errors = program.communicate(timeout=400)
        return program.returncode, output, errors

    return wait
