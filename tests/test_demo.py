"""`make demo` in miniature: the five programs, their files, and no network call in any process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eval.results.tuned_settings import load_settings

ROOT = Path(__file__).parent.parent
GUARD = """
import pathlib, socket

def _refuse(what):
    def call(*args, **kwargs):
        with pathlib.Path({log!r}).open("a") as log:
            log.write(f"{{what}} {{args!r}}\\n")
        raise OSError("no network in the demo")
    return call

_connect = socket.socket.connect

def _guarded(self, address):
    if self.family == socket.AF_UNIX:
        return _connect(self, address)
    return _refuse("connect")(address)

socket.socket.connect = _guarded
socket.getaddrinfo = _refuse("look-up")
"""


# One process for the five programs: starting each costs more than what it does here.
PROGRAMS = """
import json, sys
from kvp.program.table import run_program

for name, arguments in json.loads(sys.argv[1]).items():
    if code := run_program(name, arguments.split()):
        sys.exit(f"{name} ended with {code}")
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run folder of a tiny demo with what it printed, and the log of attempted network calls."""
    run = tmp_path_factory.mktemp("demo")
    log = run / "network.log"
    guard = run / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD.format(log=str(log)))
    environment = {**os.environ, "PYTHONPATH": str(guard)}
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # the demo must not need them
        environment.pop(name, None)
    configs = ROOT / "configs" / "demo"
    traces, policies, results = run / "traces", run / "policies", run / "results"
    tuned = run / "tuned"
    commands = {
        "collect": f"--config {configs}/collect.yaml --out {traces} --train 3 "
        "--validation 1 --length 192 --tasks niah_single_2",
        "train": f"--config {configs}/train.yaml --traces {traces} --out {policies} "
        "--steps 4 --validate_every 2",
        "tune": f"--config {configs}/tune.yaml --policies {policies} --out {tuned} "
        "--prompts 1 --length 256 --budgets 25% --tasks niah_single_2 --protocols query_agnostic "
        "--methods kvp,snapkv,kvzip --settings_per_method 3",
        "eval": f"--config {configs}/eval.yaml --policies {policies} "
        f"--out {results} --prompts 2 --length 256 --budgets 25% "
        "--tasks niah_single_2,chat --protocols query_agnostic "
        f"--methods full,tuned:{tuned},random --timing_prompts 1",
        "report": f"{results} --out {run}/report.html",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAMS, json.dumps(commands)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (run / "printed.txt").write_text(done.stdout)
    return run, log


def test_every_program_of_the_demo_leaves_its_files(demo):
    run, _ = demo
    assert (run / "traces" / "manifest.json").is_file()
    assert (run / "policies" / "policy.json").is_file()
    assert len(list((run / "policies").glob("layer_*_head_*.safetensors"))) == 20
    assert (run / "tuned" / "settings.json").is_file()
    for name in ("rows.jsonl", "timing.jsonl", "manifest.json"):
        assert (run / "results" / name).is_file(), name
    page = (run / "report.html").read_text()
    assert len(page) > 50_000
    assert page.count("<svg") == 2  # a figure of every protocol
    for part in ("Bytes and seconds", "Answers to read", "are lost to the full cache", "text/csv"):
        assert part in page, part


def test_the_closing_sentence_and_the_report_have_the_setting_that_was_tuned(demo):
    run, _ = demo
    settings = load_settings(run / "tuned")
    (chosen,) = (entry.chosen for entry in settings.methods if entry.method == "kvp")
    label = re.escape(chosen.label)
    assert re.search(
        rf"before compression, {label}, trained on this task, answers ",
        (run / "printed.txt").read_text(),
    )
    page = (run / "report.html").read_text()
    for entry in settings.methods:
        assert 3 <= entry.tried <= 6
        assert f"chosen on validation ({entry.tried} settings)" in page


def test_no_program_of_the_demo_touches_the_network(demo):
    _, log = demo
    assert not log.exists(), log.read_text()
