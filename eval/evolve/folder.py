"""The folder of a search: manifest.json, search.jsonl (`journal`), and budgets.json at the end.

A folder keeps one search for life: the same settings resume it or find it finished, others are
refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvp.errors import ResultsError
from kvp.manifest import differences, read_sealed_json, write_sealed_json

FORMAT = "kvp-search"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
JOURNAL = "search.jsonl"


def open_search(folder: Path, identity: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Create the folder of a search, or check that it is of the same one.

    Raises ResultsError where it holds something else, or another search.
    """
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"--out {folder} is a file; choose a folder")
    path = folder / MANIFEST
    if path.exists():
        manifest = read_sealed_json(path, ResultsError)
        if (manifest.get("format"), manifest.get("format_version")) != (FORMAT, FORMAT_VERSION):
            raise ResultsError(f"--out {folder} holds something else; choose another")
        found = differences(manifest["identity"], dict(identity))
        if found:
            raise ResultsError(
                f"--out {folder} holds another search (--{found[0].strip('_')}); choose another"
            )
        return
    refuse_others(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "identity": dict(identity)}
    write_sealed_json(path, {**content, "run": dict(run)})


def refuse_others(folder: Path) -> None:
    """Raise ResultsError unless a folder is new or empty but for what a kill left behind."""
    if folder.exists() and not folder.is_dir():
        raise ResultsError(f"--out {folder} is a file; choose a folder")
    if folder.exists() and any(entry.suffix != ".partial" for entry in folder.iterdir()):
        raise ResultsError(f"--out {folder} is not empty; choose another")
