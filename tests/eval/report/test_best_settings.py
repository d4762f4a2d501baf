"""The best setting of a method, and the best baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eval.report.aggregates import score_grid
from eval.report.best_settings import (
    Comparison,
    best_methods,
    clearly_best,
    differences_to_baseline,
    shown_first,
)
from eval.report.choose_settings import choose
from eval.report.message import ALL_TASKS, message, messages
from eval.results.records import policy_groups
from eval.tune.settings_file import Scored, Tuned

Record = dict[str, Any]
FREE = {"random", "knorm"}


def _grid(answers: list[Record]) -> Any:
    records = [record for record in answers if record["protocol"] == "query_aware"]
    return score_grid(records, policy_groups(records), resamples=50)


def test_without_a_choice_on_other_prompts_the_default_is_shown(answers: list[Record]) -> None:
    # snapkv is best without protection, with a preset: neither makes it the one that is shown
    worse = [{**record, "score": 0.0} for record in answers if record["method"] == "snapkv"]
    others = [record for record in answers if record["method"] != "snapkv"]
    best = [{**record, "variant": "paper", "protected": False, "score": 1.0} for record in worse]
    choice = choose(_grid([*others, *best, *worse]))["snapkv"]
    assert (choice.candidates, choice.chosen_on) == (2, None)
    assert choice.note == "protected, the default of 2"


def test_one_setting_of_validation_serves_the_whole_curve(answers: list[Record]) -> None:
    grid = _grid(answers)
    choice = choose(grid, grid)["knorm"]
    # protected: 25 % and 100 %; unprotected: 37.5 % and 50 %
    assert choice.setting.protected
    assert (choice.candidates, choice.note) == (2, "protected, chosen on validation")
    assert not choose(grid, grid, higher_is_better=False)["knorm"].setting.protected


def _tuned(**chosen: Any) -> Tuned:
    setting = {"scorer": "knorm", "variant": "auto", "allocator": "uniform", "protected": False}
    return Tuned(
        method="knorm", group="", requested="knorm", protocol="query_aware",
        chosen=Scored(**{**setting, **chosen}, score=0.5, interval=(0.4, 0.6)),
        published=(), tried=48, exhausted=False, open_ends=(), extended={},
    )  # fmt: skip


def test_what_kvp_tune_chose_is_shown_whatever_validation_says(answers: list[Record]) -> None:
    grid = _grid(answers)
    choice = choose(grid, grid, [(_tuned(), "validation")])["knorm"]
    assert not choice.setting.protected
    assert choice.note == "unprotected, chosen on validation (48 settings)"
    absent = choose(grid, grid, [(_tuned(allocator="ada"), "validation")])["knorm"]
    assert absent.note == "protected, chosen on validation"


def test_allocators_are_settings_and_self_sized_methods_are_families(answers: list[Record]) -> None:
    knorm = [record for record in answers if record["method"] == "knorm" and record["protected"]]
    ada = [{**record, "allocator": "ada", "score": 1.0} for record in knorm]
    self_sized = [
        {**record, "allocator": "self_sized", "budget_spec": "own", "budget": None,
         "kept_tokens": 6.4}
        for record in knorm if record["budget_spec"] == "25%"
    ]  # fmt: skip
    grid = _grid([*answers, *ada, *self_sized])
    choices = choose(grid, grid)
    assert choices["knorm"].legend == "knorm+ada"
    assert choices["knorm"].note == "+ada, protected, chosen on validation"
    alone = choices["knorm+self_sized"]
    assert (alone.name, alone.note, alone.setting.self_sized) == (
        "knorm+self_sized",
        "protected",
        True,
    )
    cell = grid[alone.setting]["own"]
    assert (cell.kept_tokens, cell.share) == (6.4, 0.4)
    shown = shown_first(grid, choices, 5, higher_is_better=True)
    assert {"full", "oracle", "kvp", "knorm+self_sized"} < set(shown)
    assert len(shown) == 5
    assert "random" not in shown  # the worst of the others
    assert set(shown_first(grid, choices, 99, higher_is_better=True)) == set(choices)


def test_only_shared_budgets_decide(answers: list[Record]) -> None:
    kept = [
        record for record in answers
        if not (record["method"] == "knorm" and record["protected"])
        or record["budget_spec"] != "50%"
    ]  # fmt: skip
    assert not choose(_grid(kept), _grid(kept))["knorm"].setting.protected


def test_validation_decides_where_it_is_given(answers: list[Record]) -> None:
    grid = _grid(answers)
    swapped = [
        {**record, "protected": not record["protected"]} if record["method"] == "knorm" else record
        for record in answers
    ]
    choice = choose(grid, _grid(swapped))["knorm"]
    assert not choice.setting.protected
    assert choice.note == "unprotected, chosen on validation"


def test_the_best_method_may_read_attention_and_references_never_win(answers: list[Record]) -> None:
    grid = _grid(answers)
    choices = choose(grid)
    # snapkv 100, oracle 75, kvp 75, knorm 25
    assert best_methods(grid, choices, "25%") == ["snapkv"]
    assert best_methods(grid, choices, "50%") == ["kvp", "knorm", "snapkv"]  # a tie
    assert best_methods(grid, choices, "25%", higher_is_better=False) == ["random"]


def test_best_baseline_reads_no_attention_and_is_not_learned(answers: list[Record]) -> None:
    grid = _grid(answers)
    choices = choose(grid)
    for spec in ("25%", "50%"):
        assert best_methods(grid, choices, spec, FREE | {"kvp", "full"}) == ["knorm"]
    assert best_methods(grid, choices, "25%", FREE, higher_is_better=False) == ["random"]
    assert best_methods(grid, choices, "25%", set()) == []


def test_differences_are_paired(make_comparison: Callable[..., Comparison]) -> None:
    comparison = make_comparison()
    (small,) = differences_to_baseline(comparison, "25%", FREE, resamples=50)
    # per prompt 1 - 1, 0.5 - 0, 0.5 - 0, 1 - 0
    assert small.difference.mean == pytest.approx(0.5)
    assert (small.family, small.baseline, small.both_reach_full) == ("kvp", "knorm", False)
    (large,) = differences_to_baseline(comparison, "50%", FREE, resamples=50)
    assert (large.difference.mean, large.both_reach_full) == (0.0, True)
    assert large.difference.p is not None
    assert large.difference.p > 0.5


def test_methods_without_answers_to_a_task_are_compared_on_the_others_only(
    answers: list[Record], make_comparison: Callable[..., Comparison]
) -> None:
    fewer = [
        record
        for record in answers
        if not (record["method"] == "knorm" and record["task"] == "two")
    ]
    comparison = make_comparison(records=fewer)
    assert "knorm" not in {setting.family for setting in comparison.grid}
    assert comparison.estimate("knorm", "25%") is None
    assert "without knorm, which answered only some of the tasks" in comparison.conditions
    knorm = comparison.choices["knorm"].setting
    assert comparison.tasks["one"][knorm]["25%"].interval.mean == 0.5
    assert knorm not in comparison.tasks["two"]
    # the settings of a method that are over all tasks come before those that are not
    some = [record for record in answers if record["method"] != "knorm" or record["task"] == "one"
            or not record["protected"]]  # fmt: skip
    assert not make_comparison(records=some).choices["knorm"].setting.protected


def test_the_message_names_the_best_heuristic_and_null_and_tells_what_is_resolved(
    make_comparison: Callable[..., Comparison],
) -> None:
    found = message(make_comparison(), ALL_TASKS, "25%")
    assert found is not None
    first, *others = found.sentences
    assert first == (
        "At 25% of the cache (the question seen before compression) kvp answers 75% of what the "
        "full cache answers; the best method without training, snapkv, 100%; the best null, "
        "random, 0%."
    )
    assert found.short == first.partition("compression) ")[2]
    assert others[0].startswith(
        "95% of the full cache's answers take 50% with kvp, 25% with snapkv"
    )
    assert others[1].startswith(
        "Paired by prompt, in points (95 % interval): kvp minus snapkv -25.0"
    )
    assert others[-1].startswith("With 2 prompts per task, differences below ")


def test_the_message_is_about_one_task_where_it_is_asked_for(
    make_comparison: Callable[..., Comparison],
) -> None:
    comparison = make_comparison()
    (sentence,) = message(comparison, "two", "50%").sentences  # type: ignore[union-attr]
    assert sentence.endswith("the best null, random, 50%.")
    assert message(comparison, ALL_TASKS, "12%") is None
    assert list(messages(comparison, "two")) == ["25%", "50%"]


def test_the_recommended_setting_of_a_policy_is_its_default(
    answers: list[Record], make_record: Callable[..., Record]
) -> None:
    more = [
        make_record(
            "kvp", policy="seed0", policy_seed=0, score=0.0, allocator=allocator, protected=False
        )
        for allocator in ("global", "ada")
    ]
    setting = choose(_grid([*answers, *more]))["kvp"].setting
    assert (setting.allocator, setting.protected) == ("global", False)


def test_only_an_interval_beyond_all_others_is_marked(
    answers: list[Record], make_record: Callable[..., Record]
) -> None:
    grid = _grid(answers)
    assert clearly_best(grid, choose(grid), "25%") == []  # snapkv leads, by four prompts
    assert clearly_best(grid, choose(grid), "50%") == []
    many = [
        make_record(method, score=float(method == "snapkv"), example=str(number))
        for number in range(60)
        for method in ("snapkv", "knorm", "random")
    ]
    grid = _grid(many)
    assert clearly_best(grid, choose(grid), "25%") == ["snapkv"]
    assert clearly_best(grid, choose(grid), "25%", higher_is_better=False) == []  # a tie
