"""The table and the sentences at the end of a run, from records made by hand."""

import re

import pytest
from toy_results import LEARNED, compare_records, hand_record

from eval.results.captions import describe_data
from eval.results.closing import closing_text
from kvp.data.tasks.ruler import RULER_13


def _closing_text(records, planned=()):
    return f"{closing_text(compare_records(records, planned=planned))}\n"


def test_seeds_of_a_policy_form_one_line_and_protection_makes_two():
    records = [
        hand_record("kvp", "6%", **LEARNED, score=1.0),
        hand_record("kvp", "6%", policy="seed1", policy_seed=1, score=0.0),
        hand_record("kvp", "6%", **LEARNED, protected=True, score=1.0),
        hand_record("full", None, score=1.0),
        hand_record("full", None, "b", nll=3.0, reply_tokens=3),
    ]
    answers, replies = compare_records(records)
    assert [setting.label for setting in answers.settings] == ["full", "kvp +p", "kvp"]
    cells = {(setting.label, spec): of.interval for (setting, spec), of in answers.cells.items()}
    assert cells["kvp", "6%"].mean == 0.5
    assert cells["full", "full"].prompts == 1
    (full,) = replies.cells.values()
    assert round(full.interval.mean, 4) == 2.7183
    half = "interval over prompts (half a prompt more at 0 and at 100 %)"
    alone = "; of one policy seed: what another would change is not in it"
    assert f"{half}{alone}" in _closing_text(records[:1])
    assert f"{half} and policy seeds\n" in _closing_text(records[:2])
    assert "interval over prompts\n" in _closing_text(records[-1:])
    assert "2.72\n" in _closing_text(records[-1:])  # and no interval of a single text
    apart = _closing_text(
        [records[0], hand_record("full", None, "b", score=1.0)]
    )  # none answered both
    assert "full, kvp, which answered only some of the prompts (95 % interval)\n95" in apart


def test_allocators_have_rows_and_sizes_of_a_method_a_column():
    records = [
        hand_record("snapkv", "6%", score=1.0),
        hand_record("snapkv", "6%", score=0.0, allocator="ada(safeguard=0.5)"),
        hand_record("gvote", "own", allocator="own", score=1.0, kept_tokens=18.4),
        hand_record("full", None, score=1.0),
    ]
    text = _closing_text(records)
    header = next(line for line in text.splitlines() if line.startswith("method"))
    assert header.split() == ["method", "6%", "own", "full"]
    rows = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines())
    labels = [label for label, *cells in rows if cells]
    assert labels[1:] == ["full", "snapkv", "snapkv+ada(safeguard=0.5)", "gvote+own"]
    assert "100 (0-100) @18%" in text  # one prompt, answered: Beta(1.5, 0.5), stretched


def test_the_best_null_is_that_of_the_highest_mean_over_tasks():
    rows = [
        hand_record(method, "25%", str(number), task=task, score=score)
        for method, scores in (("ring", (0.4, 0.4)), ("random", (0.3, 0.9)), ("keydiff", (1, 1)))
        for task, score, count in (("a", scores[0], 9), ("b", scores[1], 1))
        for number in range(count)
    ]
    (comparison,) = compare_records(rows)
    keydiff = next(setting for setting in comparison.settings if setting.method == "keydiff")
    gap = comparison.over_null(keydiff, "25%")
    assert gap.mean == pytest.approx(0.4)  # random: 0.6; by prompts ring would be the best


def test_what_was_measured_is_said_in_one_sentence():
    whole = [hand_record("full", None, task=task, score=1.0) for task in RULER_13]
    other = hand_record("full", None, task="vt_0shot", score=0.5)
    for records, named in (
        (whole, "13 prompts of exactly RULER's 13 tasks"),
        (whole[:-2], "11 prompts of 11 of RULER's 13 tasks, without qa_1, qa_2"),
        ([*whole, other], "14 prompts of RULER's 13 tasks and 1 more (vt_0shot)"),
        ([whole[0], other], "2 prompts of niah_single_1, vt_0shot"),
        ([other], "1 prompt of vt_0shot"),
    ):
        said = f"nano, {named}, at most 512 tokens, test split, seed 3."
        assert describe_data(compare_records(records)[0]) == said
