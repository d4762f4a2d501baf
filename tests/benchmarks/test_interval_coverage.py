"""A sample of the simulation of coverage, large enough to tell the intervals from those before."""

from __future__ import annotations

import csv
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from benchmarks.interval_coverage import Case, answers, main, simulate


@pytest.mark.parametrize(
    ("case", "before"),
    [
        (Case(what="mean", tasks=1, prompts=20, seeds=1, seed_sd=0.0, share=0.02), 0.5),
        (Case(what="mean", tasks=1, prompts=20, seeds=1, seed_sd=0.0, share=0.98), 0.5),
        (Case(what="mean", tasks=1, prompts=20, seeds=3, seed_sd=0.1, share=0.5), 0.94),
        (Case(what="mean", tasks=6, prompts=20, seeds=3, seed_sd=0.1, share=0.5), 0.8),
        (
            Case(
                what="difference", tasks=6, prompts=20, seeds=3, seed_sd=0.1, share=0.5, other=0.5
            ),
            0.9,
        ),
    ],
    ids=lambda value: f"{value.what}-{value.tasks}x{value.prompts}-{value.share}"
    if isinstance(value, Case) else "",
)  # fmt: skip
def test_coverage_is_nominal_where_it_was_not(case: Case, before: float) -> None:
    results = simulate(case, rows=200, resamples=300)
    assert results["before"] < before
    assert results["now"] >= 0.93


def test_simulated_answers_have_the_means_and_spreads_of_their_case() -> None:
    case = Case(what="difference", tasks=1, prompts=400, seeds=3, seed_sd=0.1, share=0.3, other=0.6)
    drawn = answers(case, 400, np.random.default_rng(0))
    policies, other = drawn[:, :-1].mean(2), drawn[:, -1].mean(1)
    assert policies.mean() == pytest.approx(0.3, abs=0.01)
    assert policies.std() == pytest.approx((0.1**2 + 0.3 * 0.7 / 400) ** 0.5, abs=0.01)
    assert other.mean() == pytest.approx(0.6, abs=0.01)


def test_the_file_has_a_line_per_case(tmp_path: Path) -> None:
    out = tmp_path / "coverage.csv"
    flags = ["--only", "perplexity-1x8", "--rows", "20", "--resamples", "100", "--out", str(out)]
    with patch("sys.argv", ["interval_coverage", *flags]):
        main()
    (line,) = csv.DictReader(out.read_text().splitlines())
    assert (line["what"], line["prompts"], line["rows"]) == ("perplexity", "8", "20")
    assert 0 < float(line["now"]) <= 1
    assert float(line["half_now"]) > float(line["half_before"]) > 0
