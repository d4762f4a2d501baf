"""Figure of README and docs/results/qwen2.5-coder.md, from benchmarks/results/qwen2.5-coder.

    python -m recipes.real_models.figure

draws answers against the share of the cache that is kept, with 95 % intervals, to
docs/results/qwen2.5-coder.png: equal counts on the left, budgets that heads share on the right.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

NUMBERS, OUT = Path("benchmarks/results/qwen2.5-coder"), Path("docs/results/qwen2.5-coder.png")
BUDGETS = ["6.25%", "12.5%", "25%", "50%"]
TRAINED, BUNDLED = "kvp, trained on these kinds of task", "kvp, not trained on them"
KEYDIFF, SHARED = "KeyDiff", "+global, unprotected"
Source = tuple[str, str, str]
"""File, method and setting."""
PANELS: dict[str, dict[str, list[Source]]] = {
    "Every head keeps equally many tokens (vLLM, llama.cpp)": {
        TRAINED: [("equal-counts", "kvp/tasks", "protected")],
        BUNDLED: [("equal-counts", "kvp/general", "protected")],
        KEYDIFF: [("equal-counts", "keydiff", "protected")],
        "first and last tokens (StreamingLLM)": [("ruler", "streaming_llm", "unprotected")],
    },
    "Every head keeps its share of one budget (transformers)": {
        TRAINED: [("trained", "kvp", SHARED)],
        BUNDLED: [("ruler", "kvp", SHARED)],
        "ContrastKV, reads the context twice": [("ruler", "contrastkv", f"beta=0, {SHARED}")],
        "KVzip, reads the context twice": [("ruler", "kvzip", SHARED)],
        "KVzip as published, without a safeguard per head": [
            ("published", "kvzip", "+global:kvzip, unprotected")
        ],
        "KVzap, trained here": [("trained", "kvzap", SHARED)],
        KEYDIFF: [("ruler", "keydiff", SHARED)],
        "SnapKV, the better of two settings": [
            ("ruler", "snapkv", "window=64,kernel=31, +ada, unprotected"),
            ("snapkv-global", "snapkv", f"kernel=31, {SHARED}"),
        ],
    },
}
"""Lines of each panel, which are the rows of README's table; of several sources the best."""
STYLES = dict(
    zip(
        dict.fromkeys(label for lines in PANELS.values() for label in lines),
        [("#8C2D04", "s-", 2.4), ("#D55E00", "o-", 2.4), ("#0072B2", "P-", 1.2),
         ("#777777", "*-", 1.2), ("#882255", "D--", 1.2), ("#332288", "v--", 1.2),
         ("#332288", "1:", 1.2), ("#44AA99", "^-", 1.2), ("#999933", "X-", 1.2)],
        strict=True,
    )
)  # fmt: skip
"""Colour, marker with line, and width."""


def read_line(sources: list[Source]) -> pd.DataFrame:
    """Right answers in % by budget, with their interval: estimate, low, high."""
    found = []
    for file, method, setting in sources:
        rows = pd.read_csv(NUMBERS / f"{file}.csv").query("task == 'all'")
        found.append(rows[(rows["method"] == method) & (rows["setting"] == setting)])
    best = pd.concat(found).sort_values("estimate").drop_duplicates("budget", keep="last")
    best = best.set_index("budget")[["estimate", "low", "high"]] * 100
    return best.loc[[budget for budget in BUDGETS if budget in best.index]]


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    ruler = pd.read_csv(NUMBERS / "ruler.csv").query("task == 'all'")
    full = 100 * ruler[ruler["method"] == "full"]["estimate"].item()
    drawn = {}
    for panel, (title, lines) in zip(
        figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True
    ):
        for place, (label, sources) in enumerate(lines.items()):
            rows = read_line(sources)
            color, marks, width = STYLES[label]
            drawn[label] = panel.errorbar(
                [2 ** BUDGETS.index(b) * 1.02 ** (place - len(lines) / 2) for b in rows.index],
                rows["estimate"],
                [rows["estimate"] - rows["low"], rows["high"] - rows["estimate"]],
                fmt=marks,
                color=color,
                linewidth=width,
                elinewidth=0.8,
                capsize=2,
                markersize=5,
            )
        drawn["full cache"] = panel.axhline(full, color="#777777", linestyle=":")
        panel.set(xscale="log", ylim=(0, 100), xlabel="share of the cache that is kept")
        panel.set_title(title, fontsize=10)
        panel.set_xticks([1, 2, 4, 8], BUDGETS)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(color="#e4e4e4")
        panel.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("right answers, %")
    figure.legend(
        list(drawn.values()), list(drawn), loc="outside lower center", ncols=3, frameon=False,
        fontsize=9,
    )  # fmt: skip
    figure.savefig(OUT, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
