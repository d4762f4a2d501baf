"""The folder of a search: manifest.json, search.jsonl (`journal`), and budgets.json at the end.

A folder keeps one search for life: the same settings resume it or find it finished, others are
refused (`kvp.artifacts.claim`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvp.artifacts.claim import FolderKind, OutputFolder
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json, write_sealed_json
from policies.budget_files import BUDGET_FILE

FORMAT = "kvp-search"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
JOURNAL = "search.jsonl"


def _read_manifest(path: Path) -> Mapping[str, Any]:
    content = read_sealed_json(path, ResultsError)
    if content.get("format_version") != FORMAT_VERSION:
        raise ResultsError(
            f"{path} has format_version {content.get('format_version')!r}, this kvp-evolve reads "
            f"{FORMAT_VERSION}; choose another --out"
        )
    return content


SEARCH = FolderKind(
    noun="search",
    marker=MANIFEST,
    error=ResultsError,
    format=FORMAT,
    files=f"{JOURNAL}|{BUDGET_FILE}",
    read=_read_manifest,
    optional=("input_files", "model_digest"),
)


def begin_search(folder: OutputFolder, identity: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Write the manifest of a claimed folder, unless it is there; else compare the identity."""
    folder.require(identity)
    if folder.found is None:
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, "identity": dict(identity)}
        write_sealed_json(folder.path / MANIFEST, {**content, "run": dict(run)})
