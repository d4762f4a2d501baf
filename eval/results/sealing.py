"""Digests of a results folder's files, which its manifest holds once a run has ended."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval.results.record_names import MANIFEST, SETTINGS, TABLE
from eval.results.records import RECORDS
from kvp.artifacts.manifest import read_sealed_json, sha256_file, write_sealed_json
from kvp.errors import ResultsError
from kvp.hub import BUDGET_FILE

_SEALED = (*RECORDS, SETTINGS, TABLE, BUDGET_FILE)
"""Files whose digests the manifest of a finished folder holds, where they are there."""


def seal(folder: Path) -> None:
    """Put the digests of the files into the manifest of a folder whose run ends."""
    while describe_changes(folder, manifest := read_sealed_json(folder / MANIFEST, ResultsError)):
        write_sealed_json(folder / MANIFEST, {**manifest, "files": _digests(folder)})


def describe_changes(folder: Path, manifest: Mapping[str, Any]) -> str:
    """How files differ from the digests of the last finished run, in words; "" if they do not."""
    files, digests = manifest.get("files"), _digests(folder)
    if not isinstance(files, dict) or not files:
        return "the last run has not ended" if "files" in manifest else ""
    names = sorted(name for name in {*files, *digests} if files.get(name) != digests.get(name))
    return f"the last run left another {' and '.join(names)}" if names else ""


def _digests(folder: Path) -> dict[str, str]:
    return {name: sha256_file(folder / name) for name in _SEALED if (folder / name).exists()}
