"""Pairs between allocators and between methods, on the prompts of one results folder, as Markdown.

    pairs.py RESULTS --validation RESULTS "kvp+global > kvp" ...

Each pair names two labels as the closing table of kvp-eval prints them; which of two protections
a label runs with is chosen on the validation folder (best mean over its budgets). Differences are
paired by prompt, with 95 % intervals over prompts and policy seeds; a star marks those that differ
from 0 at 5 % after Holm's correction for all that are printed. Perplexities are compared by mean
log-likelihood per token (nats; positive = better).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from eval.results.folder import ROWS
from eval.results.records import Record, method_label, policy_groups, read_records
from eval.stats import Interval, Scores, bootstrap_mean, by_policy, holm, paired_difference

Settings = Mapping[tuple[str, bool], Mapping[str, Scores]]
"""(label, protected) -> budget -> scores, higher = better."""


def scores_of(records: Sequence[Record], *, forced: bool) -> Settings:
    """Scores in % of generated tasks, or minus nats per token of forced ones."""
    groups = policy_groups(records)
    settings: dict[tuple[str, bool], dict[str, list[Record]]] = {}
    for record in records:
        if record["budget_spec"] is None or (record["nll"] is None) is forced:
            continue
        value = -record["nll"] / record["reply_tokens"] if forced else 100 * record["score"]
        group = groups[record["policy"]]
        name = f"{record['method']}/{group}" if group else record["method"]
        label = method_label(name, record["variant"], record["allocator"])
        label = label.split("+evolved")[0] + "+evolved" if "+evolved" in label else label
        budgets = settings.setdefault((label, record["protected"]), {})
        budgets.setdefault(record["budget_spec"], []).append({**record, "value": value})
    return {
        key: {budget: by_policy(interval, "value") for budget, interval in budgets.items()}
        for key, budgets in settings.items()
    }


def protect(label: str, validation: Settings) -> bool:
    """Whether the label does better with protected tokens on validation prompts."""

    def average(protected: bool) -> float:
        budgets = validation[label, protected].values()
        return mean(bootstrap_mean(scores, bounds=None, resamples=1).mean for scores in budgets)

    return average(protected=True) >= average(protected=False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("results", type=Path)
    parser.add_argument("pairs", nargs="+", help='"OURS > THEIRS"')
    parser.add_argument("--validation", type=Path, required=True)
    parser.add_argument("--forced", action="store_true", help="compare given replies, not answers")
    arguments = parser.parse_args()
    results, validation = (
        scores_of(list(read_records(folder / ROWS)), forced=arguments.forced)
        for folder in (arguments.results, arguments.validation)
    )
    bounds = None if arguments.forced else (-100, 100)
    table: dict[str, dict[str, Interval]] = {}
    for pair in arguments.pairs:
        sides = []
        for label in pair.split(" > "):
            known = label if (label, True) in validation else label.split("+")[0]
            sides.append((label, protect(known, validation)))
        ours, theirs = (results[side] for side in sides)
        name = " minus ".join(f"{label}{' +p' if safe else ''}" for label, safe in sides)
        table[name] = {
            budget: paired_difference(ours[budget], theirs[budget], bounds=bounds)
            for budget in ours if budget in theirs
        }  # fmt: skip
    budgets = next(iter(table.values()))
    print(f"| pair | {' | '.join(budgets)} |\n|---{'|--:' * len(budgets)}|")
    stars = iter(holm([interval for row in table.values() for interval in row.values()]))
    for name, row in table.items():
        cells = [_text(interval, arguments.forced, next(stars)) for interval in row.values()]
        print(f"| {name} | {' | '.join(cells)} |")


def _text(interval: Interval, forced: bool, resolved: bool) -> str:
    digits = 3 if forced else 1
    values = (interval.mean, interval.low, interval.high)
    interval, low, high = (f"{value:+.{digits}f}" for value in values)
    return f"{interval}{' *' if resolved else ''} ({low} to {high})"


if __name__ == "__main__":
    main()
