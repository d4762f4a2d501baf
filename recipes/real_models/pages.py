"""Tables and figure of docs/results/smollm2.md, from results folders of kvp-eval.

    python recipes/real_models/pages.py RUN

fills the blocks of the page with the folders RUN/NAME that are there, and writes one number per
column to benchmarks/results/smollm2/NAME.csv.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import compress
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from eval.comparison import budget_order
from eval.records import FULL, Record
from eval.report.costs import passes
from eval.results import load_results
from eval.stats import (
    Interval,
    bootstrap_mean,
    holm,
    paired_difference,
    perplexity,
    prompt_values,
    reply_tokens,
)
from recipes.all_methods.blocks import fill_file

PAGE = Path("docs/results/smollm2.md")
NUMBERS = Path("benchmarks/results/smollm2")
ANSWERS = (
    *("needles", "fresh", "kvzap", "references", "sources", "other"),
    *("long-2048", "long-4096"),
)
BY_TASK = ("needles", "other")
"""Those with a table of tasks on the page; of the others they are in the CSV file."""
TEXTS = ("text-wiki", "text-novels", "text-news", "texts", "sources-text")
TUNED = (
    "epsilon",
    "safeguard",
    "window",
    "text",
    "chat-validation",
    "chat-test",
)
UNSHOWN = (
    "tune",
    *(f"tune-{what}" for what in TUNED),
)
"""CSV files without a table: settings of rivals on validation prompts, and more."""
OURS = "kvp+ada"
BUNDLED = "smollm2-135m-instruct"
"""The policy in the package, seed 0."""
REFERENCES = (FULL, "oracle", "oracle+global")
TIMED = "12.5%"
"""Budget of the timing pass."""
LAST_TURN = ("streaming_llm", "4")
"""Method and budget whose cache holds a dialogue's last turn and four first tokens."""
LEAST_GAIN = 0.05
"""Nats per token of the reply."""
SHOWN = ("2%", "6%", "12.5%", "25%")
"""Budgets of the tables of tasks."""

Cells = dict[tuple[str, str, str], list[Record]]
"""Records by protocol, method and budget."""


def method(record: Record) -> str:
    """Name of a method with its allocator; the policies of one training differ in seed alone."""
    name: str = record["method"]
    if record["variant"] != "auto":
        name += f"({record['variant']})"
    policy = (record["policy"] or "").rstrip("0123456789")
    if policy not in ("", "seed", BUNDLED):
        name = policy
    rule = record["allocator"].partition(":")[0]
    return name if rule == "uniform" else f"{name}+{rule}"


def cells(records: Iterable[Record]) -> Cells:
    """Records by protocol, method and budget (`full` where there is none)."""
    found: Cells = defaultdict(list)
    for record in records:
        found[record["protocol"], method(record), record["budget_spec"] or FULL].append(record)
    return found


def estimate(records: list[Record]) -> Interval:
    """Mean answers in %, or the perplexity of given text, with its interval over prompts."""
    if records[0]["nll"] is not None:
        return perplexity(records)
    mean = bootstrap_mean(prompt_values(records))
    return Interval(
        mean=100 * mean.mean, low=100 * mean.low, high=100 * mean.high, prompts=mean.prompts
    )


def budgets_of(found: Cells) -> list[str]:
    """Budgets in order, without the full cache and that of the last turn alone."""
    return sorted({key[2] for key in found} - {FULL, LAST_TURN[1]}, key=budget_order)


def methods_of(found: Cells, protocol: str) -> list[str]:
    """Methods of a protocol, ours first, references last."""
    names = {key[1] for key in found if key[0] == protocol} - {FULL}
    return sorted(names, key=lambda name: (name in REFERENCES, not name.startswith("kvp"), name))


def table(found: Cells, taken: Mapping[str, str]) -> Iterator[str]:
    """Methods by budgets, a table per protocol; `*`: `told_apart` from ours.

    `taken` is the cost of each method (`shares`).
    """
    budgets = budgets_of(found)
    for protocol in sorted({key[0] for key in found}, reverse=True):
        full, apart = found[protocol, FULL, FULL], told_apart(found, protocol)
        prompts = estimate(full).prompts
        yield f"\n**{protocol}**, full cache {_text(full)}, {prompts} prompts\n"
        yield f"| method | passes, FLOPs, seconds | {' | '.join(budgets)} |"
        yield f"|---|---|{'--:|' * len(budgets)}"
        for name in methods_of(found, protocol):
            row = [
                _text(found.get((protocol, name, budget))) + "*" * ((name, budget) in apart)
                for budget in budgets
            ]
            yield f"| {name} | {taken.get(name, '')} | {' | '.join(row)} |"


