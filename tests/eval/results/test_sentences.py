"""Sentences about comparisons, from records made by hand."""

import itertools
import re

import pytest
from toy_results import LEARNED, compare_records, hand_answers, hand_record, sentences_of

from eval.results.closing import closing_text
from eval.results.frame import OVERALL, tidy
from eval.results.sentences import findings, sentences
from eval.results.task_sorting import sort_tasks
from eval.results.tuned_settings import ScoredSetting, TunedMethod, TunedSettings


def _closing_text(records, planned=()):
    return f"{closing_text(compare_records(records, planned=planned))}\n"


def test_learned_and_best_methods_are_compared_with_the_full_cache():
    records = [
        hand_record("full", None, score=0.8),
        hand_record("oracle", "12.5%", score=0.9),
        hand_record("kvp", "12.5%", score=0.4, **LEARNED),
        hand_record("kvp", "12.5%", score=0.72, allocator="global", **LEARNED),
        hand_record("kvp", "50%", score=0.1, **LEARNED),
        hand_record("keydiff", "12.5%", score=0.2),
        hand_record("knorm", "12.5%", score=0.1),
        hand_record("kvzip", "12.5%", score=0.5),
        hand_record("kvzip", "12.5%", score=0.6, allocator="global"),
        hand_record("kvzip", "12.5%", score=0.0, protocol="query_agnostic"),
    ]
    assert sentences_of(records) == (
        "At 12.5% of the cache, with the question seen before compression, kvp+global answers 72% "
        "(95 % interval 0 to 100), the full cache 80% (0 to 100). With equal counts per head it "
        "answers 40% (0 to 100).\n"
        "The best other method, kvzip+global, answers 60% (0 to 100): +12.0 points (-100.0 to "
        "+100.0).\n"
        "1 prompt is too few to rank methods: 10 are the least. Differences: kvp+global "
        "minus the other, paired by prompt. The best methods were picked on these prompts, which "
        "favours them. To tell differences of 5 points apart, run about 400 prompts in all."
        # 1 x (100 / 5) ** 2; of one prompt no line says what is lost to the full cache
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        # of 200 prompts that the full cache answers, those lost at 50 %, 25 % and 8 tokens
        ((0, 0, 0), "confidence): kvp 8"),
        ((1, 2, 30), "confidence): kvp 25%"),
        ((1, 7, 0), "confidence): kvp 50% (at 25% about 909 prompts would show it)"),
        ((30, 0, 0), "at the largest budget: kvp"),
        ((14, 0, 0), "lost to the full cache at the largest budget: kvp (its mean loss is larger)"),
        ((7, 0, 0), "largest budget: kvp (at 50% about 909 prompts would show it)"),
    ],
)
def test_the_smallest_budget_that_loses_little(wrong, words):
    kept = zip(wrong, ("50%", "25%", "8"), strict=True)
    scores = [("kvp", budget, range(lost, 200)) for lost, budget in kept]
    records = hand_answers(("full", None, 1.0), *scores, prompts=200)
    last = sentences_of(records).splitlines()[-1]
    assert f"{words}." in last, last


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        # prompts answered by one of the two alone: 20 against 0, 7 against 1, 6 against 4
        ((20, 45), r"kvp is ahead, \+33\.3 points \(\+2\d\.\d to \+4\d\.\d\)"),
        ((7, 46), r"\+10\.0 points \(\+\d\.\d to \+\d+\.\d\), not significant after "
                  r"correction for 6 comparisons"),
        ((6, 49), r"no significant difference, \+3\.3 points \(-\d\.\d to \+1\d\.\d\)"),
    ],
)  # fmt: skip
def test_a_difference_is_described_by_its_interval_and_its_test(theirs, words):
    right = {"kvp": (45,), "random": (15,), "kvzip": theirs, "knorm": theirs}
    pairs = itertools.product(right, ("12.5%", "25%"))
    scores = [(method, budget, range(*right[method])) for method, budget in pairs]
    records = hand_answers(("full", None, 1.0), *scores, prompts=60)
    said = sentences_of(records)
    _, other, null, *_ = said.splitlines()
    assert re.search(f"The best other method, kvzip .*%.*: {words}[.]$", other), said
    assert said.count("paired by prompt") == 1
    table = tidy(*compare_records(records))  # no other test marks the table's differences
    row = table[(table.method == "kvzip") & (table.budget == "12.5%") & (table.task == OVERALL)]
    assert bool(row.minus_lead_differs.item()) == ("ahead" in words)
    assert "random, answers 25% " in null
    assert "kvp is ahead, +50.0 points" in null
    assert ("run about" in said) == ("ahead" not in other)


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (["vt", "niah_single_1", "cwe"], "kvp, trained on these tasks, answers"),
        (["niah_single_1"], "kvp, trained on 1 of these 2 tasks, answers"),
        (["cwe"], "kvp answers"),  # nothing is said of a mixture's other parts
    ],
)
def test_what_a_policy_was_trained_on_is_in_the_sentence(tasks, words):
    scores = ("kvp", "6%", 1.0), ("snapkv", "6%", 1.0)
    records = [row for task in ("niah_single_1", "vt") for row in hand_answers(*scores, task=task)]
    (comparison,) = compare_records(records, policy_tasks={"seed0": tasks, "another": ["vt"]})
    assert words in " ".join(sentences(comparison))


