from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from eval.summary import (
    ONE_SEED,
    SEVERAL_SEEDS,
    curve_budgets,
    enough,
    headlines,
    over_null,
    print_headlines,
)

BUDGETS = ["6%", "9%", "12.5%", "19%", "25%", "37.5%", "50%"]


def _record(method: str, budget: str | None, example: str, **fields: Any) -> dict[str, Any]:
    return {
        "method": method, "variant": "auto", "allocator": "uniform",
        "protected": False, "policy": None,
        "protocol": "query_aware", "task": "niah_single_1", "budget_spec": budget,
        "example": example, "score": None, "nll": None, "reply_tokens": None, **fields,
    }  # fmt: skip


def test_seeds_of_a_policy_form_one_line_and_protection_makes_two() -> None:
    records = [
        _record("kvp", "6%", "a", policy="seed0", policy_seed=0, score=1.0),
        _record("kvp", "6%", "a", policy="seed1", policy_seed=1, score=0.0),
        _record("kvp", "6%", "a", policy="seed0", policy_seed=0, protected=True, score=1.0),
        _record("full", None, "a", score=1.0),
        _record("full", None, "b", nll=3.0, reply_tokens=3),
    ]
    lines = {line.label: line.cells for line in headlines(records, resamples=10).scores}
    assert list(lines) == ["kvp", "kvp +p", "full"]
    assert lines["kvp"]["6%"].mean == 0.5
    assert lines["full"]["full"].prompts == 1
    (loss,) = headlines(records, resamples=10).losses
    assert round(loss.cells["full"].mean, 4) == 2.7183


def test_the_table_says_what_its_intervals_are_over() -> None:
    def text(records: list[dict[str, Any]]) -> str:
        stream = io.StringIO()
        print_headlines(Console(file=stream, width=100), headlines(records, resamples=10))
        return stream.getvalue()

    one = _record("kvp", "6%", "a", policy="seed0", policy_seed=0, score=1.0)
    two = {**one, "policy": "seed1", "policy_seed": 1, "score": 0.0}
    full = _record("full", None, "b", nll=3.0, reply_tokens=3)
    assert ONE_SEED in text([one])
    assert SEVERAL_SEEDS not in text([one])
    assert SEVERAL_SEEDS in text([one, two])
    assert "kvp" not in text([full])
    assert "2.72\n" in text([full])  # and no interval of a single text


def test_allocators_have_their_lines_and_chosen_sizes_their_column() -> None:
    size = {"kept_tokens": 18.4, "cached_tokens": 100, "score": 1.0}
    records = [
        _record("snapkv", "6%", "a", score=1.0),
        _record("snapkv", "6%", "a", score=0.0, allocator="ada(safeguard=0.5)"),
        _record("gvote", "own", "a", allocator="own", **size),
        _record("full", None, "a", score=1.0),
    ]
    lines = {line.label: line for line in headlines(records, resamples=10).scores}
    assert list(lines) == ["snapkv", "snapkv+ada(safeguard=0.5)", "gvote+own", "full"]
    assert lines["gvote+own"].self_sized_share == 0.184
    stream = io.StringIO()
    print_headlines(Console(file=stream, width=100), headlines(records, resamples=10))
    header = next(line for line in stream.getvalue().splitlines() if line.startswith("method"))
    assert header.split() == ["method", "6%", "own", "full"]
    # one prompt, answered: Beta(1.5, 0.5), stretched, from 0.04 or so to 1
    assert "100 ±48 @18%" in stream.getvalue()


def test_table_fits_a_hundred_columns() -> None:
    records = [
        _record("snapkv", budget, str(number), variant="kvpress", protected=True, score=number / 9)
        for budget in BUDGETS
        for number in range(10)
    ] + [_record("full", None, "0", score=1.0)]
    stream = io.StringIO()
    print_headlines(Console(file=stream, width=100), headlines(records, resamples=100))
    lines = stream.getvalue().splitlines()
    table = next(line for line in lines if line.startswith("snapkv:kvpress +p"))
    assert table.count("50 ±") == 7  # every budget is there, uncut
    assert "…" not in stream.getvalue()
    assert max(map(len, lines)) <= 100


