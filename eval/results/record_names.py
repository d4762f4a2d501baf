"""Names of the files of a results folder and of values in their records (docs/formats.md)."""

from typing import Final, Literal

MANIFEST, ROWS, TIMING = "manifest.json", "rows.jsonl", "timing.jsonl"
SETTINGS, TABLE = "settings.json", "settings.csv"
"""What kvp tune writes: what it chose, and all that it tried."""
NO_RESULTS = "{} is not a folder; give the results folder of kvp eval"
"""The message for a missing folder; {} stands for its name."""

DEFAULT_VARIANT = "auto"
"""`variant` of a record whose method runs with its defaults."""
SELF_SIZED = "own"
"""`budget_spec` of a record whose method decided how many tokens to keep."""
Protocol = Literal["query_aware", "query_agnostic"]
"""Question seen at compression, or only afterwards; never mixed in one table."""
QUERY_AWARE: Final = "query_aware"
QUERY_AGNOSTIC: Final = "query_agnostic"
PROTOCOLS = (QUERY_AWARE, QUERY_AGNOSTIC)
SEEN = {QUERY_AWARE: "question seen", QUERY_AGNOSTIC: "question not seen"}
ORACLE = "oracle"
"""Method that ranks by the attention that the answer will pay."""
READABLE_PROMPTS = 8
"""Prompts of a task, the first ones, whose records also hold what people read."""