def told_apart(found: Cells, protocol: str) -> set[tuple[str, str]]:
    """Methods and budgets that differ from ours, paired by prompt: not 0 at 5 % after Holm."""
    paired = {}
    for (of_protocol, name, budget), theirs in found.items():
        ours = found.get((protocol, OURS, budget))
        if of_protocol == protocol and ours and name != OURS and name not in REFERENCES:
            weights = reply_tokens(ours)
            paired[name, budget] = paired_difference(
                prompt_values(ours),
                prompt_values(theirs),
                bounds=None if weights else (-1, 1),
                weights=weights,
            )
    return set(compress(paired, holm(list(paired.values()))))


def tasks(records: Iterable[Record]) -> Iterator[str]:
    """Every task alone at a few budgets, a table per protocol."""
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_task[record["task"]].append(record)
    parts = {name: cells(part) for name, part in by_task.items()}
    for protocol in sorted({key[0] for part in parts.values() for key in part}, reverse=True):
        names = [n for n in methods_of(cells(records), protocol) if not n.startswith("random")]
        yield f"\n**{protocol}**, at {', '.join(SHOWN)} of the cache\n"
        yield f"| task | full | {' | '.join(names)} |\n|---|--:|{'--:|' * len(names)}"
        for task, part in parts.items():
            row = [_number(part.get((protocol, FULL, FULL)))]
            for name in names:
                row.append(" / ".join(_number(part.get((protocol, name, b))) for b in SHOWN))
            yield f"| {task} | {' | '.join(row)} |"


def shares(timing: Iterable[Record]) -> dict[str, str]:
    """Per method: readings of the prompt, FLOPs and seconds to evict as shares of the prefill."""
    prefill = next((record for record in timing if record["method"] == FULL), {})
    found = {}
    for record in timing:
        flops, seconds = (
            100 * record[f"evict_{unit}"] / prefill[f"prefill_{unit}"]
            for unit in ("flops", "seconds")
        )
        found[method(record)] = f"{passes(record['method'])}, {flops:.0f} %, {seconds:.0f} %"
    return found


def costs_on_page() -> dict[str, str]:
    """`shares` as an earlier run wrote them."""
    block = PAGE.read_text(encoding="utf-8").partition("begin costs:")[2].partition("end costs")[0]
    rows = [line.split("|")[1:3] for line in block.splitlines() if line.startswith("| ")]
    return {name.strip(): cost.strip() for name, cost in rows}


def costs(timing: Iterable[Record], taken: Mapping[str, str]) -> Iterator[str]:
    """What evicting from one prompt costs (`shares`), and the bytes that are left."""
    yield "| method | passes, FLOPs, seconds | bytes kept |"
    yield "|---|---|--:|"
    full = next(record for record in timing if record["method"] == FULL)
    for record in timing:
        kept = record["cache_bytes"] / full["cache_bytes"]
        yield f"| {method(record)} | {taken[method(record)]} | {100 * kept:.1f} % |"


def gain(records: Iterable[Record]) -> Iterator[str]:
    """Share that methods keep of what the full cache gains over one of the last turn alone.

    The last turn is fed after the eviction, so its cache is what StreamingLLM's four first tokens
    leave. Only dialogues count in which the full cache gains `LEAST_GAIN`.
    """
    found = cells(records)
    protocol = "query_agnostic"
    nll: dict[tuple[str, str], dict[str, float]] = {}
    for (of_protocol, name, budget), group in found.items():
        if of_protocol == protocol:
            losses = defaultdict(list)
            for record in group:
                losses[record["example"]].append(record["nll"] / record["reply_tokens"])
            nll[name, budget] = {example: fmean(values) for example, values in losses.items()}
    full, last = nll[FULL, FULL], nll.get(LAST_TURN, {})
    gains = {name: last[name] - full[name] for name in full if name in last}
    counted = [name for name, value in gains.items() if value >= LEAST_GAIN]
    budgets = budgets_of(found)
    yield (
        f"\n{len(counted)} of {len(gains)} dialogues, where the full cache gains at least "
        f"{LEAST_GAIN} nats per token: share of it kept, %\n"
    )
    yield f"| method | {' | '.join(budgets)} |\n|---|{'--:|' * len(budgets)}"
    resampled = np.random.default_rng(0).integers(len(counted), size=(2000, len(counted)))
    for name in methods_of(found, protocol):
        row = []
        for budget in budgets:
            ours = nll.get((name, budget))
            if ours is None or not counted:
                row.append("")
                continue
            kept = np.array([last[one] - ours[one] for one in counted])
            whole = np.array([gains[one] for one in counted])
            draws = kept[resampled].sum(1) / whole[resampled].sum(1)
            low, high = np.quantile(draws, [0.025, 0.975])
            share = kept.sum() / whole.sum()
            row.append(f"{100 * share:.0f} ({100 * low:.0f} to {100 * high:.0f})")
        yield f"| {name} | {' | '.join(row)} |"


