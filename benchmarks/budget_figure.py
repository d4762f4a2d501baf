"""Budgets per layer as a picture: EvolKV's figures 2 and 3, from budget files alone.

    python -m benchmarks.budget_figure runs/c64 runs/c128 --png budgets.png

Left: tokens per layer of every point of every file, with uniform and pyramid budgets of the same
mean. Middle: best fitness so far, generation by generation, of the files a search made. Right: each
point's tokens as a share of its largest layer. Prints the tokens as CSV. Counts per head are summed
up as their mean per layer.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvp.allocation import Request
from kvp.errors import UsageError
from policies.budget_files import BudgetFile, BudgetPoint, load_budgets
from policies.registry import make_allocator


def per_layer(budgets: BudgetFile, point: BudgetPoint) -> list[float]:
    """Tokens per KV head of every layer [L]."""
    width = budgets.units // budgets.layers
    counts = torch.tensor(point.counts, dtype=torch.float64).view(budgets.layers, width)
    means: list[float] = counts.mean(dim=1).tolist()
    return means


def by_rule(rule: str, budgets: BudgetFile, point: BudgetPoint) -> list[float]:
    """What an allocator gives every layer [L] for the same mean budget and cache."""
    scores = torch.zeros(budgets.layers, 1, point.cached_tokens)
    mean = round(sum(point.counts) / len(point.counts))
    counts = make_allocator(rule).allocate(Request(scores=scores, budget=mean, floor=1))
    return [float(count) for count in counts[:, 0].tolist()]


def table(files: Sequence[tuple[str, BudgetFile]]) -> list[list[str]]:
    """Rows of the CSV: who, the mean budget, tokens of every layer."""
    rows = []
    for name, budgets in files:
        for point in budgets.points:
            lines = {name: per_layer(budgets, point)}
            lines |= {rule: by_rule(rule, budgets, point) for rule in ("uniform", "pyramid")}
            rows += [
                [who, f"{sum(layers) / len(layers):.1f}", *(f"{count:g}" for count in layers)]
                for who, layers in lines.items()
            ]
    return rows


def draw(files: Sequence[tuple[str, BudgetFile]], path: Path) -> None:
    """Write the picture."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    tokens, search, shares = figure.subplots(1, 3)
    bars, names = [], []
    for name, budgets in files:
        for point in budgets.points:
            layers = per_layer(budgets, point)
            names.append(f"{name}, {point.budget}")
            (line,) = tokens.plot(layers, marker="o", label=names[-1])
            for rule, style in (("uniform", ":"), ("pyramid", "--")):
                tokens.plot(by_rule(rule, budgets, point), style, color=line.get_color())
            bars.append([count / max(layers) for count in layers])
        if best := budgets.made_by.get("best_fitness"):
            search.plot(list(accumulate(best, max)), label=name)
            search.legend()
    tokens.legend(title="dotted: uniform, dashed: pyramid")
    tokens.set(xlabel="layer", ylabel="tokens per KV head")
    search.set(xlabel="generation", ylabel="best fitness so far")
    image = shares.imshow(bars, aspect="auto", vmin=0, vmax=1)
    shares.set_yticks(range(len(names)), names)
    shares.set_xlabel("layer")
    figure.colorbar(image, ax=shares, label="share of the largest layer")
    FigureCanvasAgg(figure).print_png(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the CSV and draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="budget files or folders of kvp evolve")
    parser.add_argument("--png", type=Path, help="picture to write")
    given = parser.parse_args(arguments)
    files = [(Path(file).name, load_budgets(file)) for file in given.files]
    sizes = {budgets.layers for _, budgets in files}
    if len(sizes) > 1:
        raise UsageError(f"the files are of models with {sorted(sizes)} layers; name one model's")
    if given.png:
        draw(files, given.png)
    writer = csv.writer(sys.stdout)
    writer.writerow(["rule", "mean", *(f"layer {layer}" for layer in range(sizes.pop()))])
    writer.writerows(table(files))


if __name__ == "__main__":
    main()
