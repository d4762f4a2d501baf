"""Mean score of every method of a results folder at every budget, as Markdown, best first."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean


def main() -> None:
    """Print one table per protection; the mean over budgets orders the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="folder written by kvp-eval")
    lines = (parser.parse_args().results / "rows.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    full = [record["score"] for record in records if record["budget_spec"] is None]
    if full:
        print(f"Full cache: {100 * mean(full):.1f} % ({len(full)} prompts and protocols).")
    scores: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["budget_spec"] is not None:
            name = tuple(
                str(record.get(key)) for key in ("method", "variant", "allocator", "policy")
            )
            setting = (*name, "yes" if record["protected"] else "no")
            scores[setting][record["budget_spec"]].append(record["score"])
    budgets = list(dict.fromkeys(budget for by_budget in scores.values() for budget in by_budget))
    print(f"\n| mean | {' | '.join(budgets)} | method | variant | allocator | policy | protected |")
    print("|--:" * (1 + len(budgets)) + "|---" * 5 + "|")
    table = []
    for setting, by_budget in scores.items():
        percents = [
            100 * mean(by_budget[budget]) if budget in by_budget else None for budget in budgets
        ]
        answered = [percent for percent in percents if percent is not None]
        table.append((mean(answered), percents, setting))
    for average, percents, setting in sorted(table, key=lambda line: -line[0]):
        numbers = " | ".join("" if percent is None else f"{percent:.1f}" for percent in percents)
        print(f"| {average:.1f} | {numbers} | {' | '.join(setting)} |")


if __name__ == "__main__":
    main()
