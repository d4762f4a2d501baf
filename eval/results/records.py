"""rows.jsonl: append-only, resumable by key (`kvp.artifacts.jsonl` keeps it whole).

All rows of one prompt are appended in one write; what a kill cuts off is computed again. What rows
mean is `docs/formats.md`; this module only stores and finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvp.artifacts.jsonl import JsonLines
from kvp.errors import ResultsError

Row = dict[str, Any]
Key = tuple[Any, ...]

KEY_FIELDS = (
    "model",
    "method",
    "variant",
    "allocator",
    "protected",
    "policy",
    "protocol",
    "task",
    "budget_spec",
    "example",
)
"""What makes a row one of a kind."""

FULL = "full"
"""Method that evicts nothing."""

ORACLE = "oracle"
"""Method that ranks by the attention that the answer will pay."""

LEARNED = "kvp"
"""Method of learned policies."""

UNIFORM = "uniform"
"""Allocator of a method that keeps equally many tokens in every head."""

_RENAMED_ALLOCATORS = {"own": "self_sized"}
"""Allocators that rows of older versions call by another name."""

_SEPARATORS = "-_. "
"""What stands between a policy's name and its seed."""

OWN = "own"
"""`budget_spec` of a row whose method decided itself how many tokens to keep."""


def key_of(row: Mapping[str, Any]) -> Key:
    """Values of `KEY_FIELDS`; raises KeyError on a row that lacks one."""
    return tuple(row[field] for field in KEY_FIELDS)


def method_label(name: str, variant: str, allocator: str = UNIFORM) -> str:
    """Method, preset and allocator in one word: `snapkv`, `snapkv(window=16)`, `snapkv+ada`."""
    rule = "" if allocator == UNIFORM else f"+{allocator}"
    if variant == "auto":
        return f"{name}{rule}"
    return f"{name}({variant}){rule}" if "=" in variant else f"{name}:{variant}{rule}"


def policy_groups(rows: Iterable[Row]) -> dict[str | None, str]:
    """Group of every policy label: the label without its training seed, which may leave nothing.

    A single group is called "" whatever its labels are.
    """
    seeds = {row["policy"]: row["policy_seed"] for row in rows if row["policy"] is not None}
    names = {label: _without_seed(label, seed) for label, seed in seeds.items()}
    if len(set(names.values())) <= 1:
        names = dict.fromkeys(names, "")
    return {None: "", **names}


def _without_seed(label: str, seed: float | None) -> str:
    if seed is None:
        return label
    number = str(int(seed))
    stem = label.removesuffix(number)
    if stem == label or stem[-1:].isdigit():
        return label
    stem = stem.rstrip(_SEPARATORS)
    word = next((word for word in ("seed", "s") if stem.endswith(word)), "")
    return stem.removesuffix(word).rstrip(_SEPARATORS)


class RowFile:
    """The rows of a results folder, with the set of keys that are already there."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, dropping a torn last line; raises ResultsError on damage."""
        self.path = path
        self._lines = JsonLines(path)
        self._lines.cut_torn_line()
        self.keys: set[Key] = set()
        if path.exists():
            self.keys = {key_of(row) for row in read_rows(path, KEY_FIELDS)}

    def append(self, rows: Iterable[Row]) -> None:
        """Add rows in one write and bring them to the disk."""
        rows = list(rows)
        self._lines.append(rows)
        self.keys.update(key_of(row) for row in rows)


def read_rows(path: Path, key_fields: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a JSON-lines file in order, a torn last line left out.

    Raises ResultsError, naming file and line, on a missing file, on a damaged line before the last,
    and where two rows have the same values of `key_fields`, or one lacks them.
    """
    if not path.exists():
        raise ResultsError(f"{path} does not exist; is this a results folder?")
    lines: dict[Key, int] = {}
    for number, row in JsonLines(path).numbered():
        if (renamed := _RENAMED_ALLOCATORS.get(str(row.get("allocator")))) is not None:
            row["allocator"] = renamed
        if missing := [field for field in key_fields if field not in row]:
            raise ResultsError(f"{path} line {number} lacks {missing[0]!r}; delete that line")
        key = tuple(map(str, (row[field] for field in key_fields)))
        if key_fields and (first := lines.setdefault(key, number)) != number:
            raise ResultsError(f"{path} line {number} repeats line {first}; delete that line")
        yield row


def merge_rows(path: Path, rows: Iterable[Row], key_fields: Sequence[str]) -> None:
    """Write a JSON-lines file anew: the given rows take the place of those with their key."""
    merged = {}
    for row in (*(read_rows(path, key_fields) if path.exists() else ()), *rows):
        merged[tuple(row[field] for field in key_fields)] = row
    JsonLines(path).rewrite(merged.values())
