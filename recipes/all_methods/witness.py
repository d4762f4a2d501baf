"""Does the bundled model rank methods as real models do? The blocks of docs/results/nano.md.

`published.csv` holds what others published for RULER at 4,096 tokens with the question not seen, a
source per line. `kvp-eval` measures the same methods in the same settings (`WITNESSES` in
settings.sh), which nothing was tuned for. Spearman's coefficient is over the methods of an anchor
that kvp has; for its interval prompts are drawn again within tasks, the same ones for all methods.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from eval.report.tables import Field, Table, markdown
from eval.results.load import load_results
from eval.results.records import FULL, Record, method_label
from eval.stats import Interval, Unit, bootstrap_mean

RESAMPLES = 5000
LEAST_PROMPTS = 300
EXPLAINED = "50%"
"""Budget at which kept needles are compared with answers."""
WHOLE = 0.99
"""A head keeps the needles whole from this share of their tokens on."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """Published numbers of one table: one model, one share of the cache."""

    name: str
    model: str
    kept: str
    """Budget, as in records."""
    lines: tuple[Mapping[str, str], ...]


def anchors(path: Path) -> list[Anchor]:
    """The tables of published.csv, in its order."""
    with path.open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    return [
        Anchor(name=name, model=model, kept=kept,
               lines=tuple(line for line in lines if line["anchor"] == name))
        for name, model, kept in dict.fromkeys(
            (line["anchor"], line["model"], line["kept"]) for line in lines)
    ]  # fmt: skip


def scores(records: Sequence[Record], kept: str | None) -> dict[str, dict[Unit, float]]:
    """Score of every prompt by method, as --methods writes it, at a budget (None: full cache)."""
    found: dict[str, dict[Unit, float]] = {}
    for record in records:
        if record["budget_spec"] == kept and record["score"] is not None:
            label = method_label(record["method"], record["variant"], record["allocator"])
            found.setdefault(label, {})[record["task"], record["example"]] = record["score"]
    return found


def spearman(ours: Floats, published: Floats) -> Floats:
    """Rank correlation [R] of each row of `ours` [R, M] with `published` [M].

    Equal values share a rank; where all are equal the coefficient is 0.
    """
    ranks = rankdata(ours, axis=-1) - (ours.shape[-1] + 1) / 2
    theirs = rankdata(published) - (len(published) + 1) / 2
    scale = np.sqrt((ranks**2).sum(-1) * (theirs**2).sum())
    return np.divide(ranks @ theirs, scale, out=np.zeros(len(ranks)), where=scale > 0)


def resampled(values: Sequence[Mapping[Unit, float]], resamples: int, seed: int = 0) -> Floats:
    """Means over tasks of every method [R, M], prompts drawn again within their task."""
    units = sorted(set.intersection(*(set(each) for each in values)))
    if not units:
        raise ValueError("the methods share no prompt")
    matrix = np.array([[each[unit] for unit in units] for each in values])  # [M, P]
    generator = np.random.default_rng(seed)
    tasks = sorted({task for task, _ in units})
    means = np.zeros((resamples, len(values)))
    for task in tasks:
        columns = np.array([index for index, unit in enumerate(units) if unit[0] == task])
        drawn = generator.multinomial(
            len(columns), np.full(len(columns), 1 / len(columns)), resamples
        )
        means += drawn @ matrix[:, columns].T / len(columns) / len(tasks)
    return means


def table(anchor: Anchor, records: Sequence[Record]) -> tuple[Table, str]:
    """Method by method, and the coefficient in words."""
    measured = scores(records, anchor.kept)
    both = [line for line in anchor.lines if line["ours"] in measured]
    if len(both) < 3:
        raise ValueError(f"{anchor.name}: fewer than three of its methods were measured")
    values = [measured[line["ours"]] for line in both]
    published = np.array([float(line["score"]) for line in both])
    intervals = [bootstrap_mean({None: each}) for each in values]
    means = np.array([[interval.mean for interval in intervals]])
    rank = {
        line["method"]: (theirs, ours, interval)
        for line, theirs, ours, interval in zip(
            both, rankdata(-published), rankdata(-means[0]), intervals, strict=True)
    }  # fmt: skip
    rows: list[Sequence[Field | str]] = []
    for line in sorted(anchor.lines, key=lambda each: -float(each["score"])):
        source = line["source"]
        cited = f"[{source.rpartition('/')[2]}]({source})" if source.startswith("http") else source
        rows.append([line["method"], *_ranked(rank.get(line["method"])), line["score"], cited])
    drawn = spearman(resampled(values, RESAMPLES), published)
    low, high = np.quantile(drawn, [0.025, 0.975])
    centre = float(spearman(means, published)[0])
    words = (
        f"**{anchor.name} of the cache, {anchor.model}: Spearman's coefficient {centre:.2f}** "
        f"({low:.2f} to {high:.2f}, 95 % over {intervals[0].prompts} prompts; {len(both)} methods)."
    )
    header = ("method", "nano, %", "rank", "published rank", "published", "source")
    return Table(caption=f"{anchor.name} of the cache kept", header=header, rows=rows), words


def kept_evidence(records: Sequence[Record], kept: str) -> dict[str, Floats]:
    """Mean share of the evidence's tokens that each head keeps [L, H], by method, at a budget."""
    found: dict[str, list[Floats]] = {}
    for record in records:
        if record["budget_spec"] == kept and record.get("evidence_tokens"):
            label = method_label(record["method"], record["variant"], record["allocator"])
            share = np.array(record["evidence_kept"]) / record["evidence_tokens"]
            found.setdefault(label, []).append(share)
    return {label: np.mean(shares, axis=0) for label, shares in found.items()}


