"""Numbers, tables and figure of docs/results/smollm2.md, from results folders of kvp eval.

    python recipes/real_models/pages.py RUN

writes what is in the folders RUN/NAME that are there to benchmarks/results/smollm2: NAME.csv, a
line per task, and the lines of NAME in overall.csv, all tasks together. Tables and figure show
numbers of these files.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from eval.report.costs import count_passes
from eval.results.folder import load_results
from eval.results.record_names import QUERY_AGNOSTIC, QUERY_AWARE
from eval.results.records import Record
from eval.results.stats import (
    Interval,
    bootstrap_mean,
    holm,
    paired_difference,
    perplexity,
    prompt_values,
    reply_tokens,
)
from kvp.grouping import group_by
from kvp.names import FULL

PAGE = Path("docs/results/smollm2.md")
NUMBERS = Path("benchmarks/results/smollm2")
OVERALL, COSTS = NUMBERS / "overall.csv", NUMBERS / "costs.csv"
TESTED = (
    *("needles", "fresh", "kvzap", "references", "sources", "other"),
    *("long-2048", "long-4096"),
    *("text-wiki", "text-novels", "text-news", "texts", "sources-text"),
)
TUNED = ("epsilon", "safeguard", "window", "text", "chat-validation", "chat-test")
UNSHOWN = ("tune", *(f"tune-{what}" for what in TUNED))
"""Settings of baselines on validation prompts: not in overall.csv."""
OURS = "kvp+ada"
BUNDLED = "smollm2-135m-instruct"
"""The policy in the package, seed 0."""
REFERENCES = (FULL, "oracle", "oracle+global")
TIMED = "12.5%"
"""Budget of the timing pass."""
RECENCY = "streaming_llm"
LAST_TURN = (RECENCY, "4")
"""Method and budget whose cache holds a dialogue's last turn and four first tokens."""
LEAST_GAIN = 0.05
"""Nats per token of the reply."""
BASELINES = {
    "full cache": FULL,
    OURS: OURS,
    "KVzip+global, reads twice": "kvzip",
    "ContrastKV+global, reads twice": "contrastkv",
    "SnapKV+ada": "snapkv",
    "KeyDiff+ada": "keydiff",
    "recency, 24 prompts": RECENCY,
}
"""A table's label of each method, and how its name begins, whatever its setting."""
READERS = {
    "full cache": FULL,
    OURS: OURS,
    "kvp+global": "kvp+global",
    "KVzip+global": "kvzip",
    "ContrastKV+global": "contrastkv",
    "H2O": "h2o",
    "SnapKV+ada": "snapkv",
}

Key = tuple[str, str, str]
"""Protocol, method and budget (`full` where there is none)."""
Cells = dict[Key, list[Record]]


def method(record: Record) -> str:
    """Name of a method with its allocator; policies that differ in the seed alone share one."""
    name: str = record["method"]
    if record["variant"] != "auto":
        name += f"({record['variant']})"
    policy = (record["policy"] or "").rstrip("0123456789")
    if policy not in ("", "seed", BUNDLED):
        name = policy
    allocator = record["allocator"].partition(":")[0]
    return name if allocator == "uniform" else f"{name}+{allocator}"


def cells(records: Iterable[Record]) -> Cells:
    """Records by protocol, method and budget."""
    return group_by(records, lambda r: (r["protocol"], method(r), r["budget_spec"] or FULL))


def estimate(records: list[Record]) -> Interval:
    """Mean answers in %, or the perplexity of given text, with its interval over prompts."""
    if records[0]["nll"] is not None:
        return perplexity(records)
    mean = bootstrap_mean(prompt_values(records))
    return Interval(
        mean=100 * mean.mean, low=100 * mean.low, high=100 * mean.high, prompts=mean.prompts
    )


def told_apart(found: Cells) -> dict[Key, str]:
    """Whether each differs from ours, paired by prompt: not 0 at 5 % after Holm, per protocol."""
    told = {}
    for protocol in {key[0] for key in found}:
        paired = {}
        for key, theirs in found.items():
            ours = found.get((protocol, OURS, key[2]))
            if key[0] == protocol and ours and key[1] not in (OURS, *REFERENCES):
                weights = reply_tokens(ours)
                paired[key] = paired_difference(
                    prompt_values(ours), prompt_values(theirs), weights=weights
                )
        differ = holm(paired)
        told |= {key: "yes" if key in differ else "no" for key in paired}
    return told


