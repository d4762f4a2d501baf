"""Workers that die again and again, as where memory is too small: one line, and no endless loop."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.ray

WORKER = """
import os, signal
from dataclasses import dataclass
from pathlib import Path

from kvp.program.settings import WorkersConfig

@dataclass(frozen=True, kw_only=True)
class Config(WorkersConfig):
    out: str

def run(config):
    if config.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    Path(config.out, str(config.rank)).write_text(str(config.world_size))
"""
PROGRAM = """
from dying import Config, run
from kvp.program.exit_codes import call_program
from kvp.program.ray_workers import do_with_ray

config = Config(engine="ray", workers=2, out="out")
raise SystemExit(call_program(lambda: do_with_ray(run, config, "cpu", lambda: None), "program"))
"""


def test_a_worker_that_always_dies_ends_in_one_line(cluster, end, tmp_path):
    (tmp_path / "dying.py").write_text(WORKER)
    (tmp_path / "program.py").write_text(PROGRAM)
    code, _, errors = end(
        subprocess.Popen(
            [sys.executable, tmp_path / "program.py"], env=cluster.environment, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    assert code == 2, errors
    assert errors.splitlines()[-1].startswith(
        "program: error: --engine ray: a worker died 6 times (out of memory?)"
    )
    assert (tmp_path / "out" / "0").read_text() == "2"