def evidence(records: Sequence[Record]) -> str:
    """Needle tokens that methods keep in the heads where the best method keeps all of them."""
    shares = kept_evidence(records, EXPLAINED)
    answered = scores(records, EXPLAINED)
    means = {label: 100 * float(np.mean([*answered[label].values()])) for label in shares}
    ranked = sorted(shares, key=lambda label: -means[label])
    heads = np.argwhere(shares[ranked[0]] >= WHOLE) if ranked else np.empty((0, 2), dtype=int)
    if not len(heads):
        return f"No method keeps the needles whole in any head at {EXPLAINED} of the cache."
    layers, columns = heads.T
    inside = [shares[label][layers, columns].mean() for label in ranked]
    rows: list[Sequence[Field | str]] = [
        [
            f"`{label}`",
            f"{means[label]:.1f}",
            f"{100 * shares[label].mean():.0f}",
            f"{100 * held:.0f}",
        ]
        for label, held in zip(ranked, inside, strict=True)
    ]
    names = ", ".join(f"{layer}.{head}" for layer, head in heads)
    one = len(heads) == 1
    header = (
        "method",
        "answers, %",
        "needle tokens kept, %",
        f"in head{'' if one else 's'} {names}, %",
    )
    caption = (
        f"{EXPLAINED} of the cache kept; layer.head, counted from 0: where {ranked[0]} keeps "
        f"{100 * WHOLE:.0f} % or more of the needles' tokens"
    )
    centre = float(spearman(np.array([inside]), np.array([means[label] for label in ranked]))[0])
    words = f"Spearman's coefficient of answers and the last column: {centre:.2f}."
    return markdown(Table(caption=caption, header=header, rows=rows)) + "\n" + words


def _ranked(found: tuple[float, float, Interval] | None) -> list[Field | str]:
    if found is None:
        return ["not in kvp", "–", "–"]
    theirs, ours, interval = found
    small = f"{100 * interval.low:.1f} to {100 * interval.high:.1f}"
    return [Field(text=f"{100 * interval.mean:.1f}", small=small), f"{ours:g}", f"{theirs:g}"]


def blocks(results: Path, recipe: Path) -> dict[str, str | None]:
    """Contents of the blocks of nano.md; None where nothing was measured."""
    if not results.exists():
        return dict.fromkeys(("coefficients", "methods", "evidence"))
    loaded = load_results(results)
    full = scores(loaded.records, None)[FULL]
    found = [table(anchor, loaded.records) for anchor in anchors(recipe / "published.csv")]
    trial = "" if len(full) >= LEAST_PROMPTS else "**A trial on few prompts.**\n\n"
    whole = bootstrap_mean({None: full})
    setting: Any = loaded.setting
    about = (
        f"{setting('model')}, {len({task for task, _ in full})} RULER tasks, {whole.prompts} "
        f"prompts of at most {setting('length')} tokens, question not seen; full cache "
        f"{100 * whole.mean:.1f} %."
    )
    return {
        "coefficients": trial + "\n".join([about, "", *(f"- {words}" for _, words in found)]),
        "methods": "\n".join(markdown(each) for each, _ in found),
        "evidence": evidence(loaded.records),
    }
