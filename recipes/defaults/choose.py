"""Choose the defaults of kvp-train again, on validation prompts alone (docs/decisions/0079).

    python -m recipes.defaults.choose --out runs/defaults

Each arm is preset `fourier` with one default changed. Learning rates are tuned for every arm by
skill on validation sequences (one seed that is not used again, half decades, until both neighbours
are worse or the grid ends). Then each arm is trained with several seeds, and all policies answer
validation prompts of another seed than the traces'. Prints a Markdown table per protocol: answers
in %, and each arm minus the default with a 95 % interval over prompts and seeds, marked where it
survives Holm's correction for the table. Started again, it continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kvp
from eval.results.records import read_records
from eval.stats import Scores, bootstrap_mean, holm, paired_difference
from recipes.training.arms import climb, held_out_skill
from recipes.training.settings import Grid

DEFAULT = "default"
ARMS: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "objective exact": {"objective": "exact"},
    "objective rloo": {"objective": "rloo"},
    "label future_attention": {"label": "future_attention"},
    "key_frame end": {"key_frame": "end"},
    "optimizer adamw": {"optimizer": "adamw"},
}
"""Arm -> what it changes: the defaults of decisions 57, 75, 73 and 74."""
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST_RATE = 1e-2
TUNING_SEED = 100
TASKS = "niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2"
CELLS = (("uniform", "12.5%"), ("uniform", "25%"), ("global", "12.5%"), ("global", "25%"))
"""Allocators and budgets of the table."""

Record = Mapping[str, Any]


def best_rate(skill: Callable[[float], float]) -> float:
    """The learning rate whose neighbours on the grid have less skill."""
    rates = {f"{rate:g}": rate for rate in RATES}
    grid = Grid(values=tuple(rates), first=f"{FIRST_RATE:g}")
    return rates[climb(grid, lambda name: skill(rates[name]))]


def trained(folder: Path, settings: Mapping[str, Any]) -> Path:
    """A policy with these settings, trained unless it is there."""
    if not (folder / "policy.json").exists():
        kvp.train(out=str(folder), **settings)
    return folder


def train_arms(
    out: Path, arms: Iterable[str], common: Mapping[str, Any], seeds: int
) -> dict[str, float]:
    """Tune and train every arm; arm -> learning rate."""
    rates = {}
    for arm in arms:
        name = arm.replace(" ", "_")
        settings = {**common, **ARMS[arm]}

        def skill(rate: float, name: str = name, settings: Mapping[str, Any] = settings) -> float:
            tuning = {**settings, "lr": rate, "seed": TUNING_SEED}
            return held_out_skill(trained(out / "tuning" / f"{name}_{rate:g}", tuning))

        rates[arm] = best_rate(skill)
        for seed in range(seeds):
            run = {**settings, "lr": rates[arm], "seed": seed}
            trained(out / "policies" / f"{name}.seed{seed}", run)
    return rates


def scores_of(records: Iterable[Record], cells: Sequence[tuple[str, str]]) -> Scores:
    """Per policy and prompt, the mean over cells that have it."""
    found: dict[Any, dict[tuple[str, str], list[float]]] = {}
    for record in records:
        if (record["allocator"], record["budget_spec"]) in cells:
            prompts = found.setdefault(record["policy"], {})
            prompts.setdefault((record["task"], record["example"]), []).append(record["score"])
    return {
        policy: {prompt: sum(scores) / len(scores) for prompt, scores in prompts.items()}
        for policy, prompts in found.items()
    }


def table(records: Sequence[Record], rates: Mapping[str, float], resamples: int) -> str:
    """Markdown of one protocol: a line per arm, a column per cell and one for their mean."""
    columns = [[cell] for cell in CELLS] + [list(CELLS)]
    names = [f"{rule} {budget}" for rule, budget in CELLS] + ["mean"]
    lines = [f"| arm | learning rate | {' | '.join(names)} |", f"|---|--:|{'--:|' * len(names)}"]
    by_arm = {
        arm: [
            record
            for record in records
            if str(record["policy"]).rpartition(".seed")[0] == arm.replace(" ", "_")
        ]
        for arm in rates
    }
    scores = {
        arm: [scores_of(of_arm, cells) for cells in columns] for arm, of_arm in by_arm.items()
    }
    gaps = {
        arm: [
            paired_difference(ours, theirs, resamples=resamples)
            for ours, theirs in zip(scores[arm], scores[DEFAULT], strict=True)
        ]
        for arm in rates
        if arm != DEFAULT
    }
    stars = iter(holm([gap for of_arm in gaps.values() for gap in of_arm]))
    for arm, rate in rates.items():
        cells = []
        for column, values in enumerate(scores[arm]):
            text = f"{100 * bootstrap_mean(values, resamples=1).mean:.1f}"
            if arm in gaps:
                gap = gaps[arm][column]
                text += f", {100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"
                text += " *" if next(stars) else ""
            cells.append(text)
        lines.append(f"| {arm} | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect, tune, train, answer, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--train", type=int, default=240, help="training sequences")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=20, help="validation prompts of each task")
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--arms", default=",".join(list(ARMS)[1:]), help="besides the default")
    given = parser.parse_args(arguments)
    where = {"model": given.model, "tasks": given.tasks, "length": given.length}
    traces = given.out / "traces"
    held_out = max(8, given.train // 5)
    kvp.collect(out=str(traces), train=given.train, validation=held_out, **where)
    common = {
        "traces": str(traces), "steps": given.steps, "hidden": given.hidden, "contexts": 4,
        "validation_contexts": held_out, "calibration_contexts": held_out,
        "validate_every": given.steps, "checkpoint_every": given.steps,
    }  # fmt: skip
    arms = [DEFAULT, *filter(None, given.arms.split(","))]
    rates = train_arms(given.out, arms, common, given.seeds)
    results = given.out / "results"
    kvp.evaluate(
        out=str(results), **where, split="validation", seed=1, methods=["full", "kvp"],
        policies=str(given.out / "policies"), allocators="uniform,global", budgets="12.5%,25%",
        protection="off", prompts=given.prompts, max_new_tokens=given.max_new_tokens,
        timing_prompts=0, tokens=False,
    )  # fmt: skip
    records = list(read_records(results / "rows.jsonl"))
    for protocol in dict.fromkeys(record["protocol"] for record in records):
        of_protocol = [record for record in records if record["protocol"] == protocol]
        full = scores_of(of_protocol, [("uniform", None)])  # type: ignore[list-item]
        mean = bootstrap_mean(full, resamples=1).mean
        print(f"\n{protocol}: answers in %, full cache {100 * mean:.1f}\n")
        print(table([one for one in of_protocol if one["policy"]], rates, given.resamples))


if __name__ == "__main__":
    main()
