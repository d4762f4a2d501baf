"""Read results folders, check what the report relies on, and join those of one evaluation.

Missing optional parts are None or empty, and the page says so; damaged parts are errors. A torn
last line, which an interrupted run can leave, is left out with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.results import schema
from eval.results.folder import (
    CURVES,
    KEPT,
    MANIFEST,
    ROWS,
    TIMING,
    TOKENS,
    read_manifest,
    tuned_of,
)
from eval.results.folder import lost_records as lost_of
from eval.results.records import Record, read_records
from eval.tune.settings_file import TunedSettings
from kvp.errors import ResultsError
from kvp.manifest import digest_json, read_sealed_json
from kvp.metrics import METRICS_VERSION

_FILES: Mapping[str, tuple[str, type[schema.CheckedRecord]]] = {
    "records": (ROWS, schema.Row),
    "timing": (TIMING, schema.Timing),
    "curves": (CURVES, schema.Curve),
    "kept": (KEPT, schema.KeptAttention),
}
"""Field of `Results` -> its file, and what a record of it is."""


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
    """What kvp-tune chose and the run took from `tuned:FILE`."""
    notes: tuple[str, ...]
    """Remarks on the files for the reader, one sentence each."""

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """A setting of the run as its manifest records it, None where it does not."""
        for part in ("identity", "config"):
            if name in self.manifest.get(part, {}):
                return self.manifest[part][name]
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
    if (name := schema.fault(schema.Manifest, manifest)) is not None:
        raise ResultsError(f"{folder / MANIFEST} is damaged: {name!r} has no valid value")
    if (lost := lost_of(folder, manifest)) is not None:
        raise ResultsError(f"{lost}; run the same kvp-eval command again")
    notes: list[str] = list(manifest.get("notes", []))
    records = {
        field: _checked_records(folder / name, model, notes)
        if field == "records" or (folder / name).exists()
        else ()
        for field, (name, model) in _FILES.items()
    }
    if not records["records"]:
        raise ResultsError(f"{folder / ROWS} holds no records yet; run kvp-eval first")
    tokens = None
    if (folder / TOKENS).exists():
        tokens = read_sealed_json(folder / TOKENS, ResultsError)
        if schema.fault(schema.TokenRanks, tokens) is not None:
            raise ResultsError(f"{folder / TOKENS} is damaged; delete it and run kvp-eval again")
    results = Results(
        folder=folder,
        manifest=manifest,
        **records,
        tokens=tokens,
        tuned=tuned_of(folder / MANIFEST, manifest),
        notes=tuple(notes),
    )
    _check_averages(results)
    return results


def _checked_records(
    path: Path, model: type[schema.CheckedRecord], notes: list[str]
) -> tuple[Record, ...]:
    records: dict[tuple[str, ...], Record] = {}
    for number, record in enumerate(read_records(path), start=1):
        if (name := schema.fault(model, record)) is not None:
            raise ResultsError(
                f"{path} line {number} is damaged: {name!r} is missing or has no valid value; "
                "delete that line and run kvp-eval again"
            )
        if records.setdefault(_key(record, model), record) != record:
            raise ResultsError(
                f"{path} line {number} contradicts an earlier line of the same method and prompt; "
                "delete one of the two"
            )
    if not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        notes.append(f"The last line of {path.name} is torn (an interrupted run) and left out.")
    return tuple(records.values())


def _key(record: Record, model: type[schema.CheckedRecord]) -> tuple[str, ...]:
    return tuple(repr(record.get(name)) for name in model.key)


def _check_averages(results: Results) -> None:
    """Raise ResultsError where records that are averaged were not measured alike."""
    kept = [each["evidence_kept"] for each in results.records if each["evidence_kept"] is not None]
    if len({(len(layers), len(layers[0])) for layers in kept}) > 1:
        raise ResultsError(
            f"{results.folder / ROWS} is damaged: 'evidence_kept' has different numbers of heads; "
            "choose another --out and run kvp-eval again"
        )
    grids = {(record["protocol"], tuple(record["budgets"])) for record in results.curves}
    if len(grids) > len({protocol for protocol, _ in grids}):
        raise ResultsError(
            f"{results.folder / CURVES} holds curves at different budgets, which cannot be "
            "averaged; delete it and run kvp-eval --traces again"
        )
    if any(record["metrics_version"] != METRICS_VERSION for record in results.curves):
        raise ResultsError(
            f"{results.folder / CURVES} holds another definition of skill than this kvp; "
            "delete it and run kvp-eval --traces again"
        )


def join(folders: Sequence[Results]) -> list[Results]:
    """Folders of equal settings (`identity` of their manifests) as one, in the order of the first.

    One folder may hold what another lacks, such as a protocol. Raises ResultsError, in one line,
    where two of them hold the same row, or rows of different policies under one label.
    """
    runs: dict[str, Results] = {}
    for folder in folders:
        identity = digest_json(folder.manifest.get("identity"))
        runs[identity] = _joined(runs[identity], folder) if identity in runs else folder
    return list(runs.values())


def _joined(first: Results, second: Results) -> Results:
    digests, others = (run.manifest.get("policies", {}) for run in (first, second))
    used = ({(each["policy"], each["protocol"]) for each in run.records} for run in (first, second))
    for label, _ in set.intersection(*used):
        if label in digests and others.get(label, digests[label]) != digests[label]:
            raise ResultsError(
                f"{second.folder} holds rows of another policy called {label!r} than "
                f"{first.folder}; give them one by one"
            )
    records: dict[str, tuple[Record, ...]] = {}
    for field, (_, model) in _FILES.items():
        keys = {_key(record, model) for record in getattr(first, field)}
        for record in getattr(second, field):
            if _key(record, model) in keys:
                shown = ("method", "task", "budget_spec", "example")
                named = ", ".join(f"{name} {record[name]}" for name in shown if record.get(name))
                raise ResultsError(
                    f"{second.folder} holds rows that {first.folder} holds, too ({named}); "
                    "give folders that share no rows"
                )
        records[field] = (*getattr(first, field), *getattr(second, field))
    earlier = {key: first.manifest[key] for key in ("config", "created", "command")
               if key in first.manifest}  # fmt: skip
    runs = [
        *first.manifest.get("earlier_runs", []), earlier, *second.manifest.get("earlier_runs", []),
    ]  # fmt: skip
    joined = replace(
        second,
        folder=first.folder,
        manifest={**second.manifest, "earlier_runs": runs},
        **records,
        tokens=second.tokens if first.tokens is None else first.tokens,
        tuned=(*first.tuned, *second.tuned),
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
    )
    _check_averages(replace(joined, folder=second.folder))
    return joined


def labels(runs: Sequence[Results]) -> list[str]:
    """A name for each run: the settings in which they differ, and their folders where none does."""
    names = ("model", "length", "seed", "split", "dtype", "max_new_tokens")
    differing = [name for name in names if len({str(run.setting(name)) for run in runs}) > 1]
    found = [
        ", ".join(
            model_name(run) if name == "model" else f"{name} {run.setting(name)}"
            for name in differing
        )
        for run in runs
    ]
    if len(set(found)) == len(found):
        return found
    return [f"{name}, {run.folder}".lstrip(", ") for name, run in zip(found, runs, strict=True)]


def model_name(results: Results) -> str:
    """The model as it was given; of a folder its last part."""
    name = str(results.setting("model"))
    return Path(name).name if Path(name).is_absolute() or name.startswith(".") else name
