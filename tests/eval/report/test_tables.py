"""Numbers and captions of the tables against hand-computed ones."""

import html
import re

import pytest
from toy_results import answer_records, compare_answers, result_record, timing_records

import kvp
from eval.report import tables
from eval.report.costs import summarise_timings
from eval.report.figures import drawn_settings, line_styles
from eval.results.captions import describe_left_out
from eval.results.closing import closing_text
from eval.results.frame import tidy
from eval.results.sentences import sentences
from policies.registry import SCORERS


def _texts(table, column):
    """First lines of a column by heading."""
    return {row[0].split("\n")[0]: row[column].split("\n")[0] for row in table.rows}


def test_the_first_table_has_every_setting_where_they_are_few(monkeypatch):
    comparison = compare_answers()
    chosen = comparison.choices
    shown = tables.choose_rows(comparison)
    assert [*shown] == [*comparison.settings]
    assert len(shown) > len(chosen)
    assert chosen.items() <= shown.items()
    monkeypatch.setattr(tables, "FEW", 1)
    assert tables.choose_rows(comparison) == chosen


def test_self_sized_methods_are_families():
    own = [
        {**one, "allocator": "self_sized", "budget_spec": "own", "budget": None, "kept_tokens": 6.4}
        for one in answer_records()
        if (one["method"], one["protected"], one["budget_spec"]) == ("knorm", True, "25%")
    ]
    comparison = compare_answers([*answer_records(), *own])
    (setting,) = (setting for setting in comparison.choices if setting.self_sized)
    assert (setting.describe(), comparison.choices[setting]) == ("protected", "")
    table = tables.make_score_table(comparison, comparison.choices)
    assert table.header[-1] == "own size"
    (cell,) = (row[-1] for row in table.rows if row[-1] != tables.NOTHING)
    assert cell.endswith("\nat 40.0 % (6)")


def test_differences_are_paired_and_stars_explained():
    comparison = compare_answers()
    shown = tables.make_score_table(comparison, comparison.choices)
    assert _texts(shown, 1)["knorm"] == "25.0"
    # those of oracle, kvp, knorm and snapkv to random, at two budgets
    assert shown.caption == (
        "Accuracy, %, mean over 2 tasks, question seen, all methods protected. * above the best "
        "null, † below it (paired by prompt, Holm's correction for 8 differences)."
    )
    assert {"kvp", "snapkv"} <= {head for head, *_ in shown.rows}
    every = tables.make_full_table(comparison).caption  # of a model card, say
    assert every.endswith(
        ". * above the best null with the same protection, † below it (paired by prompt, Holm's "
        "correction for 8 differences)."
    )
    assert "; toy, 4 prompts of one, two, at most 20 tokens, test split, seed 0; policies" in every
    bare = compare_answers([one for one in comparison.records if not one["protected"]])
    assert "; no token protected. No null was run" in tables.make_full_table(bare).caption
    nothing = compare_answers(sinks=0, recents=0)
    assert "always kept" not in tables.make_full_table(nothing).caption + closing_text([nothing])
    minus_full, minus_kvp = tables.make_difference_tables(comparison, tidy(comparison))
    assert _texts(minus_full, 1)["kvp"] == "-25.0"
    # per prompt 1 - 1, 0 - 0.5, 0 - 0.5, 0 - 1
    against = _texts(minus_kvp, 1)
    assert {name: text.removesuffix(" *") for name, text in against.items()} == {
        "oracle": "+0.0", "knorm": "-50.0", "random": "-75.0", "snapkv": "+25.0",
    }  # fmt: skip
    by_task = tables.make_task_table(comparison, "25%")
    assert by_task.header == ("method", "one", "two")
    assert _texts(by_task, 2)["knorm"] == "0.0"


def test_many_prompts_resolve_a_difference():
    scores = {"snapkv": 1.0, "knorm": 0.0, "random": 0.5}
    records = [
        result_record(method, score=score, example=str(number))
        for number in range(60)
        for method, score in scores.items()
    ]
    table = tables.make_full_table(compare_answers(records))
    assert _texts(table, 1) == {"snapkv": "100.0 *", "knorm": "0.0 †", "random": "50.0"}


