"""Figures of the studies, as docs/results/training.md shows them.

python recipes/training/figures.py RUN FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from arms import INPUTS, OBJECTIVES, REWARDS, SEQUENCES, SHARING, SIZES, STEPS, Arm
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from results import Mean, Result, over_seeds, results_of, transfers, validation_curve

ResultsT = TypeVar("ResultsT")


def main() -> None:
    """Draw every figure for which there are results."""
    run, folder = map(Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    for model in ("nano", "llama"):
        if (run / model / "objectives").exists():
            results = results_of(run / model / "objectives")
            save(folder / f"objectives-{model}.png", objectives, results)
    draw = {
        "rewards": rewards,
        "inputs": inputs,
        "sizes": sizes,
        "sharing": sharing,
        "sequences": sequences,
        "steps": steps,
    }
    for name, figure in draw.items():
        if (run / "nano" / name).exists():
            save(folder / f"{name}.png", figure, results_of(run / "nano" / name))
    if (run / "nano" / "lengths").exists():
        results = results_of(run / "nano" / "lengths")
        for arm, runs in results_of(run / "nano" / "longer").items():
            results[f"{arm}, trained at 1,920"] = runs
        save(folder / "lengths.png", lengths, results)
    if (run / "nano" / "transfer").exists():
        save(folder / "transfer.png", transfer, run / "nano" / "transfer")


def save(path: Path, draw: Callable[[Axes, ResultsT], None], results: ResultsT) -> None:
    """Draw one figure."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    draw(axes, results)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def skill(runs: Sequence[Result]) -> Mean:
    """Skill on test sequences."""
    return over_seeds(runs, lambda result: result["skill"])


def objectives(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Every objective as tuned."""
    bars(axes, OBJECTIVES, results)


def bars(axes: Axes, arms: Sequence[Arm], results: Mapping[str, list[Result]]) -> None:
    """One bar per arm; the axis starts near the lowest."""
    values = {arm.name: skill(results[arm.name]) for arm in arms if arm.name in results}
    axes.barh(
        list(values),
        [value.mean for value in values.values()],
        xerr=[value.half for value in values.values()],
        capsize=3,
        color="#4878a8",
    )
    axes.invert_yaxis()
    lowest = min(value.mean for value in values.values())
    axes.set(xlabel="skill on test sequences (1 oracle, 0 chance)", xlim=(max(lowest - 0.1, 0), 1))


def rewards(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Every kind of reward."""
    bars(axes, REWARDS, results)


def inputs(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Every set of inputs of the ranker."""
    bars(axes, INPUTS, results)


def sharing(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """A network per head or one for all."""
    bars(axes, SHARING, results)


def sizes(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Skill against the parameters of a head, for one and two hidden layers."""
    for blocks in (1, 2):
        arms = [arm.name for arm in SIZES if arm.settings["blocks"] == str(blocks)]
        line = [
            (results[arm][0]["parameters"], skill(results[arm])) for arm in arms if arm in results
        ]
        axes.errorbar(
            [x for x, _ in line],
            [value.mean for _, value in line],
            yerr=[value.half for _, value in line],
            capsize=3,
            marker="o",
            label=f"{blocks} hidden layer{'s' * (blocks > 1)}, width 16 to 512",
        )
    axes.set(xscale="log", xlabel="parameters per head", ylabel="skill on test sequences")
    axes.legend()


def sequences(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Learning curve over training sequences."""
    counts = [arm for arm in SEQUENCES if arm.name in results]
    values = [skill(results[arm.name]) for arm in counts]
    axes.errorbar(
        [int(arm.settings["sequences"]) for arm in counts],
        [v.mean for v in values],
        yerr=[v.half for v in values],
        capsize=3,
        marker="o",
    )
    axes.set(xscale="log", xlabel="training sequences", ylabel="skill on test sequences")
    numbers = [int(arm.settings["sequences"]) for arm in counts]
    axes.set_xticks(numbers, map(str, numbers))
    axes.xaxis.set_minor_locator(NullLocator())


def transfer(axes: Axes, study: Path) -> None:
    """Skill of policies of one kind of trace on another: a group of bars per test set."""
    results, names = transfers(study)
    width = 0.8 / len(results)
    for number, (kind, runs) in enumerate(results.items()):
        values = [over_seeds(runs, lambda r, n=name: r["elsewhere"][n]) for name in names]
        axes.bar(
            [index + number * width for index in range(len(names))],
            [value.mean for value in values],
            yerr=[value.half for value in values],
            width=width,
            capsize=3,
            label=f"trained on {kind}",
        )
    indices = [index + 0.4 - width / 2 for index in range(len(names))]
    axes.set_xticks(indices, [f"test of {name}" for name in names])
    axes.set(ylabel="skill on test sequences", ylim=(0, 1))
    axes.legend()


def steps(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Validation skill during training, mean over heads and seeds."""
    for arm in STEPS:
        if arm.name in results:
            curves = [validation_curve(result["folder"]) for result in results[arm.name]]
            mean = {step: sum(curve[step] for curve in curves) / len(curves) for step in curves[0]}
            axes.plot(list(mean), list(mean.values()), label=arm.like)
    axes.set(xlabel="step", ylabel="skill on validation sequences")
    axes.legend()


def lengths(axes: Axes, results: Mapping[str, list[Result]]) -> None:
    """Skill on prompts of other lengths than those a policy was trained on, 512 tokens or more."""
    for name, runs in results.items():
        if not runs:
            continue
        there = runs[0]["elsewhere"]
        values = {
            int(store.split("_")[0]): over_seeds(runs, lambda r, n=store: r["elsewhere"][n])
            for store in there
        }
        values.setdefault(512, skill(runs))
        prompt_lengths = sorted(values)
        axes.errorbar(
            prompt_lengths,
            [values[p].mean for p in prompt_lengths],
            yerr=[values[p].half for p in prompt_lengths],
            capsize=3,
            marker="o",
            label=name,
        )
    axes.set(xscale="log", xlabel="prompt tokens", ylabel="skill on test sequences")
    axes.set_xticks(prompt_lengths, [f"{length:,}" for length in prompt_lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


if __name__ == "__main__":
    main()
