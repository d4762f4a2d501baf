"""Differences of two results folders, paired by prompt: second minus first.

Methods are compared with themselves: the same method, preset, allocator and protection, at the same
budget and protocol, on prompts that both folders answered. Policies are compared by their names
without the training seed; where each folder has one policy, these two are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import pandas

from eval.config import CompareConfig
from eval.results.comparison import Estimate, Kind, ReportedMethod, budget_order, estimates
from eval.results.folder import Results, describe_measure, load_results, model_name, unfinished_work
from eval.results.records import FULL, group_by, policy_groups, results_folder
from eval.results.stats import Interval, bootstrap_mean, holm, paired_difference, prompts_of
from kvp.errors import ResultsError
from kvp.program.progress import Progress

ANSWERS, LIKELIHOOD = "answers", "log_likelihood"
WORDS = {ANSWERS: "answers, %", LIKELIHOOD: "log-likelihood of given replies, nats per token"}
"""Metrics, and what they are in tables."""

KINDS: Mapping[str, Kind] = {ANSWERS: "accuracy", LIKELIHOOD: "perplexity"}


def run(config: CompareConfig) -> pandas.DataFrame:
    """Print the tables; rows and errors are those of `pair_rows`."""
    folders = [load_results(results_folder(path)) for path in (config.first, config.second)]
    rows = pair_rows(*folders, resamples=config.bootstrap)
    for side, folder in zip(("first", "second"), folders, strict=True):
        measured = f"{folder.folder}: {describe_measure(folder, folder.records)}"
        print(f"{side}:", *filter(None, (unfinished_work(folder), measured)))
    for (metric, protocol), table in rows.groupby(["metric", "protocol"], sort=False):
        print(f"{WORDS[metric]}, {protocol}\n{_text_of(table)}\n")
    print("Paired by prompt. * differs from 0 at 5 %, corrected for all rows of its metric (Holm).")
    return rows


def check_prompts(first: Results, second: Results) -> None:
    """Raise ResultsError unless two folders answered some of the same prompts, and none differs."""
    prompts = [
        {(record["task"], record["example"]): record for record in results.records}
        for results in (first, second)
    ]
    shared = prompts[0].keys() & prompts[1].keys()
    if not shared:
        raise ResultsError(
            f"{first.folder} and {second.folder} have no prompt in common: run both with the same "
            "--tasks, --split, --seed and data (prompts of files are called after the file)"
        )
    for task, example in sorted(shared):
        for field in ("length", "metric", "prompt_digest"):
            ours, theirs = (records[task, example][field] for records in prompts)
            if ours != theirs:
                why = "scored otherwise" if field == "metric" else "answers to different prompts"
                models = [model_name(results) for results in (first, second)]
                why += f" ({' and '.join(models)})" * (models[0] != models[1])
                raise ResultsError(
                    f"prompt {example} of {task} has another {field} in {second.folder} ({theirs}) "
                    f"than in {first.folder} ({ours}): these are {why}"
                )


def curves_of(
    results: Results, *, named: bool = False
) -> dict[tuple[str, str, ReportedMethod, str], Estimate]:
    """Values per prompt by metric, protocol, method and budget in its order (`policy_groups`)."""
    groups = policy_groups(results.records, named=named)
    return {
        (metric, protocol, method, spec or FULL): budgets[spec]
        for metric, kind in KINDS.items()
        for protocol, records in group_by(results.records, itemgetter("protocol")).items()
        for method, budgets in estimates(kind, records, groups, resamples=1).items()
        for spec in sorted(budgets, key=lambda spec: budget_order(spec or FULL))
    }


def pair_rows(first: Results, second: Results, *, resamples: int = 2000) -> pandas.DataFrame:
    """A row per method and budget that both have: its numbers on the prompts both answered.

    Columns: metric (`ANSWERS`, 0 to 1, or `LIKELIHOOD`, nats per token), protocol, method, budget,
    pairs (prompts that both answered), first, second and difference (second minus first), each with
    _low and _high of its 95 % interval, differs: whether the difference is not 0 at 5 % after
    Holm's correction over all rows of its metric, False while a folder is unfinished, and
    unfinished: which of the two is. In the order of the first folder. Raises ResultsError where
    they share no prompt or no method, or hold answers to different prompts of one name.
    """
    check_prompts(first, second)
    sides = {"first": first, "second": second}
    lacking = " and ".join(side for side, results in sides.items() if unfinished_work(results))
    named = any(len(set(policy_groups(folder.records).values())) > 1 for folder in (first, second))
    ours, theirs = (curves_of(folder, named=named) for folder in (first, second))
    both_have = [key for key in ours if key in theirs]
    rows, gaps = [], []
    with Progress("comparing", len(both_have)) as progress:
        for key in progress.over(both_have):
            if not (numbers := _numbers(ours[key], theirs[key], resamples)):
                continue
            metric, protocol, method, budget = key
            gaps.append(numbers["difference"])
            rows.append(
                {"metric": metric, "protocol": protocol, "method": method.label, "budget": budget}
                | {"pairs": gaps[-1].prompts}
                | {
                    f"{name}{part}": number for name, interval in numbers.items()
                    for part, number in zip(("", "_low", "_high"), interval.numbers, strict=True)
                }
            )  # fmt: skip
    if not rows:
        raise ResultsError(
            f"{first.folder} and {second.folder} have no method in common that was run "
            "at the same budget under the same protocol; kvp eval adds to a folder what it lacks"
        )
    table = pandas.DataFrame(rows).assign(differs=False, unfinished=lacking)
    for metric in () if lacking else table["metric"].unique():
        same = table["metric"] == metric
        table.loc[same, "differs"] = holm([gaps[number] for number in table.index[same]])
    return table


def _numbers(ours: Estimate, theirs: Estimate, resamples: int) -> dict[str, Interval]:
    """Both sides and their difference on the prompts that both answered; empty without any."""
    shared = prompts_of(ours.scores) & prompts_of(theirs.scores)
    if not shared:
        return {}
    first, second = (
        {policy: {unit: of[unit] for unit in of if unit in shared} for policy, of in scores.items()}
        for scores in (ours.scores, theirs.scores)
    )
    how: dict[str, Any] = {"weights": ours.weights, "resamples": resamples}
    bounds, around = ((0, 1), (-1, 1)) if ours.weights is None else (None, None)
    return {
        "first": bootstrap_mean(first, bounds=bounds, **how),
        "second": bootstrap_mean(second, bounds=bounds, **how),
        "difference": paired_difference(second, first, bounds=around, **how),
    }


def _text_of(rows: pandas.DataFrame) -> str:
    """Rows of one metric as text."""
    factor, digits = (100, 1) if rows["metric"].iloc[0] == ANSWERS else (1, 3)
    table = rows[["method", "budget", "pairs"]].copy()
    for side in ("first", "second"):
        table[side] = [f"{factor * value:.{digits}f}" for value in rows[side]]
    table["second - first (95 %)"] = [
        f"{gap:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f}){' *' if differs else '  '}"
        for gap, low, high, differs in zip(
            *(factor * rows[f"difference{part}"] for part in ("", "_low", "_high")),
            rows["differs"], strict=True,
        )
    ]  # fmt: skip
    return str(table.to_string(index=False))
