"""Read a results folder and check what the report relies on.

Missing optional parts are None or empty, and the page says so; damaged parts are errors. A torn
last line, which an interrupted run can leave, is left out with a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.results.folder import CURVES, FORMAT, FORMAT_VERSION, KEPT, MANIFEST, ROWS, TIMING, TOKENS
from eval.results.records import UNIFORM, Row, read_rows
from kvp.errors import ResultsError
from kvp.manifest import digest_json, read_json
from kvp.metrics import METRICS_VERSION

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:  # noqa: ANN401 - anything JSON can hold
    return isinstance(value, str)


def _truth(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, bool)


def _number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _share(value: Any) -> bool:  # noqa: ANN401
    return _number(value) and 0 <= value <= 1


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _numbers(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, list) and all(map(_number, value))


METHOD_FIELDS: Mapping[str, Check] = {
    "method": _text,
    "variant": _text,
    "allocator": _text,
    "protected": _truth,
    "policy": _maybe(_text),
    "policy_seed": _maybe(_number),
}
ROW_FIELDS: Mapping[str, Check] = {
    **METHOD_FIELDS,
    "protocol": _text,
    "task": _text,
    "example": _text,
    "budget": _maybe(_number),
    "budget_spec": _maybe(_text),
    "score": _maybe(_share),
    "nll": _maybe(_number),
    "reply_tokens": _maybe(_number),
    "kept_tokens": _number,
    "cached_tokens": _number,
    "cache_bytes": _maybe(_number),
}
TIMING_FIELDS: Mapping[str, Check] = {
    **METHOD_FIELDS,
    "budget": _maybe(_number),
    "cache_bytes": _number,
    "prefill_seconds": _number,
    "evict_seconds": _number,
    "decode_seconds_per_token": _number,
}
CURVE_FIELDS: Mapping[str, Check] = {
    **METHOD_FIELDS,
    "protocol": _text,
    "layer": _number,
    "head": _number,
    "budgets": _numbers,
    "cost": _numbers,
    "area": _number,
    "skill": _maybe(_number),
    "sequences": _number,
}
KEPT_FIELDS: Mapping[str, Check] = {
    **METHOD_FIELDS,
    "protocol": _text,
    "budget_spec": _text,
    "kept": _share,
    "low": _share,
    "high": _share,
    "kept_tokens": _number,
    "cached_tokens": _number,
    "sequences": _number,
}
OLD_FIELDS: Mapping[str, Any] = {"allocator": UNIFORM}
"""What rows of format version 1 lack."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """A results folder, read."""

    folder: Path
    manifest: Mapping[str, Any]
    rows: tuple[Row, ...]
    """rows.jsonl, at least one row."""
    timing: tuple[Row, ...]
    """timing.jsonl; empty where there was no timing pass."""
    curves: tuple[Row, ...]
    """curves.jsonl; empty where there were no traces."""
    kept: tuple[Row, ...]
    """kept.jsonl; empty where there were no traces."""
    tokens: Mapping[str, Any] | None
    """tokens.json."""
    notes: tuple[str, ...]
    """What a reader must know about the files, one sentence each."""

    def setting(self, name: str) -> Any:  # noqa: ANN401
        """A setting of the run as its manifest records it, None where it does not."""
        for part in ("identity", "config"):
            values = self.manifest.get(part)
            if isinstance(values, Mapping) and name in values:
                return values[name]
        return None

    @property
    def protocols(self) -> tuple[str, ...]:
        """Protocols that have rows, in the order of the file."""
        return tuple(dict.fromkeys(row["protocol"] for row in self.rows))


def load_results(folder: Path) -> Results:
    """Read a results folder.

    Raises ResultsError, in one line that names the file, where the folder is missing, holds no
    results, is of an unknown format, or is damaged.
    """
    if not folder.is_dir():
        raise ResultsError(f"{folder} is not a folder; give the results folder of kvp-eval")
    if not (folder / MANIFEST).exists():
        raise ResultsError(f"{folder} holds no {MANIFEST}; is this a results folder of kvp-eval?")
    manifest = read_json(folder / MANIFEST, ResultsError)
    if manifest.get("format") != FORMAT:
        raise ResultsError(f"{folder / MANIFEST} describes no results of kvp-eval")
    version = manifest.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise ResultsError(
            f"{folder / MANIFEST} has format_version {version!r}, this kvp-report reads "
            f"1 and {FORMAT_VERSION}; use the kvp that wrote it"
        )
    if digest_json(manifest.get("identity")) != manifest.get("identity_digest"):
        raise ResultsError(f"{folder / MANIFEST} is damaged: its identity has another digest")
    notes: list[str] = [str(note) for note in manifest.get("notes", [])]
    rows = _read_lines(folder / ROWS, ROW_FIELDS, notes)
    if not rows:
        raise ResultsError(f"{folder / ROWS} holds no rows yet; run kvp-eval first")
    optional = {
        name: _read_lines(folder / name, fields, notes) if (folder / name).exists() else ()
        for name, fields in ((TIMING, TIMING_FIELDS), (CURVES, CURVE_FIELDS), (KEPT, KEPT_FIELDS))
    }
    tokens = folder / TOKENS
    return Results(
        folder=folder,
        manifest=manifest,
        rows=rows,
        timing=optional[TIMING],
        curves=_of_one_definition(optional[CURVES], notes),
        kept=optional[KEPT],
        tokens=_read_tokens(tokens) if tokens.exists() else None,
        notes=tuple(notes),
    )


def _read_lines(path: Path, fields: Mapping[str, Check], notes: list[str]) -> tuple[Row, ...]:
    rows = []
    for number, found in enumerate(read_rows(path), start=1):
        row = {**OLD_FIELDS, **found}
        for name, check in fields.items():
            if name not in row or not check(row[name]):
                raise ResultsError(
                    f"{path} line {number} is damaged: {name!r} is missing or has no valid value; "
                    "delete that line and run kvp-eval again"
                )
        rows.append(row)
    if not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        notes.append(f"The last line of {path.name} is torn (an interrupted run) and left out.")
    return tuple(rows)


def _of_one_definition(curves: tuple[Row, ...], notes: list[str]) -> tuple[Row, ...]:
    """Curves whose area and skill compare: those of today's `kvp.metrics` where there are any."""
    today = tuple(row for row in curves if row.get("metrics_version") == METRICS_VERSION)
    if len(today) == len(curves):
        return curves
    notes.append(
        f"{len(curves) - len(today)} cost curves were measured by an earlier kvp-eval, whose skill "
        "compares protected rankings with rankings of all tokens: run kvp-eval --traces again"
        + (" (they are left out)." if today else ".")
    )
    return today or curves


def _read_tokens(path: Path) -> Mapping[str, Any]:
    content = read_json(path, ResultsError)
    tokens, methods = content.get("tokens"), content.get("methods")
    sound = (
        isinstance(tokens, list)
        and all(map(_text, tokens))
        and isinstance(methods, dict)
        and all(
            isinstance(heads, list)
            and heads
            and all(isinstance(ranks, list) and len(ranks) == len(tokens) for ranks in heads)
            and all(map(_numbers, heads))
            for heads in methods.values()
        )
    )
    if not sound or not tokens or not methods:
        raise ResultsError(f"{path} is damaged; delete it and run kvp-eval again")
    return content
