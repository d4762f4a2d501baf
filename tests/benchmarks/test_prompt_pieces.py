"""The benchmark of prompts that are read in pieces, at the smallest size that says something."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.prompt_pieces import main


def test_answers_of_prompts_in_pieces(tmp_path: Path) -> None:
    out = tmp_path / "pieces.json"
    main([
        "--tasks", "niah_single_1", "--prompts", "2", "--length", "384", "--budgets", "96",
        "--chunks", "64", "--methods", "keydiff,ring",
        "--max_new_tokens", "12", "--out", str(out),
    ])  # fmt: skip
    report = json.loads(out.read_text())
    found = {(row["method"], row["chunk"]): row for row in report["answers"]}
    assert set(found) == {("full", None)} | {
        (method, chunk) for method in ("keydiff", "ring") for chunk in (None, 64)
    }
    assert found["full", None]["mean"] == 100
    assert found["ring", None]["mean"] < 100
