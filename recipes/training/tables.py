"""Markdown tables of the studies, as docs/results/training.md prints them.

python recipes/training/tables.py RUN            # RUN of recipes/training/run.sh
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from arms import (
    INPUTS,
    LABELS,
    LENGTHS,
    LONGER,
    OBJECTIVES,
    QUICK,
    REWARDS,
    SEQUENCES,
    SHARING,
    SIZES,
    STEPS,
    Arm,
)
from results import (
    Result,
    accuracy,
    difference,
    mean_of,
    nats,
    over_seeds,
    ppl,
    records_of,
    results_of,
    transfers,
)

from eval.stats import holm

BUDGETS = ("12.5%", "25%")


def main() -> None:
    """Print every table for which there are results."""
    run = Path(sys.argv[1])
    print("# Tables of docs/results/training.md\n")
    print(
        "Written by `recipes/training/tables.py`; the arms are those of `recipes/training/arms.py`."
    )
    print()
    for model in ("nano", "llama"):
        for part in model_tables(run / model):
            print(part)


def model_tables(run: Path) -> Iterator[str]:
    """All tables of one model."""
    name = run.name
    yield f"## {name}\n"
    yield objectives(run)
    for name, arms, reference in (
        ("query_aware", OBJECTIVES, "rloo"),
        ("query_aware", OBJECTIVES, "listwise"),
        ("query_agnostic", OBJECTIVES, "rloo"),
        ("query_agnostic", OBJECTIVES, "listwise"),
        ("rewards", REWARDS, "rloo"),
        ("512_tokens", LENGTHS, "features"),
        ("1920_tokens", LENGTHS, "features"),
    ):
        if (run / f"accuracy-{name}").exists():
            yield accuracies(run / f"accuracy-{name}", arms, reference)
    if (run / "perplexity").exists():
        uniform = [{"allocator": "uniform", "budget_spec": budget} for budget in ("9%", *BUDGETS)]
        yield perplexities(run / "perplexity", OBJECTIVES, "listwise", uniform)
    if (run / "perplexity-labels").exists():
        for protocol in ("query_aware", "query_agnostic"):
            columns = [
                {"protocol": protocol, "allocator": allocator, "budget_spec": budget}
                for allocator in ("uniform", "global")
                for budget in BUDGETS
            ]
            yield perplexities(run / "perplexity-labels", LABELS, "attention", columns)
    for study, arms in (
        ("rewards", REWARDS),
        ("labels", LABELS),
        ("steps", STEPS),
        ("inputs", INPUTS),
        ("sizes", SIZES),
        ("sharing", SHARING),
        ("sequences", SEQUENCES),
        ("quick", QUICK),
        ("lengths", LENGTHS),
        ("longer", LONGER),
    ):
        if (run / study).exists():
            yield variants(run / study, arms)
    if (run / "quick").exists():
        yield shares(run / "quick")
    if (run / "transfer").exists():
        yield transfer(run / "transfer")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its caption above it."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    return "\n".join(
        [f"**{caption}**", "", lines[0], "|---" + "|--:" * (len(header) - 1) + "|", *lines[1:], ""]
    )


def objectives(run: Path) -> str:
    """Held-out skill of every objective at the settings that validation chose."""
    by_arm = results_of(run / "objectives")
    rows = []
    for arm in OBJECTIVES:
        results = by_arm.get(arm.name)
        if results:
            chosen = results[0]["settings"]
            rows.append(
                [
                    arm.name,
                    chosen["lr"] + (f", {chosen['temperature']}" if arm.softened else ""),
                    str(over_seeds(results, lambda r: r["skill"])),
                    str(over_seeds(results, lambda r: min(r["skill_by_head"]))),
                    str(over_seeds(results, area_ratio)),
                    *(str(over_seeds(results, lost_at(budget))) for budget in BUDGETS),
                    str(over_seeds(results, lambda r: r["rank_correlation"])),
                    seconds(results),
                    str(len(results)),
                ]
            )
    header = ["objective", "lr, strength", "skill", "worst head", "area / oracle's"]
    header += [
        *(f"lost at {budget}" for budget in BUDGETS),
        "rank correlation",
        "wall / CPU s",
        "seeds",
    ]
    return table("Test sequences: every objective as tuned on validation", header, rows)


def seconds(results: Sequence[Result]) -> str:
    """Wall-clock and processor seconds of a run of one thread, medians over seeds."""
    wall, processor = (
        median(r[name] for r in results) for name in ("seconds", "processor_seconds")
    )
    return f"{wall:.0f} / {processor:.0f}"


def area_ratio(result: Result) -> float:
    """Area under the cost curve over the oracle's."""
    return float(result["area"] / result["oracle_area"])


