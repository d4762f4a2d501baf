"""Measure what kvp costs, part by part, and write the page from the files.

    python -m benchmarks.performance --kvpress ENVIRONMENT/bin/python
    python -m benchmarks.performance --only labels,store
    python -m benchmarks.performance --device cuda
    python -m benchmarks.performance --render

Every part is a benchmark that also runs by itself, here in a process of its own. Its JSON goes to
`--results`, one file per part and kind of device, when it is complete; a part that fails or is
interrupted leaves the former file. The page is made from these files alone, whoever measured them.
On two cores that do nothing else all parts take about ten minutes.
"""

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

from benchmarks.measuring import ROOT, machine, write_json
from benchmarks.performance.page import write_pages
from benchmarks.performance.parts import PARTS, Part

RESULTS, PAGE = ROOT / "benchmarks/results/performance", ROOT / "docs/performance.md"
QUICK = ROOT / "runs/performance"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts, write the page; 1 where a part failed, and 2 for flags that cannot be."""
    given = _arguments(arguments)
    failed = []
    for part in () if given.render else _chosen(given):
        print(f"--- {part.name}", flush=True)
        try:
            measure(part, given)
        except subprocess.CalledProcessError as problem:
            failed.append(part.name)
            print(f"{part.name}: ended with {problem.returncode}", file=sys.stderr)
    write_pages(given.results, given.out)
    print(f"{given.out} is written from {given.results}")
    if failed:
        print(f"not measured: {', '.join(failed)}; see the messages above", file=sys.stderr)
    return 1 if failed else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="benchmarks.performance", allow_abbrev=False)
    parser.add_argument("--only", default="", help=f"some of {', '.join(names)}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--kvpress", help="interpreter of kvpress's environment")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--render", action="store_true", help="write the page, measure nothing")
    parser.add_argument("--results", type=Path, help="folder of the JSON files")
    parser.add_argument("--out", type=Path, help="the page")
    given = parser.parse_args(arguments)
    given.only = [name for name in given.only.split(",") if name]
    if unknown := sorted(set(given.only) - set(names)):
        parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(names)}")
    if given.kvpress and not Path(given.kvpress).is_file():
        parser.error(f"--kvpress: no interpreter {given.kvpress}; recipes/kvpress makes one")
    if given.device == "cuda" and not given.render and machine()["gpu"] is None:
        parser.error("--device cuda: torch sees no CUDA device here")
    given.results = given.results or (QUICK if given.quick else RESULTS)
    given.out = given.out or (QUICK / "performance.md" if given.quick else PAGE)
    return given


def _chosen(given: argparse.Namespace) -> list[Part]:
    """The parts to measure; what the device cannot do is named."""
    chosen = []
    for part in PARTS:
        if given.only and part.name not in given.only:
            continue
        if given.device == "cuda" and not part.on_gpu:
            print(f"{part.name}: measured on a CPU only")
        else:
            chosen.append(part)
    return chosen


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


if __name__ == "__main__":
    sys.exit(main())
