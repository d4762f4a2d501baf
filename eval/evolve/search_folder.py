"""The folder of a search: manifest.json, search.jsonl (`journal`), and budgets.json at the end.

A folder keeps one search for life: the same settings resume it or find it finished, others are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvp.errors import ResultsError
from kvp.manifest import differences, read_json, read_sealed_json, write_sealed_json

FORMAT = "kvp-search"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
JOURNAL = "search.jsonl"


def check_search(folder: Path, identity: Mapping[str, Any]) -> None:
    """Raise ResultsError where a folder holds something else, or another search."""
    path = folder / MANIFEST
    if not path.exists():
        refuse_others(folder)
        return
    manifest = read_json(path, ResultsError)
    if (manifest.get("format"), manifest.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise ResultsError(f"--out {folder} holds something else; choose another")
    found = differences(read_sealed_json(path, ResultsError)["identity"], dict(identity))
    if found:
        raise ResultsError(f"--out {folder} holds another search (--{found[0]}); choose another")


def create_search(folder: Path, identity: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Write the manifest of a search, unless it is there."""
    if (folder / MANIFEST).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "identity": dict(identity)}
    write_sealed_json(folder / MANIFEST, {**content, "run": dict(run)})


def refuse_others(folder: Path) -> None:
    """Raise ResultsError unless a folder is new or empty but for what a kill left behind."""
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"--out {folder} is a file; choose a folder")
    if folder.exists() and any(entry.suffix != ".partial" for entry in folder.iterdir()):
        raise ResultsError(f"--out {folder} is not empty; choose another")