def test_one_method_beside_the_oracle_is_compared():
    pairs = itertools.product((("oracle", 1.0), ("snapkv", 0.0)), ("25%", "50%"))
    scores = ((method, budget, score) for (method, score), budget in pairs)
    (comparison,) = compare_records(hand_answers(("full", None, 1.0), *scores))
    assert {spec for _, spec in comparison.significant} == {"25%", "50%"}


def test_the_correction_counts_the_pairs_of_an_extended_folder():
    first = ("kvp", "12.5%", 1.0), ("snapkv", "12.5%", 0.0)
    later = ("snapkv", "25%", 1.0), ("keydiff", "25%", 0.0), ("random", "25%", 0.0)
    (comparison,) = compare_records(hand_answers(*first, *later))
    _, significant = comparison.differences(comparison.best_at("25%"))
    assert {setting.method for setting in significant} == {"keydiff", "random"}
    assert comparison.test_count == 1 + 3  # with kvp, and the pairs of three methods
    (comparison,) = compare_records(hand_answers(*first, *later, ("oracle", "25%", 1.0)))
    assert comparison.test_count == 1 + 3 + 3  # the oracle with each of the three, too


def test_nulls_are_quoted_apart_and_prompts_choose_no_setting():
    records = [
        hand_record(method, "25%", score=score, **fields)
        for method, score, fields in (
            ("ring", 0.3, {}), ("random", 0.45, {}), ("keydiff", 0.9, {}),
            ("keydiff", 0.8, {"allocator": "global", "protected": True}),
            ("keydiff", 0.4, {"protected": True}),
            ("snapkv", 0.2, {}),  # below 20 tokens, say: run without protection only
        )
    ]  # fmt: skip
    assert (
        "the best method, keydiff +p, of 3 settings the one nearest to the default, answers 40% "
        "(95 % interval 0 to 100), the full cache 100% (0 to 100).\n"
        "The next, snapkv, answers 20% (0 to 100): +20.0 points (-100.0 to +100.0).\n"
        "The best null (a control that reads no content), random, answers 45% (0 to 100): -5.0 "
        "points (-100.0 to +100.0).\n"
    ) in sentences_of([*records, hand_record("full", None, score=1.0)])


def test_few_prompts_get_numbers_and_no_verdict():
    def of(prompts):
        scores = ("kvp", "25%", 1.0), ("snapkv", "25%", 0.0)
        (comparison,) = compare_records(hand_answers(*scores, prompts=prompts))
        return "\n".join(sentences(comparison)), comparison.significant

    few, none = of(9)
    assert re.search(r"snapkv, answers 0% \(0 to \d+\): \+100\.0 points", few)
    assert "9 prompts are too few to rank methods: 10 are the least." in few
    assert none == set()
    enough, told = of(10)
    assert ": kvp is ahead, +100.0 points" in enough
    assert "picked" not in enough  # from one
    assert "too few" not in enough
    assert len(told) == 1


