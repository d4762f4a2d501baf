"""The table and the sentences at the end of a run, from records made by hand."""

import io
import itertools
import re
from pathlib import Path

import pandas
import pytest

from eval.results.captions import describe_data
from eval.results.closing import closing_text
from eval.results.comparison import compare_all
from eval.results.folder import Results
from eval.results.frame import OVERALL, tidy
from eval.results.sentences import findings, sentences
from eval.results.task_sorting import sort_tasks
from eval.results.tuned_settings import ScoredSetting, TunedMethod, TunedSettings
from kvp.data.tasks.ruler import RULER_13

LEARNED = {"policy": "seed0", "policy_seed": 0}
IDENTITY = {"model": "nano", "length": 512, "split": "test", "seed": 3}


def _record(method, budget, example="a", **fields):
    return {
        "method": method, "variant": "auto", "allocator": "uniform", "protected": False,
        "policy": None, "protocol": "query_aware", "task": "niah_single_1", "budget_spec": budget,
        "example": example, "score": None, "nll": None, "reply_tokens": None, "budget": 10,
        "kept_tokens": 10, "cached_tokens": 100, **fields,
    }  # fmt: skip


def _answers(*scores, prompts=40, **fields):
    """Records of every method at its budget; a score is that of all prompts, or those answered."""
    return [
        _record(method, budget, str(n), **fields, **(LEARNED if method == "kvp" else {}),
                score=float(n in score) if isinstance(score, range) else score)
        for method, budget, score in scores for n in range(prompts)
    ]  # fmt: skip


def _compare(records, tuned=(), planned=(), **recorded):
    results = Results(
        folder=Path(), manifest={"planned": planned, "identity": IDENTITY, **recorded},
        records=tuple(records), timing=(), tuned=tuned, notes=(),
    )  # fmt: skip
    return compare_all(results)


def _closing_text(records, planned=()):
    return f"{closing_text(_compare(records, planned=planned))}\n"


def test_seeds_of_a_policy_form_one_line_and_protection_makes_two():
    records = [
        _record("kvp", "6%", **LEARNED, score=1.0),
        _record("kvp", "6%", policy="seed1", policy_seed=1, score=0.0),
        _record("kvp", "6%", **LEARNED, protected=True, score=1.0),
        _record("full", None, score=1.0),
        _record("full", None, "b", nll=3.0, reply_tokens=3),
    ]
    answers, replies = _compare(records)
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
    apart = _closing_text([records[0], _record("full", None, "b", score=1.0)])  # none answered both
    assert "full, kvp, which answered only some of the prompts (95 % interval)\n95" in apart


def test_allocators_have_rows_and_sizes_of_a_method_a_column():
    records = [
        _record("snapkv", "6%", score=1.0),
        _record("snapkv", "6%", score=0.0, allocator="ada(safeguard=0.5)"),
        _record("gvote", "own", allocator="own", score=1.0, kept_tokens=18.4),
        _record("full", None, score=1.0),
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
        _record(method, "25%", str(number), task=task, score=score)
        for method, scores in (("ring", (0.4, 0.4)), ("random", (0.3, 0.9)), ("keydiff", (1, 1)))
        for task, score, count in (("a", scores[0], 9), ("b", scores[1], 1))
        for number in range(count)
    ]
    (comparison,) = _compare(rows)
    keydiff = next(setting for setting in comparison.settings if setting.method == "keydiff")
    gap = comparison.over_null(keydiff, "25%")
    assert gap.mean == pytest.approx(0.4)  # random: 0.6; by prompts ring would be the best


def test_what_was_measured_is_said_in_one_sentence():
    whole = [_record("full", None, task=task, score=1.0) for task in RULER_13]
    other = _record("full", None, task="vt_0shot", score=0.5)
    for records, named in (
        (whole, "13 prompts of exactly RULER's 13 tasks"),
        (whole[:-2], "11 prompts of 11 of RULER's 13 tasks, without qa_1, qa_2"),
        ([*whole, other], "14 prompts of RULER's 13 tasks and 1 more (vt_0shot)"),
        ([whole[0], other], "2 prompts of niah_single_1, vt_0shot"),
        ([other], "1 prompt of vt_0shot"),
    ):
        said = f"nano, {named}, at most 512 tokens, test split, seed 3."
        assert describe_data(_compare(records)[0]) == said


def _sentences(records, tuned=()):
    comparison = _compare(records, tuned)[0]
    return "\n".join(each for each in sentences(comparison) if each != describe_data(comparison))


