"""The page, from the JSON files alone."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT
from benchmarks.performance.parts import PARTS, Part
from benchmarks.performance.tables import milliseconds, number, percent
from kvp.artifacts.files import atomic_write_text

Report = Mapping[str, Any]
Reports = Mapping[tuple[str, str], Report]

HEADING = "# Performance\n"
REAL = """What a policy adds to a prefill of real models on a CPU:
[Qwen2.5-Coder](results/qwen2.5-coder_details.md#cost), [SmolLM2](results/speed.md),
[in vLLM](results/engines.md#speed-and-memory-in-vllm).
"""
INTRODUCTION = """What kvp costs, written by `python -m benchmarks.performance` from the
JSON files it links to; what the numbers decided is in [speed.md]({speed}). Compare numbers
of one table only. *Processor time* is that of all threads, *wall* the time on the clock; on
a GPU only wall time counts. The files also have cores, driver, the other clock, medians,
rounds and the prefill with each method.
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
    atomic_write_text(page, page_text(reports, folder, speed))


def page_text(reports: Reports, folder: str, speed: str) -> str:
    """The page; `folder` and `speed` are the addresses of the files and of docs/results/speed.md.

    `reports` are the files by part and kind of device; parts without one are named.
    """
    measured = [part for part in PARTS if part.cpu is not None or (part.name, "cuda") in reports]
    sections = [_section(part, reports, folder) for part in measured]
    head = [HEADING, REAL, *_conclusions(reports), INTRODUCTION.format(speed=speed)]
    return "\n".join([*head, _without_gpu(reports), *sections])


def fill(text: str) -> str:
    """Lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _conclusions(reports: Reports) -> list[str]:
    """A paragraph of what the tables come to; nothing of what was not measured."""
    devices = {"cpu": "CPU", "cuda": "GPU"}
    sentences = []
    for part, describe in (("scoring", _of_scoring), ("decoding", _of_decoding)):
        for device, where in devices.items():
            sentences += describe(reports.get((part, device)), where)
    training = {where: reports.get(("training", name)) for name, where in devices.items()}
    sentences += _of_training(training["GPU"], "GPU") or _of_training(training["CPU"], "CPU")
    return [f"{fill(' '.join(sentences))}\n"] if sentences else []


def _of_scoring(report: Report | None, where: str) -> list[str]:
    """What a policy and KVzip add to a prefill, at every length."""
    clock = "wall_share" if where == "GPU" else "share"
    told = []
    for method, name in (("kvp", "a policy"), ("kvzip:kvpress", "KVzip")):
        added = [
            f"{percent(row[clock])} % at {row['tokens']:,} tokens"
            for row in (report or {"results": ()})["results"]
            if row["method"] == method and row["source"] == "kvp" and clock in row
        ]
        told += [f"{name} adds {' and '.join(added)}"] if added else []
    words = f"With random weights, to a prefill on a {where} {'; '.join(told)}."
    return [words] if told else []


def _of_training(report: Report | None, where: str) -> list[str]:
    """The step of most heads."""
    if not report:
        return []
    row = max(report["results"], key=lambda row: int(row["heads"]))
    seconds, peak = row["processor_seconds"], number(row["peak_gb"])
    if where == "GPU":
        seconds = row["seconds"]
    took = f"{milliseconds(seconds)} ms and {peak} GB on a {where}"
    return [f"A step of training of {row['heads']} heads takes {took}."]


def _of_decoding(report: Report | None, where: str) -> list[str]:
    """One token behind the longest cache of the first model."""
    rows = report["results"] if report else []
    if not rows:
        return []
    first = [row for row in rows if row["model"] == rows[0]["model"]]
    tokens = max(row["tokens"] for row in first)
    found = {row["cache"]: number(row["fastest"]) for row in first if row["tokens"] == tokens}
    found |= {name.removesuffix(":auto"): took for name, took in found.items()}
    names = {
        "full": "the whole cache",
        "uniform": "an eighth of it in every head",
        "ragged": "as much in unequal heads",
    }
    told = [f"{found[cache]} ms with {name}" for cache, name in names.items() if cache in found]
    start = f"In `{rows[0]['model']}` on a {where} a token behind {tokens:,} takes"
    return [f"{start} {', '.join(told)}."] if told else []


def _without_gpu(reports: Reports) -> str:
    """Which parts have no numbers of a GPU."""
    missing = [part.title for part in PARTS if (part.name, "cuda") not in reports]
    if not missing:
        return ""
    text = f"Not measured on a GPU: {', '.join(f'*{title}*' for title in missing)}."
    if len(missing) == len(PARTS):
        text = "Nothing was measured on a GPU."
    return f"{fill(f'{text} `benchmarks/gpu/run.sh` does it.')}\n"


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
    lines = [f"**{label}.** {_machine(report)} [JSON]({link}).\n", f"    {report['command']}\n"]
    lines += [table.markdown() + "\n" for table in part.table(report)]
    return "\n".join(lines)


def _machine(report: Report) -> str:
    """A sentence on where and when."""
    of = report["machine"]
    hardware = of.get("gpu") if report["settings"].get("device") == "cuda" else of.get("cpu")
    commit = f"commit `{(of.get('commit') or 'unknown')[:10]}`"
    if of.get("changed"):
        commit += " with changes"
    parts = [hardware or "unknown hardware", f"torch {of['torch']}", commit]
    parts += [of["date"].partition(" ")[0], f"load {of['load']:.1f}"]
    ended = report["settings"].get("ended")
    return ", ".join(parts) + ("." if ended is None else f". The rows until it was ended: {ended}.")
