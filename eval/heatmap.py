"""Needle heat maps: mean score by depth and length, of every method and budget, as a CSV table."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from statistics import fmean

from eval.records import Record, method_label
from kvp.artifacts.files import atomic_write_text

MAP_FIELDS = ("task", "protocol", "method", "policy", "protected", "budget_spec")
"""What one heat map is of; `method` is a label such as `snapkv:paper+ada`."""
CELL_FIELDS = ("depth", "prompt_length")
"""Labels of a record that place it in a heat map: percent of the haystack, tokens."""

Cells = dict[tuple[float, float], list[float]]
"""By depth and length, the scores of the prompts."""


def heatmaps(records: Iterable[Record]) -> dict[tuple[object, ...], Cells]:
    """Scores by cell, of every heat map; its key has the values of `MAP_FIELDS`.

    Records without both labels, and given replies, have no place in one.
    """
    maps: dict[tuple[object, ...], Cells] = {}
    for record in records:
        labels = record.get("labels", {})
        if record["score"] is None or not all(name in labels for name in CELL_FIELDS):
            continue
        label = method_label(record["method"], record["variant"], record["allocator"])
        named = {**record, "method": label}
        cells = maps.setdefault(tuple(named[name] for name in MAP_FIELDS), {})
        place = labels["depth"], labels["prompt_length"]
        cells.setdefault(place, []).append(float(record["score"]))
    return maps


def write_heatmaps(path: Path, records: Iterable[Record]) -> bool:
    """Write a line per cell of every heat map; nothing, and False, where there is none."""
    maps = heatmaps(records)
    if not maps:
        return False
    text = StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([*MAP_FIELDS, *CELL_FIELDS, "score", "prompts"])
    for key, cells in maps.items():
        for place, scores in sorted(cells.items()):
            lines.writerow([*key, *place, f"{fmean(scores):.6g}", len(scores)])
    atomic_write_text(path, text.getvalue())
    return True
