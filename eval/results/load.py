"""Read results folders, check what the report relies on, and join those of one evaluation.

Missing optional parts are None or empty, and the page says so; damaged parts are errors. A torn
last line, which an interrupted run can leave, is left out with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.results.folder import (
    CURVES,
    MANIFEST,
    ROWS,
    TIMING,
    TOKENS,
    read_manifest,
    tuned_of,
)
from eval.results.records import (
    CURVE_KEY,
    KEY_FIELDS,
    PROTOCOL_NAMES,
    TIMING_KEY,
    Record,
    read_records,
)
from eval.tune.settings_file import TunedSettings
from kvp.errors import ResultsError
from kvp.manifest import digest_json, read_sealed_json
from kvp.metrics import METRICS_VERSION

_FILES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "records": (ROWS, KEY_FIELDS),
    "timing": (TIMING, TIMING_KEY),
    "curves": (CURVES, CURVE_KEY),
}
"""Field of `Results` -> its file, and what makes a record of it one of a kind."""


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
    tokens: Mapping[str, Any] | None
    """tokens.json."""
    tuned: tuple[TunedSettings, ...]
    """What kvp tune chose and the run took from `tuned:FILE`."""
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
    notes: list[str] = list(manifest.get("notes", []))
    records = {
        field: _records(folder / name, key, notes)
        if field == "records" or (folder / name).exists()
        else ()
        for field, (name, key) in _FILES.items()
    }
    if not records["records"]:
        raise ResultsError(f"{folder / ROWS} holds no records yet; run kvp-eval first")
    if any(record["metrics_version"] != METRICS_VERSION for record in records["curves"]):
        raise ResultsError(
            f"{folder / CURVES} holds another definition of skill than this kvp; "
            "delete it and run kvp-eval --traces again"
        )
    there = (folder / TOKENS).exists()
    return Results(
        folder=folder,
        manifest=manifest,
        **records,
        tokens=read_sealed_json(folder / TOKENS, ResultsError) if there else None,
        tuned=tuned_of(folder / MANIFEST, manifest),
        notes=tuple(notes),
    )


def _records(path: Path, key: Sequence[str], notes: list[str]) -> tuple[Record, ...]:
    """Records of a file; adds a note on a torn last line.

    Checksums of lines find damage (`kvp.artifacts.jsonl`). A protocol becomes part of file names.
    """
    records = tuple(read_records(path, key))
    for record in records:
        if record["protocol"] not in PROTOCOL_NAMES:
            raise ResultsError(f"{path} holds a record of no known protocol; run kvp-eval again")
    if path.read_bytes()[-1:] not in (b"", b"\n"):
        notes.append(f"The last line of {path.name} is torn (an interrupted run) and left out.")
    return records


def _key(record: Record, key: Sequence[str]) -> tuple[str, ...]:
    return tuple(repr(record.get(name)) for name in key)


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
    for field, (_, key) in _FILES.items():
        keys = {_key(record, key) for record in getattr(first, field)}
        for record in getattr(second, field):
            if _key(record, key) in keys:
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
    return replace(
        second,
        folder=first.folder,
        manifest={**second.manifest, "earlier_runs": runs},
        **records,
        tokens=second.tokens if first.tokens is None else first.tokens,
        tuned=(*first.tuned, *second.tuned),
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
    )


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
