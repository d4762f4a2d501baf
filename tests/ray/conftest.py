"""One Ray for all of these tests, started as a user would who has a cluster already.

Beside it, what one process writes to a disk: what two workers write is compared with that.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

COLLECT = (
    "--length=300", "--train=10", "--validation=2", "--max-new-tokens=2", "--tasks=niah_single_1",
)  # fmt: skip
EVALUATE = (
    "--methods=full,random,snapkv,knorm+ada", "--prompts=4", "--tasks=niah_single_1,chat",
    "--budgets=12.5%,25%", "--length=260", "--timing_prompts=1", "--max_new_tokens=6",
)  # fmt: skip
OWN = ("AWS_", "KVP_", "RAY_ADDRESS")
"""Beginnings of variables that the cluster has not: workers have those of their program."""
FELL = "You have likely discovered a bug in Ray"
"""What Ray says where a kill met a race of its own, which ends the program."""
MOMENTS = (0, 3)
"""Pieces that are there when a worker is killed: at 0, up to 3 seconds after it began to load."""
HOLD = """
import os, sys, ray
info = ray.init(
    address="local", num_cpus=2, object_store_memory=100_000_000, include_dashboard=False,
)
print(info.address_info["address"], flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True, scope="session")
def _ray_installed():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")


@dataclass
class Cluster:
    """A running Ray, and programs that use it."""

    holder: int
    environment: dict[str, str]

    def collect(self, out, environment=None):
        """kvp collect of a small store."""
        flags = (*COLLECT, "--out", str(out))
        return self.start("collect", *flags, environment=environment)

    def evaluate(self, out, environment=None, *, own=False):
        """A small kvp eval."""
        flags = (*EVALUATE, "--out", str(out))
        return self.start("eval", *flags, environment=environment, own=own)

    def start(self, program, *flags, environment=None, own=False):
        """A program with two workers of this Ray, or with `own` of one that it starts."""
        environment = self.environment | dict(environment or {})
        if own:
            del environment["RAY_ADDRESS"]
        return subprocess.Popen(
            [sys.executable, "-m", "kvp", program, *map(str, flags), "--engine=ray", "--workers=2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # Ctrl-C counts also where these tests were started in the background of a shell.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def workers(self):
        """Processes of the workers that are alive."""
        raylets = [child for child in _children(self.holder) if b"raylet/raylet" in _command(child)]
        return [
            worker for raylet in raylets for worker in _children(raylet)
            if _command(worker).startswith(b"ray::_share")
        ]  # fmt: skip

    def kill_workers(self, program, count, draw):
        """Kill a worker at each of `MOMENTS`; numbers of pieces that there were then."""
        return [
            there for moment in MOMENTS
            if (there := self._kill_one(program, count, moment, draw)) is not None
        ]  # fmt: skip

    def _kill_one(self, program, count, least, draw):
        """Kill one of the workers once so many pieces are there; None where the program ended."""
        while program.poll() is None:
            workers = self.workers()
            if workers and count() >= least:
                time.sleep(draw.uniform(0, 0.2 if least else 3))
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(workers), signal.SIGKILL)
                    return count()
            time.sleep(0.02)
        return None


def _children(process):
    """Processes that another one started."""
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for thread in threads for child in _read(thread).split()]


def _command(process):
    return _read(Path(f"/proc/{process}/cmdline"))


def _read(file):
    """A file of a process that may have ended."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        inherited = {n: value for n, value in os.environ.items() if not n.startswith(OWN)}
        environment = {
            **inherited, "HOME": str(home), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "no_proxy": "127.0.0.1",
        }  # fmt: skip
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            address = next(line.strip() for line in holder.stdout if ":" in line)
            yield Cluster(holder.pid, {**environment, "RAY_ADDRESS": address})
        finally:
            holder.stdin.close()
            holder.stdout.close()
            try:
                holder.wait(60)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()


@pytest.fixture
def end():
    """Waits for a program: its exit code, and what it printed on both streams."""

    def wait(program):
        output, errors = program.communicate(timeout=400)
        return program.returncode, output, errors

    return wait


@pytest.fixture
def end_or_again(end):
    """Waits for a program whose workers were killed: its exit code and errors.

    Where Ray itself fell over a kill, the command is given again, as a user would.
    """

    def wait(program, again):
        code, _, errors = end(program)
        if code != 0 and FELL in errors:
            code, _, errors = end(again())
        return code, errors

    return wait


def _alone(program, flags, out):
    """What one process makes."""
    from kvp.program.table import run_program

    assert run_program(program, [*flags, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def whole_store(tmp_path_factory):
    """What one process collects."""
    return _alone("collect", COLLECT, tmp_path_factory.mktemp("alone") / "store")


@pytest.fixture(scope="session")
def whole_results(tmp_path_factory):
    """What one process evaluates."""
    return _alone("eval", EVALUATE, tmp_path_factory.mktemp("alone") / "results")