def test_learned_and_best_methods_are_compared_with_the_full_cache():
    records = [
        _record("full", None, score=0.8),
        _record("oracle", "12.5%", score=0.9),
        _record("kvp", "12.5%", score=0.4, **LEARNED),
        _record("kvp", "12.5%", score=0.72, allocator="global", **LEARNED),
        _record("kvp", "50%", score=0.1, **LEARNED),
        _record("keydiff", "12.5%", score=0.2),
        _record("knorm", "12.5%", score=0.1),
        _record("kvzip", "12.5%", score=0.5),
        _record("kvzip", "12.5%", score=0.6, allocator="global"),
        _record("kvzip", "12.5%", score=0.0, protocol="query_agnostic"),
    ]
    assert _sentences(records) == (
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
    records = _answers(("full", None, 1.0), *scores, prompts=200)
    last = _sentences(records).splitlines()[-1]
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
    records = _answers(("full", None, 1.0), *scores, prompts=60)
    said = _sentences(records)
    _, other, null, *_ = said.splitlines()
    assert re.search(f"The best other method, kvzip .*%.*: {words}[.]$", other), said
    assert said.count("paired by prompt") == 1
    table = tidy(*_compare(records))  # no other test marks the table's differences
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
    records = [row for task in ("niah_single_1", "vt") for row in _answers(*scores, task=task)]
    (comparison,) = _compare(records, policy_tasks={"seed0": tasks, "another": ["vt"]})
    assert words in " ".join(sentences(comparison))


def test_one_method_beside_the_oracle_is_compared():
    pairs = itertools.product((("oracle", 1.0), ("snapkv", 0.0)), ("25%", "50%"))
    scores = ((method, budget, score) for (method, score), budget in pairs)
    (comparison,) = _compare(_answers(("full", None, 1.0), *scores))
    assert {spec for _, spec in comparison.significant} == {"25%", "50%"}


def test_the_correction_counts_the_pairs_of_an_extended_folder():
    first = ("kvp", "12.5%", 1.0), ("snapkv", "12.5%", 0.0)
    later = ("snapkv", "25%", 1.0), ("keydiff", "25%", 0.0), ("random", "25%", 0.0)
    (comparison,) = _compare(_answers(*first, *later))
    _, significant = comparison.differences(comparison.best_at("25%"))
    assert {setting.method for setting in significant} == {"keydiff", "random"}
    assert comparison.test_count == 1 + 3  # with kvp, and the pairs of three methods
    (comparison,) = _compare(_answers(*first, *later, ("oracle", "25%", 1.0)))
    assert comparison.test_count == 1 + 3 + 3  # the oracle with each of the three, too


def test_nulls_are_quoted_apart_and_prompts_choose_no_setting():
    records = [
        _record(method, "25%", score=score, **fields)
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
    ) in _sentences([*records, _record("full", None, score=1.0)])


def test_few_prompts_get_numbers_and_no_verdict():
    def of(prompts):
        scores = ("kvp", "25%", 1.0), ("snapkv", "25%", 0.0)
        (comparison,) = _compare(_answers(*scores, prompts=prompts))
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
        _record(method, budget, score=score)
        for method, budgets, score in (
            ("keydiff", ("1%", "2%", "3%", "12.5%"), 0.5), ("kvzip", ("1%", "2%", "6%"), 1.0),
            ("knorm", ("1%", "2%", "6%"), 0.0),
        )
        for budget in budgets
    ]  # fmt: skip
    said = _sentences(records)
    assert said.startswith("At 2% of the cache")
    assert "the best method, kvzip" in said
    (comparison,) = _compare(records)
    (main, *_) = findings(comparison, comparison.best_at("3%"))
    assert main.startswith("At 3% of the cache")
    assert "the best method, keydiff, answers" in main
    assert comparison.best_at("50%") is None


def test_methods_count_in_the_setting_that_was_tuned():
    records = [
        _record("full", None, score=1.0),
        _record("kvp", "25%", score=0.9, **LEARNED),
        _record("kvp", "25%", score=0.4, allocator="global", **LEARNED),
        _record("kvp", "25%", score=0.5, protected=True, **LEARNED),
        _record("snapkv", "25%", score=0.2),
        _record("snapkv", "25%", score=0.7, protected=True),
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
    text = _sentences(records, (TunedSettings(split="validation", data={}, methods=methods),))
    assert "kvp+global answers 40% (95 % interval 0 to 100)" in text
    assert "The best other method, snapkv, answers 20% (0 to 100): +20.0 points (-100.0 to" in text


def test_sentences_without_answers_are_about_perplexity():
    records = [
        _record("full", None, nll=0.0, reply_tokens=2),
        _record("knorm", "25%", nll=1.3862943611198906, reply_tokens=2),
    ]
    assert _sentences(records) == (
        "At 25% of the cache, with the question seen before compression, the best method, knorm, "
        "has a perplexity of 2.00, the full cache 1.00."
    )
    assert _sentences([_record("full", None, score=0.8)]) == ""
    assert _closing_text([]) == "\n"


def _plan(task, prompts, *methods):
    settings = [[each, "auto", "uniform", None, False, None if each == "full" else "25%"]
                for each in methods]  # fmt: skip
    return {"protocol": "query_aware", "prompts": {task: prompts}, "settings": settings}


def test_unfinished_results_say_so_first_and_rank_nothing():
    others = ("knorm", "25%", 1.0), ("snapkv", "25%", 0.0), ("random", "25%", 0.0)
    records = _answers(("full", None, 1.0), *others, prompts=6)
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
        for row in _answers(("random" if spec else "full", spec, score), prompts=20)
    ]
    assert sort_tasks("answers", records).usable == ("niah_single_1",)


