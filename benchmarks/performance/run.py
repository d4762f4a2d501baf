"""Run one part in a process of its own and keep its file, with the command that made it."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.measuring import ROOT, write_json
from benchmarks.performance.parts import Part


def measure(part: Part, given: argparse.Namespace) -> None:
    """Write `PART-DEVICE.json` into `given.results`; CalledProcessError where the part fails."""
    words = part.words(given.device, quick=given.quick)
    if given.kvpress and part.takes_kvpress:
        words += ["--kvpress", given.kvpress]
    begun = time.monotonic()
    with TemporaryDirectory() as made:
        found = Path(made) / "found.json"
        run(part.module, [*words, "--out", str(found)])
        report = json.loads(found.read_text())
    shown = ["ENVIRONMENT/bin/python" if word == given.kvpress else word for word in words]
    if report["settings"].get("kvpress"):
        report["settings"]["kvpress"] = "ENVIRONMENT/bin/python"
    report["command"] = f"python -m {part.module} {shlex.join(shown)}".strip()
    report["seconds"] = round(time.monotonic() - begun, 1)
    write_json(given.results / part.file(given.device), report)


def run(module: str, words: Sequence[str]) -> None:
    """`python -m MODULE WORDS`, its output on this one's."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    subprocess.run([sys.executable, "-m", module, *words], env=environment, check=True)
