"""Write docs/performance.md from the JSON files alone."""

import json
import os
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT
from benchmarks.performance.parts import PARTS, Part
from kvp.artifacts.files import atomic_write_bytes

Report = Mapping[str, Any]
Reports = Mapping[tuple[str, str], Report]

HEADING = "# Performance\n"
INTRODUCTION = """Models have random weights. Each table is of one run. Processor time is of all
threads. `python -m benchmarks.performance` writes this page from the linked JSON files, which
also have cores, versions, load, medians and rounds. [Speed]({speed}) says what the numbers decided.
"""
COMMAND = "python -m benchmarks.performance"
UNSHOWN = " (tests, no section yet)"


def write_pages(results: Path, page: Path) -> None:
    """Write the page from the files in `results`."""
    reports = {
        (part.name, device): json.loads(path.read_text(encoding="utf-8"))
        for part in PARTS
        for device in ("cpu", "cuda")
        if (path := results / part.file(device)).is_file()
    }
    page.parent.mkdir(parents=True, exist_ok=True)
    speed = os.path.relpath(ROOT / "docs/results/speed.md", page.parent)
    folder = os.path.relpath(results, page.parent)
    atomic_write_bytes(page, page_text(reports, folder, speed).encode())


def page_text(reports: Reports, folder: str, speed: str) -> str:
    """The page; `folder` and `speed` are the addresses of the files and of docs/results/speed.md.

    `reports` are the files by part and kind of device; parts without one are named. A file's
    `conclusion`, sentences written by hand, is a point at the top until the part is measured again.
    """
    measured = [part for part in PARTS if part.cpu is not None or (part.name, "cuda") in reports]
    sections = [_section(part, reports, folder) for part in measured]
    told = [report["conclusion"] for report in reports.values() if "conclusion" in report]
    points = "".join(f"{fill(f'- {conclusion}')}\n" for conclusion in told)
    head = [HEADING, *([points] if points else ()), INTRODUCTION.format(speed=speed)]
    return "\n".join([*head, _without_gpu(reports), *_not_timed(reports), *sections])


def fill(text: str) -> str:
    """The text in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _without_gpu(reports: Reports) -> str:
    """A sentence on the parts that were not measured on a GPU; "" where all were."""
    absent = [part for part in PARTS if (part.name, "cuda") not in reports]
    missing = [f"*{part.title}*{UNSHOWN * (part.cpu is None)}" for part in absent]
    if not missing:
        return ""
    text = f"Not measured on a GPU: {', '.join(missing)}."
    if len(missing) == len(PARTS):
        text = "Nothing was measured on a GPU."
    return f"{fill(f'{text} `benchmarks/gpu/run.sh` measures them.')}\n"


def _not_timed(reports: Reports) -> list[str]:
    """A paragraph on what runs lack that were ended at their limit; none where all were whole."""
    ended = "; ".join(
        f"{', '.join(f'`{name}`' for name in _lacking(report))} (*{part.title}*)"
        for part in PARTS
        for device in ("cpu", "cuda")
        if (report := reports.get((part.name, device))) and "ended" in report["settings"]
    )
    text = f"Not timed, since runs were ended at their limit: {ended}. The tables say nothing about"
    return [f"{fill(f'{text} longer texts or larger models than theirs.')}\n"] if ended else []


def _section(part: Part, reports: Reports, folder: str) -> str:
    text = [f"## {part.title}\n", f"{fill(part.text)}\n"]
    for device, label in (("cpu", "CPU"), ("cuda", "GPU")):
        report = reports.get((part.name, device))
        if report is not None:
            text += [_measured(part, report, f"{folder}/{part.file(device)}", label)]
        elif device == "cpu" and part.cpu is not None:
            text.append(f"Not measured yet: `{COMMAND} --only {part.name}`.\n")
    return "\n".join(text)


def _measured(part: Part, report: Report, link: str, label: str) -> str:
    unit = part.unit.format(clock="processor" if label == "CPU" else "wall")
    head = f"**{label}, {unit}.** {_machine(report)} [JSON]({link}).\n"
    lines = [head, f"    {report['command']}\n"]
    for table in part.table(report):
        lines += [f"{table.markdown()}\n", *(f"{fill(note)}\n" for note in table.notes)]
    return "\n".join(lines)


def _machine(report: Report) -> str:
    """A sentence on hardware and commit."""
    machine = report["machine"]
    hardware = machine.get("gpu" if report["settings"].get("device") == "cuda" else "cpu")
    commit = f"commit `{(machine.get('commit') or 'unknown')[:10]}`"
    if machine.get("changed"):
        commit += " with changes"
    return f"{hardware or 'unknown hardware'}, {commit}."


def _lacking(report: Report) -> list[str]:
    """Lengths, models and cases that the command of a run names and that no result has."""
    words = report.get("command", "").split()
    values = dict(pairwise(words))
    asked = [values[flag].split(",") for flag in ("--tokens", "--lengths", "--models", "--cases")
             if flag in values]  # fmt: skip
    found = [{str(value) for value in result.values()} for result in report["results"]]
    return [name for names in asked for name in names
            if not any(found_one.issuperset(name.split(":")) for found_one in found)]  # fmt: skip
