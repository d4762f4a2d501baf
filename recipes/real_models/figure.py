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
PANELS = {
    "Every head keeps as many tokens (vLLM, llama.cpp)": {
        TRAINED: ("equal-counts", "kvp/tasks", "protected"),
        BUNDLED: ("equal-counts", "kvp/general", "protected"),
        "KeyDiff": ("equal-counts", "keydiff", "protected"),
    },
    "Heads share the budget (transformers)": {
        TRAINED: ("trained", "kvp", "+global, unprotected"),
        BUNDLED: ("ruler", "kvp", "+global, unprotected"),
        "ContrastKV, reads twice": ("ruler", "contrastkv", "beta=0, +global, unprotected"),
        "KVzip, reads twice": ("ruler", "kvzip", "+global, unprotected"),
        "KVzap": ("trained", "kvzap", "+global, unprotected"),
        "KeyDiff": ("ruler", "keydiff", "+global, unprotected"),
        "SnapKV, kernel 31": ("snapkv-global", "snapkv", "kernel=31, +global, unprotected"),
    },
}
"""Lines of each panel: file, method and setting."""
STYLES = {
    TRAINED: ("#8C2D04", "s-", 2.4),
    BUNDLED: ("#D55E00", "o-", 2.4),
    "ContrastKV, reads twice": ("#882255", "D--", 1.2),
    "KVzip, reads twice": ("#332288", "v--", 1.2),
    "KVzap": ("#44AA99", "^-", 1.2),
    "KeyDiff": ("#0072B2", "P-", 1.2),
    "SnapKV, kernel 31": ("#999933", "X-", 1.2),
}


def main() -> None:
    """Draw the figure."""
    figure = Figure(figsize=(9.6, 4.3), layout="constrained")
    for number, (panel, (title, lines)) in enumerate(
        zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True)
    ):
        for place, (label, (file, method, setting)) in enumerate(lines.items()):
            rows = pd.read_csv(NUMBERS / f"{file}.csv").query("task == 'all'")
            full = 100 * rows[rows["method"] == "full"]["estimate"].item()
            rows = rows[(rows["method"] == method) & (rows["setting"] == setting)]
            rows = 100 * rows.set_index("budget").loc[BUDGETS, ["estimate", "low", "high"]]
            color, marks, width = STYLES[label]
            panel.errorbar(
                [2**power * 1.02 ** (place - len(lines) / 2) for power in range(len(BUDGETS))],
                rows["estimate"],
                [rows["estimate"] - rows["low"], rows["high"] - rows["estimate"]],
                fmt=marks,
                color=color,
                linewidth=width,
                elinewidth=0.8,
                capsize=2,
                markersize=5,
                label=label if number else None,
            )
        panel.axhline(full, color="#777777", linestyle=":", label="full cache" if number else None)
        panel.set(xscale="log", ylim=(0, 100), xlabel="share of the cache that is kept")
        panel.set_title(title, fontsize=10)
        panel.set_xticks([1, 2, 4, 8], BUDGETS)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.grid(color="#e4e4e4")
        panel.spines[["top", "right"]].set_visible(False)
        if not number:
            panel.set_ylabel("right answers, %")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(OUT, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
