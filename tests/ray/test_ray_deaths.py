"""Workers that die again and again, as where memory is too small: one line, and no endless loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ray

WORKER = """
import os, signal

class Worker:
    def __init__(self, dies):
        self.dies = dies
        self.meet("start")

    def __call__(self, number):
        self.meet(str(number))

    def close(self):
        pass

    def meet(self, name):
        if name == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
"""
PROGRAM = """
import sys
from functools import partial

from dying import Worker
from kvp.errors import guarded
from kvp.ray_engine import Pool, do_pieces

pool, make = Pool(size=2, gpus=0), partial(Worker, sys.argv[1])
raise SystemExit(guarded(lambda: do_pieces(make, range(5), pool, print), "program"))
"""


@pytest.mark.parametrize(
    ("dies", "message", "done"),
    [
        ("start", "a worker died before it had done a piece of the work", set()),
        ("3", "a worker died at piece 3, 4 times", {"0", "1", "2"}),
    ],
)
def test_workers_that_always_die_end_in_one_line(
    cluster: Any,
    end: Callable[[subprocess.Popen[str]], tuple[int, str, str]],
    tmp_path: Path,
    dies: str,
    message: str,
    done: set[str],
) -> None:
    (tmp_path / "dying.py").write_text(WORKER)
    (tmp_path / "program.py").write_text(PROGRAM)
    code, output, errors = end(
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py", dies], env=cluster.environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    assert code == 2, errors
    assert errors.splitlines()[-1].startswith(f"program: error: --engine ray: {message}")
    assert done <= set(output.split())
