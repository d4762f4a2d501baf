"""Tables and figure of docs/results/smollm2.md, from the CSV files in benchmarks/results/smollm2.

    python recipes/real_models/pages.py

overall.csv has a line per results folder of evidence.sh, protocol, method and budget. It and the
files of each folder were written at commit 61d6f1d3; `kvp.read_results(RUN/NAME).summary()` has
the same numbers of a folder in other columns.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from eval.results.record_names import QUERY_AGNOSTIC, QUERY_AWARE
from kvp.names import FULL

PAGE = Path("docs/results/smollm2.md")
NUMBERS = Path("benchmarks/results/smollm2")
OVERALL, COSTS = NUMBERS / "overall.csv", NUMBERS / "costs.csv"
OURS = "kvp+ada"
RECENCY = "streaming_llm"
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


def main() -> None:
    """Put the tables into the page, and draw the figure beside it."""
    fill("kept", "\n".join(kept()))
    fill("texts", "\n".join(texts()))
    draw(PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