@pytest.mark.parametrize(
    ("full", "null", "metric", "said"),
    [
        (0.3, 0.0, "all", "Set apart: the full cache fails vt (30%)."),
        (0.3, 0.0, "f1", ""),
        (0.3, 0.3, "f1", "Set apart: nothing is lost without context on vt (random at 6%: 30%, "
                         "full 30%, from 2"),
        (0.9, 0.85, "all", "Set apart: nothing is lost without context on vt (random at 6%: 85%, "
                           "full 90%, from 8"),
        (0.9, 0.5, "all", ""),
        (0.4, None, "all", ""),
    ],
)  # fmt: skip
def test_tasks_that_cannot_tell_methods_apart_are_set_apart(full, null, metric, said):
    def of(task, scores):
        found = [
            (method, budget, range(round(100 * score)) if metric == "all" else score)
            for method, score in scores.items()
            if score is not None
            for budget in ((None,) if method == "full" else ("6%", "50%"))
        ]
        return _answers(*found, prompts=100, task=task, metric=metric)

    odd = of("vt", {"full": full, "random": null, "knorm": 0.2})
    sure = of("niah_single_1", {"full": 1.0, "random": 0.0, "knorm": 1.0})
    first, *others = _sentences([*odd, *sure]).splitlines()
    assert first.startswith(said or "At 50% of the cache")
    if said:
        assert "knorm, answers 100% (95 % interval 98 to 100)" in others[0]
        (alone,) = _sentences(odd).splitlines()
        assert alone.startswith(said.replace("Set apart", "No task here can tell methods apart"))


def test_texts_that_need_no_context_are_set_apart():
    def of(gain):
        return _sentences([
            _record("full", None, nll=20.0, reply_tokens=10),
            _record("random", "6%", nll=20.0 + 10 * gain, reply_tokens=10),
            _record("ring", "6%", nll=30.0, reply_tokens=10),  # not the best null
            _record("knorm", "6%", nll=20.0 + 5 * gain, reply_tokens=10),
        ])  # fmt: skip

    assert of(0.04) == (
        "No task here can tell methods apart: nothing is lost without context on niah_single_1 "
        "(random at 6%: full gains 0.04 nats per token)."
    )
    told = of(0.06).splitlines()
    assert "knorm, has a perplexity of 7.61" in told[0]  # exp(2.03)
    words = "random, has a perplexity of 7.85: +0.030 nats per token (+0.000 to +0.030), 0.97 x the"
    assert words in told[1]


def test_every_number_has_its_column():
    records = [
        row
        for task, full, knorm in (("all", 40, 30), ("vt", 4, 8))
        for row in _answers(
            ("full", None, range(full)), ("knorm", "25%", range(knorm)), ("random", "25%", 0.0),
            task=task,
        )
    ]  # fmt: skip
    table = tidy(_compare(records)[0])
    columns = {re.sub("_(low|high|differs)$", "", name) for name in table.columns}
    page = Path("docs/formats.md").read_text(encoding="utf-8")
    assert not [name for name in columns if f"`{name}`" not in page]
    assert table.duplicated(["task", "method", "setting", "budget"]).sum() == 0
    knorm = table[table["method"] == "knorm"].set_index("task")
    assert list(knorm.index) == ["all", "task all", "vt"]  # the second is of the task "all"
    assert list(knorm["apart"]) == [False, False, True]  # vt: full answers 10 %
    assert list(knorm["estimate"]) == [0.75, 0.75, 0.2]
    assert list(knorm["n"]) == [40, 40, 40]
    assert list(knorm["share_of_full"].fillna(-1)) == [0.75, 0.75, -1]
    assert list(knorm["minus_full"].fillna(-1)) == [-0.25, -0.25, -1]
    assert knorm["minus_full_low"]["all"] < -0.25 < knorm["minus_full_high"]["all"] < 0
    assert list(knorm["minus_full_differs"]) == [True, True, False]
    others = table[(table["task"] == "all") & (table["method"] == "random")].iloc[0]
    assert others["minus_lead"] == -0.75  # knorm leads
    assert pandas.read_csv(io.StringIO(table.to_csv()))["estimate"].dtype.kind == "f"
