"""What methods that size the cache themselves really keep, task by task, as Markdown.

sizes.py RESULTS
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from eval.results.folder import ROWS
from eval.results.records import OWN, Row, method_label, read_rows


def main() -> None:
    """Read the rows of the folder and print one line per method, protection, protocol and task."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in read_rows(Path(sys.argv[1]) / ROWS):
        if row["budget_spec"] == OWN:
            label = method_label(row["method"], row["variant"], row["allocator"])
            safe = " +p" if row["protected"] else ""
            found[f"{label}{safe}", row["protocol"], row["task"]].append(row)
    print(
        "| method | protocol | task | kept, % of the cache: mean (5th to 95th percentile) | bytes |"
    )
    print("|---|---|---|--:|--:|")
    for (label, protocol, task), rows in sorted(found.items()):
        shares = np.array([100 * row["kept_tokens"] / row["cached_tokens"] for row in rows])
        low, high = np.quantile(shares, [0.05, 0.95])
        cache_bytes = np.mean([row["cache_bytes"] for row in rows])
        numbers = f"{shares.mean():.1f} ({low:.1f} to {high:.1f}) | {cache_bytes:,.0f}"
        print(f"| {label} | {protocol} | {task} | {numbers} |")


if __name__ == "__main__":
    main()
