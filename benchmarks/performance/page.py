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
from benchmarks.performance.tables import name_of
from kvp.artifacts.files import atomic_write_bytes

Report = Mapping[str, Any]
Reports = Mapping[tuple[str, str], Report]

HEADING = "# Performance\n"
INTRODUCTION = """Models have random weights. Each table is of one run; cells are medians unless it
says otherwise. Processor time is of all threads. [Speed]({speed}) says what was decided.
"""
COMMANDS = """## How to measure again

`python -m benchmarks.performance` measures all and writes this page. The JSON files have cores,
versions, commits, rounds and load. The commands:
"""
COMMAND = "python -m benchmarks.performance"


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
    commands = [COMMANDS, *(f"    {report['command']}" for report in reports.values()), ""]
    return "\n".join([*head, _without_gpu(reports), *sections, *(commands if reports else ())])


def fill(text: str) -> str:
    """The text in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _without_gpu(reports: Reports) -> str:
    """A sentence on the parts that were not measured on a GPU; "" where all were."""
    missing = [f"*{part.title}*" for part in PARTS if (part.name, "cuda") not in reports]
    if not missing:
        return ""
    text = f"Not measured on a GPU: {', '.join(missing)}."
    if len(missing) == len(PARTS):
        text = "Nothing was measured on a GPU."
    return f"{fill(f'{text} `benchmarks/gpu/run.sh` measures them.')}\n"


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
    hardware = report["machine"].get("gpu" if label == "GPU" else "cpu") or "unknown hardware"
    lines = [f"**{label}** ({hardware}, [JSON]({link})): {unit}.\n"]
    for table in part.table(report):
        lines += [f"{table.markdown()}\n", *(f"{fill(note)}\n" for note in table.notes)]
    lacking = _lacking(report) if "ended" in report["settings"] else []
    if lacking:
        note = f"Not timed within the run's limit: {', '.join(lacking)}."
        lines.append(f"{fill(note)}\n")
    return "\n".join(lines)


def _lacking(report: Report) -> list[str]:
    """Lengths, models and cases that the command of a run names and that no result has."""
    words = report.get("command", "").split()
    values = dict(pairwise(words))
    asked = [values[flag].split(",") for flag in ("--tokens", "--lengths", "--models", "--cases")
             if flag in values]  # fmt: skip
    found = [{str(value) for value in result.values()} for result in report["results"]]
    return [_case(name) for names in asked for name in names
            if not any(found_one.issuperset(name.split(":")) for found_one in found)]  # fmt: skip


def _case(name: str) -> str:
    model, _, last = name.rpartition(":")
    told = f"{int(last):,} tokens" if last.isdigit() else name_of(last)
    return f"{name_of(model)} at {told}" if model else told
