"""Read a results folder and check what the report relies on.

Missing optional parts are None or empty, and the page says so; damaged parts are errors. A torn
last line, which an interrupted run can leave, is left out with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.report.schema import (
    CURVE_SCHEMA,
    KEPT_SCHEMA,
    ROW_SCHEMA,
    TIMING_SCHEMA,
    RecordSchema,
    manifest_fault,
    tokens_are_sound,
)
from eval.results.folder import (
    CURVES,
    KEPT,
    MANIFEST,
    ROWS,
    TIMING,
    TOKENS,
    lost_records,
    read_manifest,
    tuned_of,
)
from eval.results.records import Record, read_records
from eval.tune.settings_file import TunedSettings
from kvp.errors import ResultsError
from kvp.manifest import read_sealed_json
from kvp.metrics import METRICS_VERSION


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results folder, read."""

    folder: Path
    manifest: Mapping[str, Any]
    records: tuple[Record, ...]
    """rows.jsonl, at least one record."""
    timing: tuple[Record, ...]
    """timing.jsonl; empty where there was no timing pass."""
    curves: tuple[Record, ...]
    """curves.jsonl; empty where there were no traces."""
    kept: tuple[Record, ...]
    """kept.jsonl; empty where there were no traces."""
    tokens: Mapping[str, Any] | None
    """tokens.json."""
    tuned: tuple[TunedSettings, ...]
    """What kvp tune chose and the run took from `tuned:FILE`."""
    notes: tuple[str, ...]
    """Remarks on the files for the reader, one sentence each."""

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """A setting of the run as its manifest records it, None where it does not."""
        for part in ("identity", "config"):
            values = self.manifest.get(part)
            if isinstance(values, Mapping) and name in values:
                return values[name]
        return None

    @property
    def protocols(self) -> tuple[str, ...]:
        """Protocols that have records, in the order of the file."""
        return tuple(dict.fromkeys(record["protocol"] for record in self.records))


def load_results(folder: Path) -> Results:
    """Read a results folder.

    Raises ResultsError, in one line that names the file, where the folder is missing, holds no
    results, is of an unknown format, or is damaged.
    """
    if not folder.is_dir():
        raise ResultsError(f"{folder} is not a folder; give the results folder of kvp-eval")
    if not (folder / MANIFEST).exists():
        raise ResultsError(f"{folder} holds no {MANIFEST}; is this a results folder of kvp-eval?")
    manifest = read_manifest(folder / MANIFEST)
    if (name := manifest_fault(manifest)) is not None:
        raise ResultsError(f"{folder / MANIFEST} is damaged: {name!r} has no valid value")
    if (lost := lost_records(folder, manifest)) is not None:
        raise ResultsError(f"{lost}; run the same kvp-eval command again")
    notes: list[str] = list(manifest.get("notes", []))
    records = _checked_records(folder / ROWS, ROW_SCHEMA, notes)
    if not records:
        raise ResultsError(f"{folder / ROWS} holds no records yet; run kvp-eval first")
    optional = {
        name: _checked_records(folder / name, schema, notes) if (folder / name).exists() else ()
        for name, schema in ((TIMING, TIMING_SCHEMA), (CURVES, CURVE_SCHEMA), (KEPT, KEPT_SCHEMA))
    }
    check_grid(folder / CURVES, optional[CURVES])
    check_definition(folder / CURVES, optional[CURVES])
    check_heads(folder / ROWS, records)
    tokens = folder / TOKENS
    return Results(
        folder=folder,
        manifest=manifest,
        records=records,
        timing=optional[TIMING],
        curves=optional[CURVES],
        kept=optional[KEPT],
        tokens=_read_tokens(tokens) if tokens.exists() else None,
        tuned=tuned_of(folder / MANIFEST, manifest),
        notes=tuple(notes),
    )


def _checked_records(path: Path, schema: RecordSchema, notes: list[str]) -> tuple[Record, ...]:
    """Records of a file, checked."""
    records: dict[tuple[Any, ...], Record] = {}
    for number, record in enumerate(read_records(path), start=1):
        if (name := schema.fault(record)) is not None:
            raise ResultsError(
                f"{path} line {number} is damaged: {name!r} is missing or has no valid value; "
                "delete that line and run kvp-eval again"
            )
        key = tuple(repr(record.get(name)) for name in schema.key)
        if records.setdefault(key, record) != record:
            raise ResultsError(
                f"{path} line {number} contradicts an earlier line of the same method and prompt; "
                "delete one of the two"
            )
    if not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        notes.append(f"The last line of {path.name} is torn (an interrupted run) and left out.")
    return tuple(records.values())


def check_heads(path: Path, records: Sequence[Record]) -> None:
    """Raise ResultsError where evidence was counted in models of different shape."""
    kept = [each["evidence_kept"] for each in records if each["evidence_kept"] is not None]
    if len({(len(layers), len(layers[0])) for layers in kept}) > 1:
        raise ResultsError(
            f"{path} is damaged: 'evidence_kept' has different numbers of heads; "
            "choose another --out and run kvp-eval again"
        )


def check_grid(path: Path, curves: Sequence[Record]) -> None:
    """Raise ResultsError where curves that are averaged were measured at different budgets."""
    grids = {(record["protocol"], tuple(record["budgets"])) for record in curves}
    if len(grids) > len({protocol for protocol, _ in grids}):
        raise ResultsError(
            f"{path} holds curves at different budgets, which cannot be averaged; "
            "delete it and run kvp-eval --traces again"
        )


def check_definition(path: Path, curves: Sequence[Record]) -> None:
    """Raise ResultsError where area and skill are not those of today's `kvp.metrics`."""
    if any(record["metrics_version"] != METRICS_VERSION for record in curves):
        raise ResultsError(
            f"{path} holds another definition of skill than this kvp; "
            "delete it and run kvp-eval --traces again"
        )


def _read_tokens(path: Path) -> Mapping[str, Any]:
    content = read_sealed_json(path, ResultsError)
    if not tokens_are_sound(content):
        raise ResultsError(f"{path} is damaged; delete it and run kvp-eval again")
    return content
