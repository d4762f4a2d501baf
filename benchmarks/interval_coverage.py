"""How often the intervals of eval.stats hold the true value, simulated; writes a CSV file.

    python -m benchmarks.interval_coverage --out benchmarks/results/interval_coverage.csv

Answers are right or wrong. A prompt is easy or hard for every seed alike (half of the variance of a
normal variable behind it), the share of right answers of a seed is drawn from a beta distribution
with the mean and standard deviation of the row. `before` is the interval that was used before
docs/decisions.md#intervals: percentiles of prompts drawn with replacement, policy seeds averaged.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from eval.stats import Interval, Scores, bootstrap_mean, holm, paired_difference, perplexity

Floats = NDArray[np.float64]

SHARED = 0.5
"""Part of the variance behind an answer that the prompt decides, the same for all seeds."""
SHARES = {
    0.0: (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98),
    0.02: (0.02, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.98),
    0.1: (0.2, 0.3, 0.5, 0.7, 0.8),
}
"""Standard deviation between seeds -> shares of right answers that it goes with."""
DESIGNS = ((1, 20), (6, 20))
"""Tasks and prompts per task."""
PAIRS = ((0.02, 0.02), (0.1, 0.2), (0.5, 0.5), (0.5, 0.6), (0.9, 0.8), (0.98, 0.98))
"""Shares of right answers of a policy and of the method without training it is compared with."""
TEXTS = (8, 20, 50)
COMPARISONS = 20
"""Differences in the tables whose false marks are counted."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the file but its results."""

    what: str
    """`mean`, `difference`, `perplexity` or `table`."""
    tasks: int
    prompts: int
    """Prompts per task."""
    seeds: int
    """Policies; 1 stands for a method without, too."""
    seed_sd: float
    """Standard deviation of their shares of right answers, 0 to 1."""
    share: float
    """Mean share of right answers, 0 to 1."""
    other: float | None = None
    """The same of the method that a difference is to."""


def cases() -> Iterator[Case]:
    """Every row."""
    for tasks, prompts in DESIGNS:
        for seeds, sd in ((1, 0.0), (2, 0.02), (2, 0.1), (3, 0.02), (3, 0.1), (5, 0.02), (5, 0.1)):
            size: dict[str, Any] = {
                "tasks": tasks, "prompts": prompts, "seeds": seeds, "seed_sd": sd,
            }  # fmt: skip
            for share in SHARES[sd]:
                yield Case(what="mean", **size, share=share)
            for share, other in PAIRS:
                if share in SHARES[sd]:
                    yield Case(what="difference", **size, share=share, other=other)
    for texts in TEXTS:
        yield Case(what="perplexity", tasks=1, prompts=texts, seeds=1, seed_sd=0, share=0)
    for seeds, sd in ((1, 0.0), (3, 0.02), (5, 0.02)):
        yield Case(what="table", tasks=6, prompts=20, seeds=seeds, seed_sd=sd, share=0.5, other=0.5)


def slowness(case: Case) -> int:
    """Divisor of the number of data sets, so that no case takes much longer than the others."""
    if case.what == "table":
        return 20
    return 2 if case.tasks > 1 else 1


def answers(case: Case, rows: int, generator: np.random.Generator) -> Floats:
    """Answers [rows, seeds + 1, tasks * prompts], 0 or 1; the last row is the other method's."""
    shares = np.full((rows, case.seeds + 1), case.share)
    if case.seed_sd:
        total = case.share * (1 - case.share) / case.seed_sd**2 - 1
        shape = (rows, case.seeds)
        shares[:, :-1] = generator.beta(case.share * total, (1 - case.share) * total, shape)
    if case.other is not None:
        shares[:, -1] = case.other
    count = case.tasks * case.prompts
    easy = generator.standard_normal((rows, 1, count))
    own = generator.standard_normal((rows, case.seeds + 1, count))
    ability = np.sqrt(SHARED) * easy + np.sqrt(1 - SHARED) * own
    return (ability < special.ndtri(shares)[:, :, None]).astype(float)