def accuracies(folder: Path, arms: Sequence[Arm], reference: str) -> str:
    """Downstream accuracy of every arm and its difference to one of them.

    A star marks differences other than 0 at 5 % after Holm's correction for the whole table.
    """
    header = ["policies"]
    columns: list[dict[str, list[Result]]] = []
    for allocator in ("uniform", "global"):
        for budget in BUDGETS:
            header += [f"{allocator} {budget}", f"− {reference}"]
            columns.append(records_of(folder, budget_spec=budget, allocator=allocator))
    names = [arm.name for arm in arms if arm.name in columns[0]]
    gaps = {
        (name, number): difference(column[name], column[reference])
        for name in names if name != reference
        for number, column in enumerate(columns)
    }  # fmt: skip
    stars = dict(zip(gaps, holm(list(gaps.values())), strict=True))
    rows = []
    for name in names:
        cells = [name]
        for number, column in enumerate(columns):
            mean = accuracy(column[name])
            cells.append(f"{mean.mean:.1f} ± {mean.half:.1f}")
            gap = gaps.get((name, number))
            star = " *" if stars.get((name, number)) else ""
            cells.append(
                f"{gap.mean:+.1f}{star} ({gap.low:+.1f} to {gap.high:+.1f})" if gap else "–"
            )
        rows.append(cells)
    whole = [100 * record["score"] for record in records_of(folder, method="full")["full"]]
    caption = f"{folder.name}: accuracy, %; full cache {mean_of(whole).mean:.1f}"
    return table(caption, header, rows)


def perplexities(
    folder: Path, arms: Sequence[Arm], reference: str, columns: Sequence[Mapping[str, str]]
) -> str:
    """Continuation perplexity of every arm and its difference to `reference`, by column."""
    by_column = [records_of(folder, **fields) for fields in columns]
    rows = []
    for arm in arms:
        if arm.name in by_column[0]:
            cells = [arm.name]
            for column in by_column:
                mean = ppl(column[arm.name])
                gap = nats(column[arm.name], column[reference])
                cells.append(f"{mean.mean:.3f} ({mean.low:.2f} to {mean.high:.2f})")
                cells.append(f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})")
            rows.append(cells)
    full = records_of(folder, method="full")
    if full:
        rows.append(["full cache", *[f"{ppl(full['full']).mean:.3f}", ""] * len(columns)])
    header = ["policies"]
    for fields in columns:
        header += [" ".join(fields.values()), f"nats − {reference}"]
    return table(f"{folder.name}: perplexity of the text that follows", header, rows)


def variants(study: Path, arms: Sequence[Arm]) -> str:
    """Skill of the arms of a study that changes one thing."""
    by_arm = results_of(study)
    elsewhere = sorted({name for rs in by_arm.values() for r in rs for name in r["elsewhere"]})
    rows = [
        [
            arm.name,
            str(over_seeds(results, lambda r: r["skill"])),
            *(str(over_seeds(results, there(name))) for name in elsewhere),
            str(over_seeds(results, area_ratio)),
            *(str(over_seeds(results, lost_at(budget))) for budget in BUDGETS),
            f"{results[0]['parameters']:,}",
            f"{results[0]['trained_parameters']:,}",
            seconds(results),
        ]
        for arm in arms
        if (results := by_arm.get(arm.name))
    ]
    header = ["arm", "skill", *(f"skill on {name}" for name in elsewhere)]
    header += ["area / oracle's", *(f"lost at {budget}" for budget in BUDGETS)]
    header += ["parameters per head", "trained in all", "wall / CPU s"]
    return table(study.name, header, rows)


def there(name: str) -> Callable[[Result], float]:
    """Skill on another store's test sequences."""
    return lambda result: float(result["elsewhere"][name])


def lost_at(budget: str) -> Callable[[Result], float]:
    """Share of the future attention that is lost at a budget."""
    return lambda result: float(result["lost"][budget])


def shares(study: Path) -> str:
    """Skill of the shipped short run as a share of a ten times longer run's, head by head."""
    by_arm = results_of(study)
    heads = range(len(by_arm["quick"][0]["skill_by_head"]))
    picks = {f"head {h}": lambda result, h=h: result["skill_by_head"][h] for h in heads}
    picks |= {"all": lambda result: result["skill"]}
    rows = []
    for name, pick in picks.items():
        short, long = (over_seeds(by_arm[arm.name], pick) for arm in QUICK)
        rows.append([name, str(short), str(long), f"{short.mean / long.mean:.1%}"])
    return table("quick: share of the ten times longer run", ["", "quick", "ten times", ""], rows)


def transfer(study: Path) -> str:
    """Skill of policies of one kind of trace on the others, and on their validation split."""
    by_kind, names = transfers(study)
    rows = [
        [
            kind,
            str(over_seeds(results, lambda r: r["validation_skill"])),
            *(str(over_seeds(results, there(name))) for name in names),
        ]
        for kind, results in by_kind.items()
    ]
    header = ["trained on", "its own validation", *(f"test of {name}" for name in names)]
    return table("Transfer", header, rows)


if __name__ == "__main__":
    main()
