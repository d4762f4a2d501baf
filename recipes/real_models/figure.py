"""Figure of README and docs/results/qwen2.5-coder.md, from benchmarks/results/qwen2.5-coder.

    python -m recipes.real_models.figure

draws right answers to docs/results/qwen2.5-coder.png: on the left against the share of the cache
that is kept, with 95 % intervals; on the right against the length of the context, over the tasks
that all lengths share, without intervals, since a length has two or three prompts of a task. Takes
seconds.
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

NUMBERS, OUT = Path("benchmarks/results/qwen2.5-coder"), Path("docs/results/qwen2.5-coder.png")
BUDGETS, LENGTHS = ["6.25%", "12.5%", "25%", "50%"], [2048, 4096, 8192, 16384]
SHARED, ADA = "+global, unprotected", "+ada, unprotected"
LINES = {
    "full cache": ("full", None, "#777777", ":", 1.2),
    "kvp, shared budget": ("kvp", SHARED, "#D55E00", "o-", 2.4),
    "kvp, equal counts": ("kvp", "unprotected", "#D55E00", "o--", 1.6),
    "ContrastKV, reads the context twice":
        ("contrastkv", f"beta=0, {SHARED}", "#882255", "D-", 1.2),
    "KVzip, reads the context twice": ("kvzip", SHARED, "#332288", "v-", 1.2),
    "KeyDiff, shared budget": ("keydiff", SHARED, "#0072B2", "P-", 1.2),
    "KeyDiff, equal counts": ("keydiff", "unprotected", "#0072B2", "P--", 1.2),
    "Expected Attention": ("expected_attention", f"epsilon=0.1, {ADA}", "#44AA99", "^-", 1.2),
    "SnapKV": ("snapkv", f"window=64,kernel=31, {ADA}", "#999933", "X-", 1.2),
    "first and last tokens (StreamingLLM)": ("streaming_llm", "unprotected", "#777777", "*-", 1.2),
}  # fmt: skip
"""Method, setting, colour, marker with line, and width."""


def read_numbers() -> pd.DataFrame:
    """Right answers by length, by task and over all tasks, in % with intervals."""
    frames = {length: pd.read_csv(NUMBERS / f"length-{length}.csv") for length in LENGTHS}
    rows = pd.concat(frames, names=["length"]).reset_index("length")
    rows[["estimate", "low", "high"]] *= 100
    return rows


def shared_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over the tasks that count at every length, without intervals."""
    rows = rows[rows["task"] != "all"]
    counted = rows[~rows["apart"]].groupby("task")["length"].nunique()
    rows = rows[rows["task"].isin(counted.index[counted == rows["length"].nunique()])]
    same = ["length", "method", "setting", "budget"]
    means = rows.groupby(same, dropna=False)["estimate"].mean().reset_index()
    return means.assign(low=means["estimate"], high=means["estimate"])


def read_line(rows: pd.DataFrame, label: str, column: str) -> pd.DataFrame:
    """The numbers of one line by the values of `column`."""
    method, setting, *_ = LINES[label]
    chosen = rows["setting"].isna() if setting is None else rows["setting"] == setting
    return rows[(rows["method"] == method) & chosen].set_index(column)


def draw_panel(panel: Axes, rows: pd.DataFrame, column: str, ticks: list, label: str) -> list:
    """Draw every line against `ticks`, the values of `column`; returns what the legend shows."""
    drawn = []
    for place, (name, (method, _, color, marks, width)) in enumerate(LINES.items()):
        line = read_line(rows, name, column)
        if method == "full" and column == "budget":
            drawn.append(panel.axhline(line["estimate"].item(), color=color, linestyle=marks))
            continue
        line = line.loc[[tick for tick in ticks if tick in line.index]]
        places = [2 ** ticks.index(at) * 1.02 ** (place - len(LINES) / 2) for at in line.index]
        ends = [line["estimate"] - line["low"], line["high"] - line["estimate"]]
        style = {"fmt": marks, "color": color, "linewidth": width}
        style |= {"elinewidth": 0.8, "capsize": 2, "markersize": 5}
        drawn.append(panel.errorbar(places, line["estimate"], ends, **style))
    panel.set(xscale="log", ylim=(0, 100), xlabel=label)
    names = [tick if isinstance(tick, str) else f"{tick:,}" for tick in ticks]
    panel.set_xticks([2**place for place in range(len(ticks))], names)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(color="#e4e4e4")
    panel.spines[["top", "right"]].set_visible(False)
    return drawn


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    rows = read_numbers()
    short = rows[(rows["length"] == LENGTHS[0]) & (rows["task"] == "all")]
    kept = shared_means(rows[rows["budget"].isin(["full", "12.5%"])])
    draw_panel(left, short, "budget", BUDGETS, "share of the cache that is kept, 2,048 tokens")
    label = "tokens of a context, 12.5 % kept, five needle tasks"
    drawn = draw_panel(right, kept, "length", LENGTHS, label)
    left.set_ylabel("right answers, %")
    figure.legend(
        drawn, list(LINES), loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    figure.savefig(OUT, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