def test_methods_without_answers_to_a_task_are_compared_on_the_others_only():
    fewer = [
        record for record in answer_records()
        if not (record["method"] == "knorm" and record["task"] == "two")
    ]  # fmt: skip
    comparison = compare_answers(fewer)
    (knorm,) = (setting for setting in comparison.choices if setting.method == "knorm")
    assert (knorm, "25%") not in comparison.cells
    assert "without knorm, which answered only some of the prompts" in describe_left_out(comparison)
    assert comparison.tasks["one"][knorm, "25%"].interval.mean == 0.5
    # the settings of a method that are over all tasks come before those that are not
    some = [one for one in answer_records() if one["method"] != "knorm" or one["task"] == "one"
            or not one["protected"]]  # fmt: skip
    choices = compare_answers(some).choices
    assert [one.protected for one in choices if one.method == "knorm"] == [False]


def test_the_summary_names_what_the_figure_draws_in_front():
    comparison = compare_answers()
    *_, few = said = sentences(comparison)
    text = re.sub(r" \([-+]?\d.*? to .*?\)", "", "\n".join(said))
    for fact in (
        ", kvp +p answers 100%, the full cache 100%.",
        "The best other method, knorm +p (tied with snapkv +p), answers 100%: +0.0 points.",
        "The best null (a control that reads no content), random +p, answers 25%: +75.0 points.",
        " +p: first and last tokens are always kept.",
    ):
        assert fact in text
    named = re.findall(r"[:;] (\w+ \+p) \(at 50% about \d+ prompts would show it\)", few)
    assert named == ["kvp +p", "knorm +p", "snapkv +p"]
    shown = {setting.family: front for setting, front in drawn_settings(comparison).items()}
    assert shown == {"full": True, "oracle": True, "kvp": True, "knorm": True, "random": True,
                     "snapkv": False}  # fmt: skip
    assert len(drawn_settings(comparison, 5)) == 5


def test_a_policy_run_in_several_settings_names_those_that_are_not_quoted():
    more = [
        {**each, "allocator": "global", "protected": False} for each in answer_records()
        if each["method"] in ("kvp", "knorm") and each["protected"]
    ]  # fmt: skip
    comparison = compare_answers([*answer_records(), *more])
    _, named, *_ = sentences(comparison)
    assert ", kvp+global answers 100%" in named
    # another method is drawn in its best setting, with ties in its first one
    drawn = drawn_settings(comparison)
    labels = [setting.label for setting in drawn if setting.method in ("kvp", "knorm")]
    assert labels == ["kvp+global", "knorm +p"]


def test_terminal_page_and_python_say_the_same(reported):
    table = kvp.read_results(reported)
    terminal = closing_text(table.comparisons)
    page = html.unescape((reported / "report.html").read_text())
    seen, unseen, given = (
        next(number for number, each in enumerate(table.sentences()) if words in each)
        for words in ("the question seen", "the question not seen", "has a perplexity of")
    )
    assert 1 == seen < unseen < given
    for sentence in table.sentences():
        assert f"{sentence}\n" in terminal
        assert f">{sentence}<" in page
    assert repr(table).startswith(f"{terminal}\n")


def test_seconds_and_bytes_are_ratios_to_the_full_cache():
    timing = timing_records()
    full, half = summarise_timings(timing[::-1], {None: ""})
    assert (full.budget, full.bytes_to_full, half.budget, half.bytes_to_full) == (None, 1, 8, 0.5)
    # prompt by prompt, so the prompts' own differences leave the ratio alone
    assert half.decode_to_full.mean == pytest.approx(0.75)
    assert half.decode_to_full.low == pytest.approx(half.decode_to_full.high)
    kvp = [
        {**timing[1], "method": "kvp", "policy": f"seed{n}",
         "by_prompt": {"evict_seconds": [seconds * k for k in range(6)]}}
        for n, seconds in enumerate((0.002, 0.004))
    ]  # fmt: skip
    (found,) = summarise_timings(kvp, {None: "", "seed0": "", "seed1": ""})
    assert found.evict.mean == pytest.approx(0.003 * 2.5)
    assert found.bytes_to_full is None
    for record in timing:
        record["by_prompt"] = {name: times[:5] for name, times in record["by_prompt"].items()}
    table = tables.make_cost_table(summarise_timings(timing, {None: ""}))
    assert "Seconds are left out: 5 prompts were timed, 6 are the least." in table.caption
    assert table.header[4:] == ["readings of the prompt"]


def test_styles_tell_many_methods_apart():
    many = [*(f"mine{number}" for number in range(18)), *(f"kvp/{number}" for number in range(9))]
    many += SCORERS
    styles = line_styles({name: name.partition("/")[0] for name in many})
    pairs = {(style["color"], str(style["linestyle"])) for style in styles.values()}
    assert len(pairs) == len(many)
