"""Differences of two results folders, paired by prompt: second minus first.

Methods are compared with themselves: the same method, preset, allocator and protection, at the same
budget and protocol, on prompts that both folders answered. Policies are compared by their names
without the training seed; where each folder has one policy, these two are compared.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import pandas

from eval.config import CompareConfig
from eval.results.comparison import MEASURES, Estimate, estimates
from eval.results.folder import Results, describe_measure, load_results, model_name, unfinished_work
from eval.results.frame import gap_texts
from eval.results.records import group_by, policy_groups, results_folder
from eval.results.settings import MethodSetting, budget_order
from eval.results.stats import Interval, bootstrap_mean, holm, paired_difference
from kvp.errors import ResultsError
from kvp.program.progress import Progress

METRICS = {"answers": MEASURES["accuracy"], "log_likelihood": MEASURES["perplexity"]}
WORDS = {
    "answers": "answers, %",
    "log_likelihood": "log-likelihood of given replies, nats per token",
}


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


Curves = dict[tuple[str, str, MethodSetting, str], Estimate]
"""Values per prompt by metric, protocol, method and budget."""


def _curves_of(results: Results, *, named: bool) -> Curves:
    """In the order of budgets; policies are grouped by `policy_groups`."""
    groups, curves = policy_groups(results.records, named=named), Curves()
    for metric, kind in zip(METRICS, MEASURES, strict=True):
        for protocol, records in group_by(results.records, itemgetter("protocol")).items():
            cells = estimates(kind, records, groups, resamples=1)
            places = group_by(cells, itemgetter(0)).values()
            for of_method in places:
                for setting, spec in sorted(of_method, key=lambda place: budget_order(place[1])):
                    curves[metric, protocol, setting, spec] = cells[setting, spec]
    return curves


def pair_rows(first: Results, second: Results, *, resamples: int = 2000) -> pandas.DataFrame:
    """A row per method and budget that both have: its numbers on the prompts both answered.

    Columns: metric (`METRICS`: shares of answers, nats per token), protocol, method, budget,
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
    ours, theirs = (_curves_of(folder, named=named) for folder in (first, second))
    both_have = [key for key in ours if key in theirs and ours[key].prompts & theirs[key].prompts]
    rows, gaps = [], []
    with Progress("comparing", len(both_have)) as progress:
        for metric, protocol, method, budget in progress.over(both_have):
            key = metric, protocol, method, budget
            numbers = _paired_numbers(ours[key], theirs[key], resamples)
            gaps.append(numbers["difference"])
            row = {"metric": metric, "protocol": protocol, "method": method.label,
                   "budget": budget, "pairs": gaps[-1].prompts}  # fmt: skip
            for name, of in numbers.items():
                row |= {name: of.mean, f"{name}_low": of.low, f"{name}_high": of.high}
            rows.append(row)
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


def _paired_numbers(ours: Estimate, theirs: Estimate, resamples: int) -> dict[str, Interval]:
    """Both sides and their difference on the prompts that both answered."""
    shared = ours.prompts & theirs.prompts
    first, second = (
        {policy: {unit: of[unit] for unit in of if unit in shared} for policy, of in scores.items()}
        for scores in (ours.scores, theirs.scores)
    )
    how: dict[str, Any] = {"weights": ours.weights, "resamples": resamples}
    return {
        "first": bootstrap_mean(first, **how),
        "second": bootstrap_mean(second, **how),
        "difference": paired_difference(second, first, **how),
    }


def _text_of(rows: pandas.DataFrame) -> str:
    """Rows of one metric as text."""
    measure, table = METRICS[rows["metric"].iloc[0]], rows[["method", "budget", "pairs"]].copy()
    for side in ("first", "second"):
        table[side] = (measure.scale * rows[side]).map(f"{{:{measure.gap.lstrip('+')}}}".format)
    gaps = gap_texts(rows, "difference", measure)
    mark = rows["differs"].map({True: " *", False: "  "})
    table["second - first (95 %)"] = gaps[0] + " (" + gaps[1] + " to " + gaps[2] + ")" + mark
    return str(table.to_string(index=False))