def scores_of(case: Case, values: Floats) -> Scores:
    """Answers [seeds, prompts] as `eval.stats` takes them."""
    units = [(str(n // case.prompts), str(n)) for n in range(case.tasks * case.prompts)]
    return {
        str(seed): dict(zip(units, row.tolist(), strict=True)) for seed, row in enumerate(values)
    }


def percentile_interval(
    values: Floats, tasks: int, resamples: int, generator: np.random.Generator
) -> tuple[float, float]:
    """Interval of values [prompts], drawn with replacement within their tasks."""
    strata = values.reshape(tasks, -1)
    size = strata.shape[1]
    draws = np.mean(
        [row[generator.integers(size, size=(resamples, size))].mean(1) for row in strata], 0
    )
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def simulate(case: Case, *, rows: int, resamples: int, seed: int = 0) -> dict[str, float]:
    """Coverage and half-width before and now; of tables, the share with a false mark."""
    generator = np.random.default_rng(seed)
    if case.what == "table":
        return _tables(case, rows, resamples, generator)
    if case.what == "perplexity":
        return _perplexities(case, rows, resamples, generator)
    truth = case.share - (case.other or 0)
    found = []
    for number, values in enumerate(answers(case, rows, generator)):
        before, now = _both(case, values, resamples, number, generator)
        found.append((*before, now.low, now.high))
    return _summary(np.array(found), truth)


def _both(
    case: Case, values: Floats, resamples: int, number: int, generator: np.random.Generator
) -> tuple[tuple[float, float], Interval]:
    ours, theirs = values[:-1], values[-1:]
    mean = ours.mean(0)
    if case.other is None:
        now = bootstrap_mean(scores_of(case, ours), resamples=resamples, seed=number)
    else:
        mean = mean - theirs[0]
        now = paired_difference(
            scores_of(case, ours), {None: scores_of(case, theirs)["0"]},
            resamples=resamples, seed=number,
        )  # fmt: skip
    return percentile_interval(mean, case.tasks, resamples, generator), now


def _tables(
    case: Case, rows: int, resamples: int, generator: np.random.Generator
) -> dict[str, float]:
    marked, before = 0, 0
    for number in range(rows):
        drawn = answers(case, COMPARISONS, generator)
        both = [_both(case, values, resamples, number, generator) for values in drawn]
        before += any(low > 0 or high < 0 for (low, high), _ in both)
        marked += any(holm([now for _, now in both]))
    return {"before": before / rows, "now": marked / rows}


def _perplexities(
    case: Case, rows: int, resamples: int, generator: np.random.Generator
) -> dict[str, float]:
    """Texts of some 60 tokens whose nats per token differ by a third."""
    mean, spread = 2.2, 0.35
    found = []
    for number in range(rows):
        tokens = np.ceil(np.exp(4 + 0.5 * generator.standard_normal(case.prompts)))
        rate = np.exp(spread * generator.standard_normal(case.prompts) - spread**2 / 2)
        nll = mean * rate * tokens
        records: list[Mapping[str, Any]] = [
            {"policy": None, "task": "text", "example": str(n), "nll": a, "reply_tokens": b}
            for n, (a, b) in enumerate(zip(nll, tokens, strict=True))
        ]
        now = perplexity(records, resamples=resamples, seed=number)
        chosen = generator.integers(len(nll), size=(resamples, len(nll)))
        draws = nll[chosen].sum(1) / tokens[chosen].sum(1)
        low, high = np.quantile(draws, [0.025, 0.975])
        found.append((low, high, np.log(now.low), np.log(now.high)))
    return _summary(np.array(found), mean)


def _summary(found: Floats, truth: float) -> dict[str, float]:
    """From the ends [rows, (before, before, now, now)] of intervals."""
    near = 1e-9  # ends that are the truth but for rounding
    holds = (found[:, ::2] <= truth + near) & (found[:, 1::2] >= truth - near)
    half = (found[:, 1::2] - found[:, ::2]).mean(0) / 2
    before, now = holds.mean(0)
    return {"before": before, "now": now, "half_before": half[0], "half_now": half[1]}


def main() -> None:
    """Simulate every case and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--rows", type=int, default=2000, help="data sets per case; of large ones a part"
    )
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--only", help="cases of this name alone, such as mean-6x20")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    columns = [*Case.__dataclass_fields__, "rows", "before", "now", "half_before", "half_now"]
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for case in cases():
            if args.only not in (None, f"{case.what}-{case.tasks}x{case.prompts}"):
                continue
            rows = max(1, args.rows // slowness(case))
            results = simulate(case, rows=rows, resamples=args.resamples)
            rounded = {name: f"{value:.4f}" for name, value in results.items()}
            writer.writerow({**asdict(case), "rows": rows, **rounded})
            file.flush()


if __name__ == "__main__":
    main()
