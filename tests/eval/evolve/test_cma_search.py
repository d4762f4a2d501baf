"""The evolutionary search on a known optimum, without a model."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.evolve.cma_search import (
    REACH,
    Journal,
    SearchPlan,
    cache_score,
    layer_groups,
    reply_score,
    search,
)
from kvp.artifacts.files import JsonLines
from kvp.budgets import parse_budget
from kvp.errors import ResultsError

PLAN = SearchPlan(
    layers=6, target=parse_budget("100"), budget=100, minimum=4, maximum=500, group=3,
    generations=12, constraint="project", seed=3,
)  # fmt: skip
BEST = np.array([200, 50, 25, 150, 100, 75])


def _score(scheme):
    """1 at BEST, smaller the further away in the logarithm."""
    return float(np.exp(-np.mean(np.log(np.array(scheme) / BEST) ** 2)))


class Evaluator:
    """Remembers the schemes it evaluates; after `fail_after` calls it is interrupted."""

    def __init__(self, fail_after=10**9):
        self.seen = []
        self.calls, self._limit = 0, fail_after

    def __call__(self, schemes):
        if self.calls == self._limit:
            raise KeyboardInterrupt
        self.calls += 1
        self.seen += schemes
        return [_score(scheme) for scheme in schemes]


def _content(path):
    records = list(JsonLines(path))
    return [{**record, "seconds": 0} for record in records]


def test_groups_go_bottom_up_and_the_last_may_be_smaller():
    assert [range(32)[group] for group in layer_groups(10, 4)] == [
        range(4), range(4, 8), range(8, 10),
    ]  # fmt: skip
    assert len(layer_groups(32, 8)) == 4
    assert layer_groups(4, 8) == [slice(0, 4)]


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=6, max_size=6))
def test_projected_candidates_have_the_exact_total(x):
    weights = PLAN.budget * REACH ** (np.array(x) - 0.5)
    scheme = PLAN.scheme(weights)
    assert sum(scheme) == 600
    assert PLAN.minimum <= min(scheme) <= max(scheme) <= PLAN.maximum
    soft = replace(PLAN, constraint="soft").scheme(weights)
    assert max(abs(count - weight) for count, weight in zip(soft, weights, strict=True)) <= 0.5


def test_it_finds_a_known_optimum(tmp_path):
    evaluator = Evaluator()
    plan = replace(PLAN, generations=30)
    elite = search(plan, evaluator, Journal(tmp_path / "log"))
    assert evaluator.seen[0] == plan.uniform
    assert elite.score > 0.97
    assert _score(plan.uniform) < 0.7
    assert sum(elite.scheme) == 600
    assert elite.fitness == pytest.approx(1.3 * elite.score)
    assert len(evaluator.seen) == len(set(evaluator.seen))


@pytest.mark.parametrize("calls", [1, 13])
def test_a_killed_search_resumes_to_the_same_end(tmp_path, calls):
    whole = search(PLAN, Evaluator(), Journal(tmp_path / "whole"))
    path = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        search(PLAN, Evaluator(fail_after=calls), Journal(path))
    with path.open("ab") as file:
        file.write(b'{"group": 0, "gener')  # torn by the kill
    rest = Evaluator()
    resumed = search(PLAN, rest, Journal(path))
    assert resumed.scheme == whole.scheme
    assert resumed.weights.tolist() == whole.weights.tolist()
    assert (resumed.score, resumed.fitness) == (whole.score, whole.fitness)
    assert _content(path) == _content(tmp_path / "whole")
    assert rest.calls == len(_content(path)) - calls


def test_the_journal_of_another_search_is_refused(tmp_path):
    search(PLAN, Evaluator(), Journal(tmp_path / "log"))
    with pytest.raises(ResultsError, match="line 2 is not what this search draws"):
        search(replace(PLAN, seed=4), Evaluator(), Journal(tmp_path / "log"))
    (tmp_path / "log").write_text('{"group": 0}\n')
    with pytest.raises(ResultsError, match="is damaged"):
        Journal(tmp_path / "log")


def test_equal_schemes_are_evaluated_once(tmp_path):
    plan = replace(PLAN, layers=2, budget=3, minimum=2, maximum=4, group=2)  # three schemes exist
    seen = []

    def flat(schemes):
        seen.extend(schemes)
        return [0.5 for _ in schemes]

    journal = Journal(tmp_path / "log")
    search(plan, flat, journal)
    evaluated = sum(entry.evaluated for entry in journal.generations)
    assert len(seen) == len(set(seen)) == evaluated <= 3
    assert len(journal.generations) > 3


@pytest.mark.parametrize(
    ("mean", "expected"), [(128, 1.0), (256, 0.0), (0, 0.8), (64, 0.9), (192, 0.5), (512, 0.0)]
)
def test_cache_score(mean, expected):
    assert cache_score(mean, 128) == pytest.approx(expected)


def test_fitness():
    plan = replace(PLAN, layers=2, budget=128)
    assert plan.fitness((100, 156), 1.0) == pytest.approx(1.3)
    assert plan.fitness((28, 100), 0.5) == pytest.approx(0.5 * 1.27)
    assert plan.fitness((256, 256), 1.0) == pytest.approx(1.0)


def test_replies_score_as_one_over_perplexity():
    assert reply_score(0.0, 7) == 1.0
    assert reply_score(3 * math.log(4), 3) == pytest.approx(0.25)
