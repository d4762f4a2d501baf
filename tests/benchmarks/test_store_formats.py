"""The benchmark of formats: all hold the same traces, and each is as large as it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path


def test_every_format_holds_the_same_sequence(
    run_benchmark: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    sizes = ["--length", "160", "--sequences", "4", "--rounds", "1"]
    run_benchmark("store_formats", *sizes, "--folder", str(tmp_path), "--out", str(out))
    rows = {row["format"]: row for row in json.loads(out.read_text())["results"]}
    assert list(rows) == ["kvp store", "torch.save", "safetensors"]
    assert [name for name, row in rows.items() if row["checked"]] == ["kvp store"]
    layers, heads, group, tokens, width = rows["kvp store"]["queries"]
    assert (layers, heads, group, width) == (5, 4, 2, 128)
    for name, row in rows.items():
        assert row["raw_bytes"] == layers * heads * (group + 2) * tokens * width * 2
        compressed = name == "kvp store"
        assert (row["bytes"] < 0.8 * row["raw_bytes"]) is compressed
        for what in ("write", "sequence", "head"):
            assert row[f"{what}_seconds"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
