"""Tokens that self-sized methods keep, task by task, as Markdown.

sizes.py RESULTS
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from eval.results.folder import ROWS
from eval.results.records import SELF_SIZED, Record, method_label, read_records


def main() -> None:
    """Print one line per method, protection, protocol and task of a results folder."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in read_records(Path(sys.argv[1]) / ROWS):
        if record["budget_spec"] == SELF_SIZED:
            label = method_label(record["method"], record["variant"], record["allocator"])
            safe = " +p" if record["protected"] else ""
            groups[f"{label}{safe}", record["protocol"], record["task"]].append(record)
    print(
        "| method | protocol | task | kept, % of the cache: mean (5th to 95th percentile) | bytes |"
    )
    print("|---|---|---|--:|--:|")
    for (label, protocol, task), records in sorted(groups.items()):
        shares = np.array(
            [100 * record["kept_tokens"] / record["cached_tokens"] for record in records]
        )
        low, high = np.quantile(shares, [0.05, 0.95])
        cache_bytes = np.mean([record["cache_bytes"] for record in records])
        numbers = f"{shares.mean():.1f} ({low:.1f} to {high:.1f}) | {cache_bytes:,.0f}"
        print(f"| {label} | {protocol} | {task} | {numbers} |")


if __name__ == "__main__":
    main()