def test_the_budget_is_one_that_most_methods_have():
    records = [
        hand_record(method, budget, score=score)
        for method, budgets, score in (
            ("keydiff", ("1%", "2%", "3%", "12.5%"), 0.5), ("kvzip", ("1%", "2%", "6%"), 1.0),
            ("knorm", ("1%", "2%", "6%"), 0.0),
        )
        for budget in budgets
    ]  # fmt: skip
    said = sentences_of(records)
    assert said.startswith("At 2% of the cache")
    assert "the best method, kvzip" in said
    (comparison,) = compare_records(records)
    (main, *_) = findings(comparison, comparison.best_at("3%"))
    assert main.startswith("At 3% of the cache")
    assert "the best method, keydiff, answers" in main
    assert comparison.best_at("50%") is None


def test_methods_count_in_the_setting_that_was_tuned():
    records = [
        hand_record("full", None, score=1.0),
        hand_record("kvp", "25%", score=0.9, **LEARNED),
        hand_record("kvp", "25%", score=0.4, allocator="global", **LEARNED),
        hand_record("kvp", "25%", score=0.5, protected=True, **LEARNED),
        hand_record("snapkv", "25%", score=0.2),
        hand_record("snapkv", "25%", score=0.7, protected=True),
    ]
    methods = tuple(
        TunedMethod(
            method=method, requested=method, protocol="query_aware",
            chosen=ScoredSetting(scorer=method, variant="auto", allocator=allocator,
                                 protected=False, score=0.5, interval=(0.4, 0.6)),
            published=(), tried=4,
        )
        for method, allocator in (("kvp", "global"), ("snapkv", "uniform"))
    )  # fmt: skip
    text = sentences_of(records, (TunedSettings(split="validation", data={}, methods=methods),))
    assert "kvp+global answers 40% (95 % interval 0 to 100)" in text
    assert "The best other method, snapkv, answers 20% (0 to 100): +20.0 points (-100.0 to" in text


def test_sentences_without_answers_are_about_perplexity():
    records = [
        hand_record("full", None, nll=0.0, reply_tokens=2),
        hand_record("knorm", "25%", nll=1.3862943611198906, reply_tokens=2),
    ]
    assert sentences_of(records) == (
        "At 25% of the cache, with the question seen before compression, the best method, knorm, "
        "has a perplexity of 2.00, the full cache 1.00."
    )
    assert sentences_of([hand_record("full", None, score=0.8)]) == ""
    assert _closing_text([]) == "\n"


def _plan(task, prompts, *methods):
    settings = [[each, "auto", "uniform", None, False, None if each == "full" else "25%"]
                for each in methods]  # fmt: skip
    return {"protocol": "query_aware", "prompts": {task: prompts}, "settings": settings}


def test_unfinished_results_say_so_first_and_rank_nothing():
    others = ("knorm", "25%", 1.0), ("snapkv", "25%", 0.0), ("random", "25%", 0.0)
    records = hand_answers(("full", None, 1.0), *others, prompts=6)
    whole = [_plan("niah_single_1", 6, "full", "knorm", "snapkv"),
             _plan("niah_single_1", 4, "random")]  # fmt: skip
    assert _closing_text(records, planned=whole) == _closing_text(records)
    assert "the best method, knorm, answers 100%" in _closing_text(records)
    more = [*whole, _plan("niah_single_1", 10, "knorm", "snapkv"), _plan("vt", 3, "h2o"),
            _plan("cwe", 3, "h2o")]  # fmt: skip
    first, *lines = _closing_text(records, planned=more).splitlines()
    assert first == (
        "Unfinished: 6 of 10 prompts of niah_single_1 (query_aware), 0 of 3 prompts of vt "
        "(query_aware), 1 more; 6 of 16 evaluations are done, the same command continues."
    )
    assert lines[1].split() == ["method", "25%", "full"]
    assert not re.search("best|ahead|behind|apart|resolve", "".join(lines))


def test_the_smallest_budget_is_the_one_of_fewest_tokens():
    records = [
        row | {"budget": tokens}
        for spec, score, tokens in ((None, 1.0, 100), ("32", 0.0, 32), ("75%", 1.0, 75))
        for row in hand_answers(("random" if spec else "full", spec, score), prompts=20)
    ]
    assert sort_tasks("answers", records).usable == ("niah_single_1",)
