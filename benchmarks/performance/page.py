"""The page and the list of its files, from the JSON files alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.performance.parts import PARTS, Part
from benchmarks.performance.tables import Table
from kvp.artifacts.files import atomic_write_text

Report = Mapping[str, Any]

INTRODUCTION = """# Performance

What kvp costs, measured. This page is written by `python -m benchmarks.performance` from the JSON
files it links to; what the numbers decided is in [speed.md]({speed}).

- Compare numbers of one table only: its rows were measured in one run and take turns where it says
  so. Ratios survive a busy machine, seconds do not.
- *Processor time* is that of all threads of a process, *wall* the time on the clock. On a GPU only
  wall time counts.
- GPU rows are there where a GPU was measured. Where none was, the page says so and has no numbers.
"""
COMMAND = "python -m benchmarks.performance"


def write_pages(results: Path, page: Path) -> None:
    """Write the page, and README.md of the folder `results`, which lists its files."""
    reports = {
        (part.name, device): json.loads(path.read_text(encoding="utf-8"))
        for part in PARTS
        for device in ("cpu", "cuda")
        if (path := results / part.file(device)).is_file()
    }
    results.mkdir(parents=True, exist_ok=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    folder = os.path.relpath(results, page.parent)
    speed = os.path.relpath(Path(__file__).parents[2] / "docs/results/speed.md", page.parent)
    text = [INTRODUCTION.format(speed=speed), _overview(reports)]
    text += [_section(part, reports, folder) for part in PARTS]
    atomic_write_text(page, "\n".join(text))
    atomic_write_text(results / "README.md", _listing(reports, os.path.relpath(page, results)))


def _overview(reports: Mapping[tuple[str, str], Report]) -> str:
    rows = []
    for part in PARTS:
        cells = [f"[{part.title}](#{_anchor(part.title)})"]
        for device in ("cpu", "cuda"):
            report = reports.get((part.name, device))
            if report is not None:
                cells.append(report["machine"].get("gpu" if device == "cuda" else "cpu") or "yes")
            else:
                cells.append("not measured" if device == "cpu" or part.on_gpu else "no part in it")
        rows.append(cells)
    return Table(headings=["part", "CPU", "GPU"], rows=rows, names=3).markdown() + "\n"


def _anchor(title: str) -> str:
    """The address of a heading, as GitHub makes it."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -")
    return kept.replace(" ", "-")


def _section(part: Part, reports: Mapping[tuple[str, str], Report], folder: str) -> str:
    text = [f"## {part.title}\n", f"{part.text}\n"]
    for device, label in (("cpu", "CPU"), ("cuda", "GPU")):
        report = reports.get((part.name, device))
        if report is not None:
            text += [_measured(part, report, f"{folder}/{part.file(device)}", label)]
        elif device == "cuda" and not part.on_gpu:
            continue
        elif not part.present:
            if device == "cpu":
                text.append(f"Not measured: this version has no `{part.module}`.\n")
        elif device == "cuda":
            again = f"{COMMAND} --device cuda --only {part.name}"
            text.append(f"**GPU.** No rows: no GPU was measured. `{again}` adds them.\n")
        else:
            text.append(f"Not measured yet: `{COMMAND} --only {part.name}`.\n")
    return "\n".join(text)


def _measured(part: Part, report: Report, link: str, label: str) -> str:
    lines = [f"**{label}.** {_machine(report)} [JSON]({link}).\n", f"    {report['command']}\n"]
    lines += [table.markdown() + "\n" for table in part.table(report["results"])]
    return "\n".join(lines)


def _machine(report: Report) -> str:
    """A sentence on where and when."""
    of = report["machine"]
    hardware = of.get("gpu") if report["settings"].get("device") == "cuda" else of.get("cpu")
    commit = f"commit `{(of.get('commit') or 'unknown')[:10]}`"
    if of.get("changed"):
        commit += " with changes that were not committed"
    parts = [hardware or "unknown hardware", f"{of['cores']} cores", f"torch {of['torch']}", commit]
    parts += [of["date"], f"{report['seconds']:,.0f} s in all", f"load {of['load']:.1f} at its end"]
    return ", ".join(parts) + "."


def _listing(reports: Mapping[tuple[str, str], Report], page: str) -> str:
    """What the folder holds."""
    rows = []
    for part in PARTS:
        for device in ("cpu", "cuda"):
            report = reports.get((part.name, device))
            if report is not None:
                name = part.file(device)
                rows.append([f"[{name}]({name})", part.title, f"`{report['command']}`"])
    table = Table(headings=["file", "part", "command"], rows=rows, names=3).markdown()
    return (
        f"# Files of the page on performance\n\nWritten by `{COMMAND}`, with [the page]({page}).\n"
        f"\n{table}\n"
    )