def draw(numbers: Path, taken: Mapping[str, str], path: Path) -> None:
    """Answers against budget beside answers against cost at 6 %, a row per protocol.

    `numbers` is what `write_csv` wrote, of as many prompts of each task; `taken` as in `table`.
    """
    answers: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with numbers.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row["protocol"], row["method"], row["budget"]
            answers[key].append(float(row["estimate"]))
    budgets = sorted({key[2] for key in answers} - {FULL}, key=budget_order)
    kept = [float(budget.rstrip("%")) for budget in budgets]
    names = sorted({key[1] for key in answers} - {FULL}, key=lambda name: (name != OURS, name))
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    titles = {"query_aware": "question seen", "query_agnostic": "question not seen"}
    for (protocol, title), (quality, cost) in zip(titles.items(), panels, strict=True):
        for name, marker, color in zip(
            names, "osD^vP", ("C3", "C0", "C1", "C2", "C4", "C5"), strict=True
        ):
            means = [fmean(answers[protocol, name, budget]) for budget in budgets]
            seconds = float(taken[name].rpartition(", ")[2].rstrip(" %"))
            style = {"marker": marker, "color": color, "label": name}
            quality.plot(kept, means, lw=1 + 2 * (name == OURS), **style)
            cost.plot(seconds, means[budgets.index("6%")], ls="", ms=8, **style)
        for panel in (quality, cost):
            full = fmean(answers[protocol, FULL, FULL])
            panel.axhline(full, color="gray", ls="--", lw=1, label="full cache")
            panel.set(xscale="log", ylim=(-2, 100), ylabel="answers, %")
        quality.set(title=title, xlabel="share of the cache kept")
        quality.set_xticks(kept, budgets)
        quality.xaxis.set_minor_locator(NullLocator())
        cost.set(title=f"{title}, 6 % kept", xlabel="eviction, share of the prefill's seconds")
        cost.set_xticks((1, 10, 100), ("1%", "10%", "100%"))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=100)


def seeds(records: Iterable[Record]) -> Iterator[str]:
    """Each training seed of our policy alone, %, on the same prompts."""
    found = cells(records)
    budgets = budgets_of(found)
    for protocol in sorted({key[0] for key in found}, reverse=True):
        full = found[protocol, FULL, FULL]
        yield f"\n**{protocol}**, full cache {_number(full)}, {estimate(full).prompts} prompts\n"
        yield f"| policy | {' | '.join(budgets)} |\n|---|{'--:|' * len(budgets)}"
        ours = {b: found.get((protocol, OURS, b), []) for b in budgets}
        for policy in sorted({r["policy"] for group in ours.values() for r in group}):
            row = [[r for r in ours[b] if r["policy"] == policy] for b in budgets]
            yield f"| {policy} | {' | '.join(map(_number, row))} |"


def write_csv(records: Iterable[Record], path: Path) -> None:
    """One line per protocol, task, method and budget."""
    by_task: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_task[record["task"]].append(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("protocol", "task", "method", "budget", "prompts", "estimate", "low", "high")
        )
        for task, part in by_task.items():
            for (protocol, name, budget), group in cells(part).items():
                one = estimate(group)
                numbers = (f"{x:.4g}" for x in (one.mean, one.low, one.high))
                writer.writerow((protocol, task, name, budget, one.prompts, *numbers))


def _text(records: list[Record] | None) -> str:
    if not records:
        return ""
    one, digits = estimate(records), 0 if records[0]["nll"] is None else 2
    return f"{one.mean:.{digits}f} ({one.low:.{digits}f} to {one.high:.{digits}f})"


def _number(records: list[Record] | None) -> str:
    if not records:
        return "–"
    one = estimate(records)
    return f"{one.mean:.2f}" if records[0]["nll"] is not None else f"{one.mean:.0f}"


def blocks(run: Path) -> Mapping[str, str | None]:
    """Contents of the page's blocks; None where a folder is not there."""
    contents: dict[str, str | None] = {}
    timed = load_results(run / "timing").timing if (run / "timing").exists() else ()
    timing = [record for record in timed if record["budget_spec"] in (None, TIMED)]
    taken = shares(timing) or costs_on_page()
    found = {
        name: list(load_results(run / name).records) if (run / name).exists() else []
        for name in (*ANSWERS, *TEXTS)
    }
    for name, records in found.items():
        contents[name] = "\n".join(table(cells(records), taken)) if records else None
        if name in BY_TASK:
            contents[f"{name}-tasks"] = "\n".join(tasks(records)) if records else None
        if name == "texts":
            contents["gain"] = "\n".join(gain(records)) if records else None
        if records:
            write_csv(records, NUMBERS / f"{name}.csv")
        if name == "needles":
            contents["seeds"] = "\n".join(seeds(records)) if records else None
    for name in UNSHOWN:
        if (run / name).exists():
            write_csv(load_results(run / name).records, NUMBERS / f"{name}.csv")
    contents["costs"] = "\n".join(costs(timing, taken)) if timing else None
    draw(NUMBERS / "needles.csv", taken, PAGE.with_suffix(".png"))
    return contents


if __name__ == "__main__":
    fill_file(PAGE, blocks(Path(sys.argv[1])))
