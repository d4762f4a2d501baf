"""Measure what kvp costs, part by part, and write the page from the files.

    python -m benchmarks.performance --kvpress ENVIRONMENT/bin/python
    python -m benchmarks.performance --only labels,store
    python -m benchmarks.performance --device cuda
    python -m benchmarks.performance --render

Every part is a benchmark that also runs by itself, here in a process of its own. Its JSON goes to
`--results`, one file per part and kind of device, when it is complete; a part that fails or is
interrupted leaves the former file. The page is made from these files alone, whoever measured them.
`run-DEVICE.json` has the seconds of each, what failed, and the rows of parts that did not end. On
two cores that do nothing else all take about ten minutes; on a GPU each is ended at its limit, and
the rows until then are its file where there was none.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import ROOT, environment, last_line, machine, write_json
from benchmarks.performance.page import write_pages
from benchmarks.performance.parts import PARTS, Part

RESULTS, PAGE = ROOT / "benchmarks/results/performance", ROOT / "docs/performance.md"
QUICK = ROOT / "runs/performance"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts and write the page; the exit code is 1 where a part failed."""
    given = _arguments(arguments)
    done: dict[str, dict[str, Any]] = {}
    for part in () if given.render else _chosen(given):
        print(f"--- {part.name}", flush=True)
        done[part.name] = measure(part, given)
        for what, line in done[part.name]["failed"].items():
            print(f"{part.name}: {what}: {line}", file=sys.stderr, flush=True)
        told = {"machine": machine(), "parts": done}
        write_json(given.results / f"run-{given.device}.json", told)
    write_pages(given.results, given.out)
    print(f"{given.out} is written from {given.results}")
    failed = [name for name, part in done.items() if part["failed"]]
    if failed:
        print(f"not all measured: {', '.join(failed)}; see the messages above", file=sys.stderr)
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
        parser.error("--device cuda: nvidia-smi shows no GPU here")
    given.kvpress = given.kvpress and str(Path(given.kvpress).absolute())
    given.results = given.results or (QUICK if given.quick else RESULTS)
    given.out = given.out or (QUICK / "performance.md" if given.quick else PAGE)
    return given


def _chosen(given: argparse.Namespace) -> list[Part]:
    """The parts to measure; prints the name of each that needs a GPU where there is none."""
    chosen = []
    for part in PARTS:
        if given.only and part.name not in given.only:
            continue
        if given.device == "cpu" and part.cpu is None and not given.quick:
            print(f"{part.name}: measured on a GPU only")
        else:
            chosen.append(part)
    return chosen


def measure(part: Part, given: argparse.Namespace) -> dict[str, Any]:
    """Write `PART-DEVICE.json` into `given.results`, unless the part fails.

    Returns its command, its seconds and what failed in it, `failed` (messages by case). Where the
    part failed as a whole this is `all`, and `rows` has the rows until then.
    """
    path = given.results / part.file(given.device)
    words = part.words(given.device, quick=given.quick)
    command = f"python -m {part.module} {shlex.join(words)}".strip()
    if given.kvpress and part.takes_kvpress:
        words += ["--kvpress", given.kvpress]
        command += " --kvpress ENVIRONMENT/bin/python"
    limit = part.limit if given.device == "cuda" else 3 * part.limit if given.quick else None
    begun = time.monotonic()
    with TemporaryDirectory() as made:
        found = Path(made) / "found.json"
        out = [] if part.module == "pytest" else ["--out", str(found)]
        lines, problem = run(part.module, words + out, limit)
        told = {"command": command, "seconds": round(time.monotonic() - begun, 1)}
        if not out and lines and " in " in lines[-1]:  # its last line counts outcomes
            write_json(found, _tested(lines, given.device))
        elif problem:
            rows = _rows(lines)
            if rows and limit and not path.exists():
                settings = {"device": given.device, "ended": problem}
                ended = {"machine": machine(), "settings": settings, "results": rows}
                write_json(path, ended | told)
            return told | {"failed": {"all": problem}, "rows": rows}
        report = json.loads(found.read_text()) | told
    if report["settings"].get("kvpress"):
        report["settings"]["kvpress"] = "ENVIRONMENT/bin/python"
    write_json(path, report)
    failed = report.get("failed", {})
    for row in report["results"]:
        if row.get("skipped", "").startswith("failed: "):
            case = [row[key] for key in ("form", "method", "length", "tokens") if key in row]
            failed[":".join(map(str, case))] = row["skipped"]
    return told | {"failed": failed}


def _tested(lines: Sequence[str], device: str) -> dict[str, Any]:
    """The report of a run of pytest, from its last lines."""
    bad = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return {
        "machine": machine(),
        "settings": {"device": device},
        "results": [{"outcome": lines[-1].strip("= \n")}],
        "failed": {test: why.strip() for test, _, why in (line.partition(" - ") for line in bad)},
    }


def _rows(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that a part has printed: its lines that are JSON."""
    rows = []
    for line in lines:
        with suppress(ValueError):  # the last one may be cut
            rows += [json.loads(line)] if line.startswith("{") else []
    return rows


def run(module: str, words: Sequence[str], limit: float | None) -> tuple[list[str], str]:
    """`python -m MODULE WORDS`, ended after `limit` seconds: what it wrote, and why it failed."""
    ended = ["timeout", "--signal=KILL", str(limit)] if limit else []  # with all it has started
    call = [*ended, sys.executable, "-m", module, *words]
    lines = []
    with Popen(call, env=environment(), cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode in (-9, 137) and limit:
        return lines, f"not done after {limit:g} s"
    said = last_line("".join(line for line in lines if not line.startswith("{")))
    return lines, (said or f"ended with {process.returncode}") if process.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