def gain(records: Iterable[Record]) -> Iterator[tuple[Key, Interval]]:
    """Share that methods keep of what the full cache gains over one of the last turn alone, %.

    The last turn is fed after the eviction, so its cache is what StreamingLLM's four first tokens
    leave. Only dialogues count in which the full cache gains `LEAST_GAIN`.
    """
    found = {}
    for key, group in cells(records).items():
        policies = [*prompt_values(group).values()]
        found[key] = {unit: fmean(of[unit] for of in policies) for unit in policies[0]}
    last = found.pop((QUERY_AGNOSTIC, *LAST_TURN), {})
    full = found.pop((QUERY_AGNOSTIC, FULL, FULL))
    gains = {unit: full[unit] - last[unit] for unit in full if unit in last}
    counted = [name for name, value in gains.items() if value >= LEAST_GAIN]
    if not counted:
        return
    resampled = np.random.default_rng(0).integers(len(counted), size=(2000, len(counted)))
    whole = np.array([gains[one] for one in counted])
    for key, ours in found.items():
        kept = np.array([ours[one] - last[one] for one in counted])
        draws = 100 * kept[resampled].sum(1) / whole[resampled].sum(1)
        low, high = np.quantile(draws, [0.025, 0.975])
        share = 100 * kept.sum() / whole.sum()
        yield key, Interval(mean=share, low=low, high=high, prompts=len(counted))


def overall(name: str, records: list[Record]) -> Iterator[tuple[str | int, ...]]:
    """Lines of overall.csv: all tasks together, each training seed alone, the dialogues' gain."""
    found = cells(records)
    told = told_apart(found)
    for key, group in found.items():
        yield (name, *key, *_numbers(estimate(group)), told.get(key, ""))
    ours = [record for record in records if method(record) == OURS]
    if len(policies := sorted({record["policy"] for record in ours})) > 1:
        for policy in policies:
            for key, group in cells(r for r in ours if r["policy"] == policy).items():
                yield (f"{name}-{policy}", *key, *_numbers(estimate(group)), "")
    if name == "texts":
        for key, share in gain(records):
            yield ("gain", *key, *_numbers(share), "")


def write_overall(name: str, records: list[Record]) -> None:
    """Replace the lines of these results in overall.csv."""
    before = read(OVERALL)
    new = pd.DataFrame(overall(name, records), columns=before.columns)
    rows = pd.concat([new, before[~before["results"].isin(new["results"])]])
    rows.sort_values("results", kind="stable").to_csv(OVERALL, index=False)


def write_tasks(records: Iterable[Record], path: Path) -> None:
    """One line per protocol, task, method and budget."""
    rows = [
        (protocol, task, name, budget, *_numbers(estimate(group)))
        for task, part in group_by(records, itemgetter("task")).items()
        for (protocol, name, budget), group in cells(part).items()
    ]
    header = ["protocol", "task", "method", "budget", "prompts", "estimate", "low", "high"]
    pd.DataFrame(rows, columns=header).to_csv(path, index=False)


def write_costs(timing: Iterable[Record]) -> None:
    """Write per method: readings of the prompt; FLOPs and seconds to evict, % of the prefill's."""
    prefill = next(record for record in timing if record["method"] == FULL)
    rows = []
    for record in timing:
        row = {"method": method(record), "passes": count_passes(record["method"])}
        for unit in ("flops", "seconds"):
            share = record[f"evict_{unit}"] / prefill[f"prefill_{unit}"]
            row[f"{unit}_percent"] = f"{100 * share:.0f}"
        rows.append(row)
    pd.DataFrame(rows).to_csv(COSTS, index=False)


def texts() -> Iterator[str]:
    """Perplexity of running text at 12.5 %."""
    yield "| method | WikiText-2 | novels | articles |\n|---|--:|--:|--:|"
    for label, start in READERS.items():
        names = (f"text-{name}" for name in ("wiki", "novels", "news"))
        row = [_cell(name, QUERY_AGNOSTIC, "12.5%", start, digits=2) for name in names]
        yield f"| {label} | {' | '.join(row)} |"


