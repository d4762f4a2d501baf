"""The page, from the JSON files alone."""

from __future__ import annotations

import itertools
import json
import os
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT
from benchmarks.performance.parts import PARTS, Part
from benchmarks.performance.tables import NONE, Table, rounded
from kvp.artifacts.files import atomic_write_bytes

Report = Mapping[str, Any]
Reports = Mapping[tuple[str, str], Report]

HEADING = "# Performance\n"
REAL = """What a policy adds to a prefill of real models on a CPU:
[Qwen2.5-Coder](results/qwen2.5-coder_details.md#cost), [SmolLM2](results/speed.md),
[in vLLM](results/engines.md#speed-and-memory-in-vllm).
"""
SUMMARY = """Measured with random weights, every number by one run on one machine: processor time of
all threads on a CPU, wall time on a GPU; sizes differ between the columns."""
INTRODUCTION = """`python -m benchmarks.performance` writes this page from the JSON files it links
to, which also have cores, driver, medians and rounds; what the numbers decided is in
[speed.md]({speed}).
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

    `reports` are the files by part and kind of device; parts without one are named.
    """
    measured = [part for part in PARTS if part.cpu is not None or (part.name, "cuda") in reports]
    sections = [_section(part, reports, folder) for part in measured]
    head = [HEADING, REAL, *_summary(reports), INTRODUCTION.format(speed=speed)]
    return "\n".join([*head, _without_gpu(reports), *sections])


def fill(text: str) -> str:
    """Lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _summary(reports: Reports) -> list[str]:
    """A table of what the sections come to; nothing of what was not measured."""
    of_parts = {"scoring": _of_scoring, "decoding": _of_decoding, "training": _of_training}
    rows = []
    for part in PARTS:
        if part.name not in of_parts:
            continue
        anchor = part.title.lower().replace(" ", "-")
        sides = [
            of_parts[part.name](report) if (report := reports.get((part.name, device))) else {}
            for device in ("cpu", "cuda")
        ]
        rows += [
            [f"[{question}](#{anchor})", *(side.get(question, NONE) for side in sides)]
            for question in dict.fromkeys(itertools.chain(*sides))
        ]
    gpus = {report["machine"]["gpu"] for (_, device), report in reports.items() if device == "cuda"}
    models = {re.sub(r"^NVIDIA (\S+).*", r"\1", gpu or "GPU") for gpu in gpus}
    gpu = models.pop() if len(models) == 1 else "GPU"
    table = Table(headings=["question", "CPU", gpu], rows=rows, names=3)
    return [f"{fill(SUMMARY)}\n", table.markdown() + "\n"] if rows else []


def _of_scoring(report: Report) -> dict[str, str]:
    """What a policy and KVzip add to the shortest and the longest prefill."""
    clock = "wall_share" if report["settings"].get("device") == "cuda" else "share"
    told = {}
    for method, name in (("kvp", "a policy"), ("kvzip:kvpress", "KVzip")):
        shares = {
            row["tokens"]: f"{rounded(100 * row[clock])} % at {row['tokens']:,}"
            for row in report["results"]
            if row["method"] == method and row["source"] == "kvp" and clock in row
        }
        if shares:
            ends = dict.fromkeys((min(shares), max(shares)))
            both = ", ".join(shares[tokens] for tokens in ends)
            told[f"What {name} adds to a prefill"] = f"{both} tokens"
    return told


def _of_decoding(report: Report) -> dict[str, str]:
    """One token behind the longest cache of the first model."""
    first = [row for row in report["results"] if row["model"] == report["results"][0]["model"]]
    tokens = max((row["tokens"] for row in first), default=0)
    names = {
        "full": "the whole cache", "uniform": "an eighth in every head",
        "ragged": "an eighth in unequal heads",
    }  # fmt: skip
    told = {}
    for row in first:
        name = names.get(row["cache"].removesuffix(":auto"))
        if name and row["tokens"] == tokens:
            told[f"One token, {name}"] = (
                f"{rounded(row['fastest'])} ms behind {tokens:,} tokens (`{row['model']}`)"
            )
    return told


def _of_training(report: Report) -> dict[str, str]:
    """The step of most heads."""
    row, of = max(report["results"], key=lambda row: int(row["heads"])), report["settings"]
    seconds = row["seconds" if of["device"] == "cuda" else "processor_seconds"]
    took = f"{rounded(1000 * seconds)} ms, {rounded(row['peak_gb'])} GB"
    if "contexts" in of:
        took += f" for {of['contexts']} x {of['tokens']:,} tokens"
    return {f"A step of training, {row['heads']} heads ({row['objective']})": took}


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
    return ", ".join(parts) + ("." if ended is None else f". Incomplete: {ended}.")
