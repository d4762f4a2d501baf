"""Names of the files of a results folder and of values in their records (docs/formats.md)."""

from __future__ import annotations

MANIFEST, ROWS, TIMING = "manifest.json", "rows.jsonl", "timing.jsonl"

SELF_SIZED = "own"
"""`budget_spec` of a record whose method decided how many tokens to keep."""
SEEN = {"query_aware": "question seen", "query_agnostic": "question not seen"}
ORACLE = "oracle"
"""Method that ranks by the attention that the answer will pay."""
READABLE = 8
"""Prompts of a task, the first ones, whose records also hold what people read."""