def test_means_that_do_not_beat_the_best_null_of_their_protection_are_marked() -> None:
    rows = [
        _record(method, "25%", str(number), protected=protected, score=score)
        for method, protected, score in (
            ("ring", False, 0.2), ("random", False, 0.4), ("random", True, 0.9),
            ("keydiff", False, 0.6), ("snapkv", False, 0.4), ("keydiff", True, 0.6),
        )
        for number in range(60)
    ] + [_record("full", None, "0", score=1.0)]  # fmt: skip
    lines = {line.label: line for line in headlines(rows, resamples=200).scores}
    assert [label for label, line in lines.items() if line.over_null] == [
        "keydiff", "keydiff +p", "snapkv",
    ]  # fmt: skip
    stream = io.StringIO()
    print_headlines(Console(file=stream, width=100), headlines(rows, resamples=200))
    text = stream.getvalue()
    marked = [line.split()[:2] for line in text.splitlines() if "°" in line]
    assert marked == [["keydiff", "+p"], ["snapkv", "40"], ["°:", "not"]]
    assert "the best null (ring, random) with the same protection" in " ".join(text.split())


def test_differences_to_a_null_are_paired_and_need_a_shared_prompt() -> None:
    null = {("a", str(number)): number / 99 for number in range(100)}
    mine = {unit: value + 0.1 for unit, value in null.items()}
    gap = over_null({None: mine}, {None: null}, bounds=(-1, 1), resamples=500, seed=0)
    assert gap is not None
    assert 0.07 < gap.low < 0.1 < gap.high < 0.13
    other = {None: {("b", "0"): 1.0}}
    assert over_null(other, {None: null}, bounds=None, resamples=5, seed=0) is None


def test_the_best_null_is_that_of_the_highest_mean_over_tasks() -> None:
    rows = [
        _record(method, "25%", str(number), task=task, score=score)
        for method, scores in (("ring", (0.4, 0.4)), ("random", (0.3, 0.9)), ("keydiff", (1, 1)))
        for task, score, count in (("a", scores[0], 9), ("b", scores[1], 1))
        for number in range(count)
    ]
    lines = {line.label: line for line in headlines(rows, resamples=10).scores}
    gap = lines["keydiff"].over_null["25%"]
    assert gap is not None
    assert gap.mean == pytest.approx(0.4)  # random: 0.6; by prompts ring would be the best


def test_perplexities_are_compared_by_likelihood_per_token() -> None:
    rows = [
        _record(method, "25%", str(number), nll=nll * (number + 1), reply_tokens=number + 1)
        for method, nll in (("ring", 3.0), ("keydiff", 2.0), ("snapkv", 4.0))
        for number in range(4)
    ]
    lines = {line.label: line for line in headlines(rows, resamples=10).losses}
    for label, nats in (("keydiff", 1.0), ("snapkv", -1.0)):
        gap = lines[label].over_null["25%"]
        assert gap is not None
        assert (gap.mean, gap.low, gap.high) == pytest.approx((nats, nats, nats))
    stream = io.StringIO()
    print_headlines(Console(file=stream, width=100), headlines(rows, resamples=10))
    marked = [line.split()[0] for line in stream.getvalue().splitlines() if "°" in line]
    assert marked == ["snapkv", "°:"]


def test_what_beats_a_null_is_corrected_for_the_size_of_the_table() -> None:
    # 34 prompts against 16: p is near 0.01, so that it survives alone and not among ten
    rows = [_record("ring", "25%", str(n), score=float(n % 60 < 22)) for n in range(60)]
    rows += [_record("knorm", "25%", str(n), score=float(16 <= n < 56)) for n in range(60)]
    alone = io.StringIO()
    print_headlines(Console(file=alone, width=100), headlines(rows, resamples=500))
    assert "°" not in alone.getvalue().splitlines()[3]
    rows += [
        _record("keydiff", "25%", str(n), variant=f"p{k}", score=float((n + k) % 60 < 22))
        for n in range(60) for k in range(9)
    ]  # fmt: skip
    among = io.StringIO()
    print_headlines(Console(file=among, width=100), headlines(rows, resamples=500))
    (line,) = (line for line in among.getvalue().splitlines() if line.startswith("knorm"))
    assert "°" in line


def test_enough_is_the_smallest_budget_from_which_on_all_suffice() -> None:
    assert curve_budgets(["50%", "full", "6%", "own", "12.5%", "8"]) == ("6%", "12.5%", "50%")
    means = {"6%": 0.97, "12.5%": 0.9, "25%": 0.96, "50%": 1.0}
    assert enough(means, full=1.0) == "25%"
    assert enough(means, full=0.9) == "6%"
    assert enough(means, full=2.0) is None
    assert enough({"6%": 0.0}, full=0.0) is None
