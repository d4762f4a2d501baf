"""Pairs between allocators and between methods, on the prompts of one results folder, as Markdown.

    pairs.py RESULTS --validation RESULTS "kvp+global > kvp" ...

Each pair names two labels as the closing table of kvp-eval prints them; which of two protections
a label runs with is chosen on the validation folder (best mean over its budgets). Differences are
paired by prompt, policy seeds averaged first, with 95 % bootstrap intervals; perplexities are
compared by mean log-likelihood per token (nats; positive = better).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from eval.results.folder import ROWS
from eval.results.records import Record, method_label, policy_groups, read_records
from eval.stats import Interval, Unit, paired_difference, per_prompt

Scores = Mapping[tuple[str, bool], Mapping[str, Mapping[Unit, float]]]
"""(label, protected) -> budget -> prompt -> score, higher = better."""


def scores_of(records: Sequence[Record], *, forced: bool) -> Scores:
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
        key: {budget: per_prompt(part, "value") for budget, part in budgets.items()}
        for key, budgets in settings.items()
    }


def protect(label: str, validation: Scores) -> bool:
    """Whether the label does better with protected tokens on validation prompts."""

    def average(protected: bool) -> float:
        budgets = validation[label, protected]
        return mean(mean(prompts.values()) for prompts in budgets.values())

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
    for number, pair in enumerate(arguments.pairs):
        sides = []
        for label in pair.split(" > "):
            known = label if (label, True) in validation else label.split("+")[0]
            sides.append((label, protect(known, validation)))
        ours, theirs = (results[side] for side in sides)
        budgets = [budget for budget in ours if budget in theirs]
        if number == 0:
            print(f"| pair | {' | '.join(budgets)} |\n|---{'|--:' * len(budgets)}|")
        name = " minus ".join(f"{label}{' +p' if safe else ''}" for label, safe in sides)
        cells = [_text(paired_difference(ours[b], theirs[b]), arguments.forced) for b in budgets]
        print(f"| {name} | {' | '.join(cells)} |")


def _text(interval: Interval, forced: bool) -> str:
    digits = 3 if forced else 1
    values = (interval.mean, interval.low, interval.high)
    estimate, low, high = (f"{value:+.{digits}f}" for value in values)
    return f"{estimate} ({low} to {high})"


if __name__ == "__main__":
    main()
