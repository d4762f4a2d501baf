"""The search for the setting of a method, on scores made by hand."""

import math

import pytest

from eval.tune.search import Candidate, Space, best_of, next_batch, values_beyond
from policies.registry import METHODS, make_allocator, make_scorer

ALLOCATORS = tuple(make_allocator(name) for name in ("uniform", "pyramid", "ada", "global"))


def _space(name, tokens=512):
    entry = METHODS[name]
    scorers = [make_scorer(name), *(make_scorer(f"{name}:{preset}") for preset in entry.presets)]
    start = tuple(
        Candidate(scorer=scorer, allocator=ALLOCATORS[0], protected=protected)
        for scorer in dict.fromkeys(scorers)
        for protected in (True, False)
    )
    return Space(
        start=start,
        options=entry.grid,
        allocators=ALLOCATORS,
        allocator_options=True,
        tokens=tokens,
    )


def _search(space, score, count=48):
    scores = {}
    while batch := next_batch(space, scores, count):
        assert scores.keys().isdisjoint(batch)  # known scores are not asked for again
        scores |= {each: score(each) for each in batch}
    return scores


def _peak(**at):
    """Highest at these values of the scorer's options, falling by octaves."""

    def score(candidate):
        values = {name: getattr(candidate.scorer, name) for name in at}
        return -sum(
            5.0 if isinstance(value, str) else abs(math.log2(max(value, 0.5) / at[name]))
            for name, value in values.items()
        )

    return score


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gets_the_same_number_of_settings(name):
    scores = _search(_space(name), lambda candidate: float(candidate.protected))
    assert len(scores) == 48
    assert {candidate.protected for candidate in scores} == {True, False}
    assert len({type(candidate.allocator) for candidate in scores}) == len(ALLOCATORS)


@pytest.mark.parametrize(("kernel", "window"), [(23, 12), (120, 8), (1, 32), (7, 200)])
def test_the_best_numbers_are_enclosed_wherever_they_are(kernel, window):
    space = _space("snapkv")
    scores = _search(space, _peak(kernel=kernel, window=window), 64)
    assert not values_beyond(space, scores)
    best = best_of(scores).scorer
    assert abs(math.log2(best.kernel / kernel)) < 0.5  # type: ignore[union-attr]
    assert abs(math.log2(best.window / window)) < 0.5  # type: ignore[union-attr]


def test_a_winner_at_the_end_of_its_grid_extends_it_up_to_the_prompt():
    space = _space("snapkv", tokens=200)
    scores = _search(space, _peak(kernel=10_000))
    assert best_of(scores).scorer.kernel == 199  # type: ignore[union-attr]
    assert "kernel" not in values_beyond(space, scores)


def test_a_best_number_at_an_end_is_enclosed_with_further_settings():
    space = _space("snapkv")
    scores = _search(space, _peak(kernel=100), 13)
    further = [candidate.scorer.kernel for candidate in list(scores)[13:]]  # type: ignore[union-attr]
    assert further == [127, 63, 255]
    assert best_of(scores).scorer.kernel == 127  # type: ignore[union-attr]
    assert not values_beyond(space, scores)


def test_a_best_number_that_twice_the_settings_do_not_enclose_stays_open():
    space = _space("snapkv")
    scores = _search(space, _peak(kernel=10_000), 4)
    assert len(scores) == 8
    assert "kernel" in values_beyond(space, scores)


def test_options_that_exclude_each_other_are_tried_apart():
    space = _space("h2o")

    def score(candidate):
        return float(candidate.scorer.recents)  # type: ignore[union-attr]

    scores = _search(space, score)
    windows = {candidate.scorer.window for candidate in scores}  # type: ignore[union-attr]
    assert {0, 4, 8, 16, 32, 64} <= windows  # with recents=false, though recents=true is best
    assert best_of(scores).scorer.recents  # type: ignore[union-attr]
    assert not values_beyond(space, scores)  # no window goes with recents=true


def test_a_longer_search_begins_with_a_shorter_one():
    space = _space("lagkv")
    short, long = (list(_search(space, _peak(lag=24), count)) for count in (20, 40))
    assert long[:20] == short


def test_a_fixed_allocator_and_no_options_leave_the_protection_alone():
    start = tuple(
        Candidate(scorer=None, allocator=ALLOCATORS[3], protected=protected)
        for protected in (True, False)
    )
    space = Space(
        start=start, options={}, allocators=ALLOCATORS[3:], allocator_options=False, tokens=64
    )
    scores = _search(space, lambda candidate: float(not candidate.protected))
    assert list(scores) == list(start)
    assert not best_of(scores).protected