def kept() -> Iterator[str]:
    """Right answers in %: baselines of 600 prompts, recency on some of them."""
    budgets = ("2%", "6%", "12.5%", "25%")
    yield f"| question | method | {' | '.join(budgets)} |\n|---|---|{'--:|' * len(budgets)}"
    for question, protocol in (("seen", QUERY_AWARE), ("not seen", QUERY_AGNOSTIC)):
        for label, start in BASELINES.items():
            results = "references" if start == RECENCY else "fresh"
            row = [_cell(results, protocol, budget, start) for budget in budgets]
            yield f"| {question} | {label} | {' | '.join(row)} |"


def draw(path: Path) -> None:
    """Answers against budget beside answers against cost at 6 %, a row per protocol."""
    answers = {
        (row.protocol, row.method, row.budget): float(row.estimate)
        for row in read(OVERALL).query("results == 'needles'").itertuples()
    }
    seconds = read(COSTS).set_index("method")["seconds_percent"].astype(float)
    budgets = sorted({key[2] for key in answers} - {FULL}, key=lambda spec: float(spec.rstrip("%")))
    shares = [float(budget.rstrip("%")) for budget in budgets]
    names = sorted({key[1] for key in answers} - {FULL}, key=lambda name: (name != OURS, name))
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    titles = {QUERY_AWARE: "question seen", QUERY_AGNOSTIC: "question not seen"}
    for (protocol, title), (quality, cost) in zip(titles.items(), panels, strict=True):
        for name, marker, color in zip(
            names, "osD^vP", ("C3", "C0", "C1", "C2", "C4", "C5"), strict=True
        ):
            means = [answers[protocol, name, budget] for budget in budgets]
            style = {"marker": marker, "color": color, "label": name}
            quality.plot(shares, means, lw=1 + 2 * (name == OURS), **style)
            cost.plot(seconds[name], means[budgets.index("6%")], ls="", ms=8, **style)
        for panel in (quality, cost):
            full = answers[protocol, FULL, FULL]
            panel.axhline(full, color="gray", ls="--", lw=1, label="full cache")
            panel.set(xscale="log", ylim=(-2, 100), ylabel="answers, %")
        quality.set(title=title, xlabel="share of the cache kept")
        quality.set_xticks(shares, budgets)
        quality.xaxis.set_minor_locator(NullLocator())
        cost.set(title=f"{title}, 6 % kept", xlabel="eviction, share of the prefill's seconds")
        cost.set_xticks((1, 10, 100), ("1%", "10%", "100%"))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def read(path: Path) -> pd.DataFrame:
    """The rows of a committed CSV file; all cells are strings."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def _numbers(one: Interval) -> tuple[int | str, ...]:
    return (one.prompts, *(f"{number:.4g}" for number in one.numbers))


def _cell(results: str, protocol: str, budget: str, start: str, digits: int = 0) -> str:
    """The mean of the first line whose method's name begins so, and a star where it differs."""
    rows = read(OVERALL).set_index(["results", "protocol", "budget"])
    rows = rows.loc[[(results, protocol, FULL if start == FULL else budget)]]
    row = rows[rows["method"].str.startswith(start)].iloc[0]
    return f"{float(row['estimate']):.{digits}f}" + "*" * (row["differs"] == "yes")


def fill(name: str, table: str) -> None:
    """Put a table between the two comments of the page that name it."""
    block = rf"(<!-- begin {name}: .*? -->\n).*?(<!-- end {name} -->)"
    text = PAGE.read_text(encoding="utf-8")
    text, found = re.subn(block, lambda it: f"{it[1]}{table}\n{it[2]}", text, flags=re.DOTALL)
    if found != 1:
        raise ValueError(f"{PAGE} has {found} blocks {name}")
    PAGE.write_text(text, encoding="utf-8")


def main(run: Path) -> None:
    """Files, tables and figure from the folders that are there."""
    for name in (*TESTED, *UNSHOWN):
        if (run / name).exists():
            records = list(load_results(run / name).records)
            write_tasks(records, NUMBERS / f"{name}.csv")
            if name in TESTED:
                write_overall(name, records)
    if (run / "timing").exists():
        timing = load_results(run / "timing").timing
        write_costs([record for record in timing if record["budget_spec"] in (None, TIMED)])
    fill("kept", "\n".join(kept()))
    fill("texts", "\n".join(texts()))
    draw(PAGE.with_suffix(".png"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of evidence.sh")
    main(**vars(parser.parse_args()))
