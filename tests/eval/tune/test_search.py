"""The search for the setting of a method, on scores made by hand."""

import math
from types import SimpleNamespace

import pytest

from eval.tune.config import TuneConfig
from eval.tune.search import Search, make_spaces, next_candidates
from policies.registry import SCORERS, make_scorer


def _subject(methods, length=512):
    (space,) = make_spaces(TuneConfig(out="out", methods=methods, length=length))
    return Search(space=space, protocol="query_aware")


def _search(search, score, count=48):
    while candidates := next_candidates(search, count):
        assert search.trials.keys().isdisjoint(candidates)  # nothing is tried twice
        search.trials.update({each: SimpleNamespace(score=score(each)) for each in candidates})
    return {setting: scored.score for setting, scored in search.trials.items()}


def _peak(**at):
    """Highest at these values of the scorer's options, falling by octaves."""

    def score(setting):
        values = {name: getattr(setting.scorer, name) for name in at}
        return -sum(
            5.0 if isinstance(value, str) else abs(math.log2(max(value, 0.5) / at[name]))
            for name, value in values.items()
        )

    return score


@pytest.mark.parametrize("name", SCORERS)
def test_every_method_gets_the_same_number_of_settings_and_every_allocator_first(name):
    subject = _subject(name)
    scores = _search(subject, lambda setting: float(setting.protected), 40)
    assert len(scores) == 40
    assert {setting.protected for setting in scores} == {True, False}
    first = list(scores)[len(subject.space.initial) - 1 :][:4]
    tried = [setting.allocator_name.partition("(")[0] for setting in first]
    assert tried == ["uniform", "pyramid", "ada", "global"]


@pytest.mark.parametrize(
    ("length", "count", "at", "found", "tried"),
    [
        (512, 64, {"kernel": 23, "window": 12}, {"kernel": {23}, "window": {12}}, 64),
        (512, 64, {"kernel": 120, "window": 8}, {"kernel": {127}, "window": {8}}, 64),
        (512, 64, {"kernel": 1, "window": 32}, {"kernel": {1}, "window": {32}}, 64),
        (512, 64, {"kernel": 7, "window": 200}, {"kernel": {7}, "window": {240}}, 64),
        (512, 16, {"kernel": 100}, {"kernel": {127}}, 18),  # 127 and 255 beyond the 16 settings
        (512, 4, {"kernel": 10_000}, {"kernel": {31}}, 8),  # twice the settings do not enclose it
        (200, 64, {"kernel": 10_000}, {"kernel": {127}}, 64),  # the prompt ends there
    ],
)
def test_the_best_numbers_are_enclosed_wherever_they_are(length, count, at, found, tried):
    scores = _search(_subject("snapkv", length), _peak(**at), count)
    best = max(scores, key=scores.get).scorer
    assert all(getattr(best, name) in values for name, values in found.items())
    assert len(scores) == tried


def test_options_that_exclude_each_other_are_tried_apart():
    scores = _search(_subject("h2o"), lambda setting: float(setting.scorer.recents))
    windows = {setting.scorer.window for setting in scores}
    assert {0, 4, 8, 16, 32, 64} <= windows  # with recents=false, though recents=true is best
    assert max(scores, key=scores.get).scorer.recents


def test_a_longer_search_begins_with_a_shorter_one():
    short, long = (list(_search(_subject("lagkv"), _peak(lag=24), count)) for count in (20, 40))
    assert long[:20] == short


def test_what_the_specification_names_is_fixed():
    scores = _search(_subject("lagkv(lag=16,sinks=1)+global"), lambda one: float(not one.protected))
    assert [(one.spec, one.protected) for one in scores] == [
        ("lagkv(sinks=1,lag=16)+global", True), ("lagkv(sinks=1,lag=16)+global", False),
    ]  # fmt: skip
    assert not max(scores, key=scores.get).protected
    preset = _search(_subject("snapkv:paper+global"), lambda one: 0.0)
    assert {one.scorer for one in preset} == {make_scorer("snapkv:paper")}


def test_equal_counts_are_not_tried_again_with_each_better_setting():
    search = _subject("lagkv")
    _search(
        search,
        lambda setting: float(setting.scorer.lag == 64) + ("ada" in setting.allocator_name),
        16,
    )
    tried = [setting.allocator_name for setting in search.trials]
    assert tried.count("uniform") == len(search.space.initial)
