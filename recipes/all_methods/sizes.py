"""Tokens that self-sized methods keep, task by task, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from eval.report.tables import Field, Table
from eval.results.records import SELF_SIZED, Record, method_label


def sizes(records: Iterable[Record]) -> Table | None:
    """One line per method, protection, protocol and task; None without self-sized records."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record["budget_spec"] == SELF_SIZED:
            label = method_label(record["method"], record["variant"], record["allocator"])
            safe = " +p" if record["protected"] else ""
            groups[f"{label}{safe}", record["protocol"], record["task"]].append(record)
    rows: list[Sequence[Field | str]] = []
    for key, of_task in sorted(groups.items()):
        shares = np.array([100 * each["kept_tokens"] / each["cached_tokens"] for each in of_task])
        low, high = np.quantile(shares, [0.05, 0.95])
        rows.append([*key, Field(text=f"{shares.mean():.1f}", small=f"{low:.1f} to {high:.1f}")])
    if not rows:
        return None
    return Table(
        caption="Tokens kept, % of the cache: mean over prompts (5th to 95th percentile).",
        header=("method", "protocol", "task", "kept"),
        rows=rows,
    )
