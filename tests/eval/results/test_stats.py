"""Intervals against closed forms and numbers made by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from eval.results.stats import (
    Interval,
    bootstrap_mean,
    holm,
    median_interval,
    paired_difference,
    perplexity,
    prompt_values,
    prompts_to_resolve,
    reply_tokens,
)

MANY = 20_000


@pytest.fixture
def many(monkeypatch):
    """Draw so many times that quantiles are those of the distribution."""
    monkeypatch.setattr("eval.results.stats.RESAMPLES", MANY)


def _row(task, example, policy=None, **fields):
    return {
        "task": task, "example": example, "policy": policy, "score": None, "nll": None, **fields,
    }  # fmt: skip


def _scores(values, task="a", policy=None):
    return {policy: {(task, f"{number:03}"): value for number, value in enumerate(values)}}


def test_prompts_have_a_value_per_policy_and_policies_are_averaged():
    rows = [
        _row("a", "1", "s0", score=0.5), _row("a", "1", "s1", score=0.0),
        _row("a", "2", "s0", score=1.0), _row("a", "2", "s1", score=1.0),
    ]  # fmt: skip
    scores = prompt_values(rows)
    assert scores == {
        "s0": {("a", "1"): 0.5, ("a", "2"): 1.0}, "s1": {("a", "1"): 0.0, ("a", "2"): 1.0},
    }  # fmt: skip
    found = bootstrap_mean(scores)
    assert (found.mean, found.prompts) == (0.625, 2)
    assert prompt_values([_row("a", "2", nll=6.0, reply_tokens=3)]) == {None: {("a", "2"): -2.0}}


def test_tasks_weigh_the_same_and_so_do_questions():
    values = {("a", "1"): 1.0, ("b", "1"): 0.0, ("b", "2"): 0.0, ("b", "3"): 0.0}
    assert bootstrap_mean({None: values}).mean == 0.5
    questions = {("t", "a@00000001"): 1.0, ("t", "b@00000001"): 1.0, ("t", "c@00000002"): 0.0}
    assert bootstrap_mean({None: questions}).mean == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no prompts"):
        bootstrap_mean({})


@pytest.mark.parametrize(("right", "prompts"), [(0, 20), (1, 20), (20, 20), (30, 100)])
def test_the_interval_of_one_task_is_that_of_jeffreys_stretched(many, right, prompts):
    # weights of x ones, n - x zeros and half a prompt at each end: Beta(x + 1/2, n - x + 1/2),
    # stretched about its mean by sqrt((n + 1) / (n - 1))
    centre = (right + 0.5) / (prompts + 1)
    stretch = math.sqrt((prompts + 1) / (prompts - 1))
    ends = stats.beta.ppf([0.025, 0.975], right + 0.5, prompts - right + 0.5)
    low, high = centre + stretch * (ends - centre)
    found = bootstrap_mean(_scores([1.0] * right + [0.0] * (prompts - right)))
    assert found.mean == right / prompts
    assert found.low == pytest.approx(max(0.0, min(low, found.mean)), abs=4e-3)
    assert found.high == pytest.approx(min(1.0, max(high, found.mean)), abs=4e-3)


def test_one_prompt_is_added_for_all_tasks_mostly_where_prompts_are_few(many):
    # six tasks of 20 wrong answers: about as wide as 120 of one task, not as six times 20
    six = {(str(k), str(n)): 0.0 for k in range(6) for n in range(20)}
    assert bootstrap_mean({None: six}).high < 0.025
    # two tasks; of the one added prompt the task of 2 prompts gets 25/26, that of 50 the rest:
    # the upper end is half of that of Beta(25/52, 2 + 25/52), stretched by sqrt(3)
    few = {("few", str(n)): 0.0 for n in range(2)} | {("many", str(n)): 0.0 for n in range(50)}
    added = 25 / 52
    centre = added / (2 + 2 * added)
    end = stats.beta.ppf(0.975, added, 2 + added)
    expected = (centre + math.sqrt(3) * (end - centre)) / 2
    assert bootstrap_mean({None: few}).high == pytest.approx(expected, abs=0.01)


def test_without_bounds_the_interval_is_students(many):
    values = np.random.default_rng(3).standard_normal(40)
    found = bootstrap_mean(_scores(values.tolist()), bounds=None)
    half = stats.t.ppf(0.975, 39) * values.std(ddof=1) / math.sqrt(40)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.03)
    single = bootstrap_mean(_scores([0.3]), bounds=None)
    assert (single.low, single.high) == (0.3, 0.3)


def test_the_spread_of_seeds_is_in_the_interval(many):
    # every prompt alike, so prompts add next to nothing: Student's t over the three seeds
    scores = {
        seed: {("a", str(n)): level for n in range(400)}
        for seed, level in (("s0", 0.4), ("s1", 0.5), ("s2", 0.6))
    }
    found = bootstrap_mean(scores)
    half = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(0.5)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.06)
    alone = bootstrap_mean({"s1": scores["s1"]})
    assert alone.high - alone.low < 0.02


def test_the_spread_of_both_sides_seeds_is_in_a_difference(many):
    sides = [
        {f"{name}{level}": {("a", str(n)): level for n in range(400)} for level in levels}
        for name, levels in (("ours", (0.5, 0.6, 0.7)), ("theirs", (0.2, 0.3, 0.4)))
    ]
    found = paired_difference(*sides)
    draws = np.random.default_rng(5).standard_t(2, (2, 200_000)).sum(0) * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(0.3)
    assert (found.high - found.low) / 2 == pytest.approx(np.quantile(draws, 0.975), rel=0.1)


def test_seeds_are_compared_on_the_prompts_that_all_answered():
    both = {("a", str(n)): 0.5 for n in range(100)}
    more = both | {("a", f"more {n}"): 1.0 for n in range(100)}
    found = bootstrap_mean({"s0": both, "s1": more})
    assert found.mean == 0.75
    assert found.high - found.low < 0.15  # of prompts; the seeds agree on the first hundred


def test_pairing_takes_away_what_prompts_have_in_common():
    generator = np.random.default_rng(0)
    hard = generator.random(300)
    theirs = _scores(hard.tolist())
    ours = _scores((hard + 0.125).tolist())
    ours[None]["b", "only ours"] = 9.0
    found = paired_difference(ours, theirs)
    assert (found.prompts, round(found.mean, 9)) == (300, 0.125)
    assert 0.11 < found.low < found.high < 0.14
    assert found.p < 1e-12
    same = paired_difference(theirs, theirs)
    assert same.low < 0 < same.high
    assert same.p > 0.9
    with pytest.raises(ValueError, match="share no prompt"):
        paired_difference({None: {("a", "x"): 1.0}}, theirs)


def test_the_other_order_has_the_same_interval():
    ours, theirs = _scores([1, 0, 0, 1, 0, 0]), _scores([1, 1, 1, 0, 1, 0])
    one, other = paired_difference(ours, theirs), paired_difference(theirs, ours)
    assert one.numbers == (-other.mean, -other.high, -other.low)
    assert one.p == other.p


def test_a_p_value_is_that_of_the_paired_t_test(many):
    values = np.random.default_rng(8).standard_normal(60) + 0.25
    for shift in (0.0, 0.1, 0.7):
        moved = (values + shift).tolist()
        zeros = _scores([0.0] * 60)
        found = paired_difference(_scores(moved), zeros, weights=dict.fromkeys(zeros[None], 1.0))
        assert found.p == pytest.approx(stats.ttest_1samp(moved, 0).pvalue, rel=0.25)
        assert (found.p < 0.05) == (found.low > 0)


def test_a_p_value_with_seeds_is_that_of_their_t_test(many):
    # prompts alike, so that the three means of seeds decide: t = 0.3 / (0.1 / sqrt(3)), 2 degrees
    units = [("a", str(n)) for n in range(400)]
    theirs = {None: dict.fromkeys(units, 0.0)}
    ours = {f"s{n}": dict.fromkeys(units, level) for n, level in enumerate((0.2, 0.3, 0.4))}
    found = paired_difference(ours, theirs)
    expected = 2 * stats.t.sf(0.3 / (0.1 / math.sqrt(3)), 2)
    assert found.p == pytest.approx(expected, rel=0.05)
    assert paired_difference(theirs, ours).p == pytest.approx(expected, rel=0.05)


def test_the_same_policies_are_paired_and_others_are_not():
    units = [("a", str(n)) for n in range(400)]
    levels = {"s0": 0.3, "s1": 0.5, "s2": 0.7}
    ours = {seed: dict.fromkeys(units, level + 0.1) for seed, level in levels.items()}
    theirs = {seed: dict.fromkeys(units, levels[seed]) for seed in ("s2", "s0", "s1")}
    paired = paired_difference(ours, theirs)
    assert paired.low == pytest.approx(0.1, abs=0.01)
    apart = paired_difference(ours, {f"other {seed}": theirs[seed] for seed in theirs})
    assert apart.mean == pytest.approx(0.1)
    assert apart.low < -0.4  # two spreads of 0.2 over three seeds each


def test_perplexity_pools_tokens_of_all_texts():
    rows = [
        _row("chat", "1", nll=2.0, reply_tokens=4),
        _row("chat", "2", nll=6.0, reply_tokens=4),
        _row("chat", "3", reply_tokens=None),
    ]
    found = perplexity(rows)
    assert found.mean == pytest.approx(math.e)  # exp(8 / 8)
    assert found.prompts == 2
    assert found.low == 1.0  # the least perplexity there is
    assert found.high > math.exp(1.5)
    alone = perplexity(rows[:1])
    assert alone.low == alone.high == alone.mean == pytest.approx(math.exp(0.5))
    with pytest.raises(ValueError, match="no replies"):
        perplexity(rows[2:])


def test_holm_stops_at_the_first_p_value_above_its_level():
    def told(*p_values, of=None):
        gaps = {p: Interval(mean=1.0, low=0.1, high=2.0, prompts=10, p=p) for p in p_values}
        return holm(gaps, of)

    # four comparisons: levels 0.0125, 0.0167, 0.025, 0.05 of the sorted p-values
    assert told(0.03, 0.0125, 0.04, 0.016) == {0.0125, 0.016}
    assert told(0.02, 0.0125, 0.024, 0.9) == {0.0125}  # 0.024 is not tried at 0.025
    assert told(0.05) == {0.05}
    assert told() == set()
    assert told(0.017, of=3) == set()  # one of three that were looked at: 0.05 / 3
    assert told(0.016, of=3) == {0.016}
    # what is marked has no 0 in its interval
    assert holm({"x": Interval(mean=1.0, low=-0.1, high=2.0, prompts=10, p=1e-9)}) == set()


def test_the_prompts_that_resolve_a_difference_make_its_interval_as_narrow():
    draws = np.random.default_rng(5).standard_normal(40_000) * 0.5
    zeros = _scores([0.0] * len(draws))
    unbounded = {"weights": dict.fromkeys(zeros[None], 1.0)}
    few = paired_difference(_scores(draws[:200].tolist()), zeros, **unbounded)
    needed = prompts_to_resolve(few)
    assert needed == pytest.approx((1.96 * 0.5 / 0.05) ** 2, rel=0.15)
    more = paired_difference(_scores(draws[:needed].tolist()), zeros, **unbounded)
    assert (more.high - more.low) / 2 == pytest.approx(0.05, rel=0.1)


def test_perplexities_are_paired_as_their_ratio():
    nats = np.random.default_rng(6).normal(2.0, 0.5, (30, 1)) + np.array([0.0, 0.1])
    tokens = np.arange(1, 31)
    sides = [
        [_row("chat", f"{n}", nll=nats[n, side] * tokens[n], reply_tokens=tokens[n])
         for n in range(30)]
        for side in range(2)
    ]  # fmt: skip
    values = [prompt_values(rows) for rows in sides]
    gap = paired_difference(*values, weights=reply_tokens(sides[0]))
    ratio = perplexity(sides[1]).mean / perplexity(sides[0]).mean
    assert gap.mean == pytest.approx(math.log(ratio)) == pytest.approx(0.1)
    assert gap.high - gap.low < 0.001 < perplexity(sides[0]).high - perplexity(sides[0]).low


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "methods", "given"),
    [(3, 2, False), (10, 2, False), (20, 2, False), (50, 2, False), (20, 4, False), (20, 2, True)],
)
def test_equal_methods_are_rarely_told_apart(prompts, methods, given, monkeypatch):
    """The share of 2,000 runs in which the best of equal methods is called ahead of another.

    Of two tasks (nine of three prompts), right or wrong; or of `given` replies, whose tokens weigh.
    """
    monkeypatch.setattr("eval.results.stats.RESAMPLES", 200)
    told, generator = 0, np.random.default_rng(prompts + methods)
    units = [
        (f"{task}", f"{number}")
        for task in range(2 if prompts > 3 else 9)
        for number in range(prompts)
    ]
    for _ in range(2000):
        hard = generator.beta(2, 1, len(units))  # what a prompt is answered with
        noise = generator.exponential(0.1, (methods, len(units)))
        drawn = -hard - noise if given else generator.random((methods, len(units))) < hard
        weights = dict(zip(units, generator.integers(5, 200, len(units)) * 1.0, strict=True))
        how = {"weights": weights} if given else {}
        sides = [{None: dict(zip(units, map(float, one), strict=True))} for one in drawn]
        best = max(sides, key=lambda side: bootstrap_mean(side, **how).mean)
        others = (side for side in sides if side is not best)
        gaps = {n: paired_difference(best, side, **how) for n, side in enumerate(others)}
        told += bool(holm(gaps, methods * (methods - 1) // 2))
    print(f"told apart: {told / 2000:.1%}")
    assert told / 2000 <= 0.05


def test_the_median_lies_between_order_statistics():
    assert median_interval([5.0, 1.0, 2.0, 3.0, 4.0]) is None  # 2 / 2^5 is above 5 %
    six = median_interval([6.0, 1.0, 2.0, 3.0, 5.0, 4.0])
    assert six == Interval(mean=3.5, low=1.0, high=6.0, prompts=6)
    # of nine, (1 + 9) / 2^9 of the samples have at most one value on a side of the median
    nine = median_interval([float(n) for n in range(1, 10)])
    assert (nine.low, nine.high) == (2.0, 8.0)


def _shared(contexts, questions, values):
    return {
        ("t", f"my/all/0/{n * questions + q:03}@{n:08x}"): values[n]
        for n in range(contexts)
        for q in range(questions)
    }


@pytest.mark.parametrize("bounds", [(0, 1), None])
def test_questions_of_one_context_count_as_one_draw(bounds):
    """Answers that agree within a context tell no more than one answer per context."""
    values = [float(n % 3 == 0) for n in range(12)]
    alone = {("t", f"my/all/0/{n:03}"): value for n, value in enumerate(values)}
    once = bootstrap_mean({None: alone}, bounds=bounds)
    often = bootstrap_mean({None: _shared(12, 8, values)}, bounds=bounds)
    assert (often.mean, often.prompts) == (once.mean, 8 * once.prompts)
    assert (often.low, often.high) == pytest.approx((once.low, once.high))
    others = {unit: 0.0 for unit in alone}
    zeros = {unit: 0.0 for unit in _shared(12, 8, values)}
    gap = paired_difference({None: alone}, {None: others})
    same = paired_difference({None: _shared(12, 8, values)}, {None: zeros})
    assert same.p == pytest.approx(gap.p)
