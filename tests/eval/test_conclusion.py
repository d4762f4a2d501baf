"""The sentence under the closing table, from records made by hand."""

from __future__ import annotations

import re
from typing import Any

from eval.conclusion import conclusion
from eval.summary import headlines
from eval.tune.settings_file import Scored, Tuned, TunedSettings


def _record(method: str, budget: str | None, **fields: Any) -> dict[str, Any]:
    return {
        "method": method, "variant": "auto", "allocator": "uniform", "protected": False,
        "policy": None, "protocol": "query_aware", "task": "niah_single_1", "budget_spec": budget,
        "example": "a", "score": None, "nll": None, "reply_tokens": None, **fields,
    }  # fmt: skip


def test_learned_and_best_methods_are_compared_with_the_full_cache() -> None:
    learned = {"policy": "seed0", "policy_seed": 0}
    records = [
        _record("full", None, score=0.8),
        _record("oracle", "12.5%", score=0.9),
        _record("kvp", "12.5%", score=0.4, **learned),
        _record("kvp", "12.5%", score=0.72, allocator="global", **learned),
        _record("kvp", "50%", score=0.1, **learned),
        _record("keydiff", "12.5%", score=0.2),
        _record("knorm", "12.5%", score=0.1),
        _record("kvzip", "12.5%", score=0.6),
        _record("kvzip", "12.5%", score=0.0, protocol="query_agnostic"),
    ]
    assert conclusion(headlines(records)) == (
        "At 12.5% of the cache (the question seen before compression) kvp+global answers 90% of "
        "what the full cache answers; the best method without training, kvzip, 75%.\n"
        "Paired by prompt, in points (95 % interval): kvp+global minus kvzip +12.0 "
        "(-100.0 to +100.0).\n"
        "None of these differences can be told from 0 with these prompts."
    )


def test_the_budget_that_is_enough_is_told_where_there_are_several_budgets() -> None:
    records = [_record("full", None, score=0.8)]
    for budget, ours, theirs in (("6%", 0.7, 0.1), ("12.5%", 0.77, 0.5), ("25%", 0.8, 0.6)):
        records.append(_record("kvp", budget, score=ours, policy="seed0", policy_seed=0))
        records.append(_record("snapkv", budget, score=theirs))
    (sentence,) = (line for line in conclusion(headlines(records)).splitlines() if "95%" in line)
    assert sentence == (
        "95% of the full cache's answers take 12.5% with kvp, more than was measured with snapkv."
    )


def test_the_sentences_have_the_resamples_of_the_tables() -> None:
    records = [_record("full", None, score=1.0)]
    for number in range(9):
        example = str(number)
        records.append(_record("random", "12.5%", score=float(number < 5), example=example))
        records.append(_record("kvzip", "12.5%", score=float(number > 1), example=example))
    few, many, again = (conclusion(headlines(records, resamples=n)) for n in (20, 500, 500))
    assert few != many == again


def test_a_difference_is_marked_where_it_survives_the_correction() -> None:
    records = [_record("full", None, score=1.0)]
    for number in range(60):
        learned = {"policy": "seed0", "policy_seed": 0, "example": str(number)}
        records += [
            _record("kvp", "12.5%", score=float(number < 45), **learned),
            _record("random", "12.5%", score=float(number < 15), example=str(number)),
            # five prompts answered by one of the two alone, one the other way: p is near 0.1
            _record("kvzip", "12.5%", score=float(4 < number < 46), example=str(number)),
        ]
    text = conclusion(headlines(records))
    first, second = re.findall(r"minus (.*?\)(?: \*)?)[,.]", text)
    assert re.fullmatch(r"kvzip \+6\.7 \(-\d\.\d to \+1\d\.\d\)", first)
    assert re.fullmatch(r"random \+50\.0 \(\+3\d\.\d to \+6\d\.\d\) \*", second)
    assert "* differs from 0 at 5 %, corrected for the number of differences (Holm)." in text


def test_nulls_are_named_apart() -> None:
    records = [
        _record("full", None, score=1.0),
        _record("ring", "25%", score=0.5),
        _record("random", "25%", score=0.6),
        _record("knorm", "25%", score=0.4),
    ]
    assert (
        "the best method without training, knorm, answers 40% of what the full cache answers; "
        "the best null, random, 60%.\nPaired by prompt, in points (95 % interval): knorm minus "
        "random -20.0 (-100.0 to +100.0).\n"
    ) in conclusion(headlines(records))


def test_settings_are_not_chosen_on_the_prompts_shown() -> None:
    records = [
        _record("full", None, score=1.0),
        _record("keydiff", "25%", score=0.9),
        _record("keydiff", "25%", score=0.8, allocator="global", protected=True),
        _record("keydiff", "25%", score=0.3, protected=True),
        _record("snapkv", "25%", score=0.2),  # below 20 tokens, say: run without protection only
    ]
    assert "the best method without training, keydiff +p, answers 30%" in conclusion(
        headlines(records)
    )


def test_methods_count_in_the_setting_that_was_tuned() -> None:
    learned = {"policy": "seed0", "policy_seed": 0}
    records = [
        _record("full", None, score=1.0),
        _record("kvp", "25%", score=0.9, **learned),
        _record("kvp", "25%", score=0.4, allocator="global", **learned),
        _record("kvp", "25%", score=0.5, protected=True, **learned),
        _record("snapkv", "25%", score=0.2),
        _record("snapkv", "25%", score=0.7, protected=True),
    ]
    settings = TunedSettings(
        split="validation", data={}, methods=(_tuned("kvp", "global"), _tuned("snapkv"))
    )
    text = conclusion(headlines(records), [settings])
    assert "kvp+global answers 40% of what the full cache answers" in text
    assert "the best method without training, snapkv, 20%" in text
    assert "minus snapkv +20.0" in text


def _tuned(method: str, allocator: str = "uniform") -> Tuned:
    chosen = Scored(
        scorer=method, variant="auto", allocator=allocator, protected=False,
        score=0.5, interval=(0.4, 0.6),
    )  # fmt: skip
    return Tuned(
        method=method, group="", requested=method, protocol="query_aware", chosen=chosen,
        published=(), tried=4, exhausted=True, open_ends=(),
    )  # fmt: skip


def test_without_answers_the_sentence_is_about_perplexity() -> None:
    records = [
        _record("full", None, nll=0.0, reply_tokens=2),
        _record("knorm", "25%", nll=1.3862943611198906, reply_tokens=2),
    ]
    assert conclusion(headlines(records)) == (
        "At 25% of the cache (the question seen before compression) the best method without "
        "training, knorm, has 2.00 times the perplexity of the full cache."
    )


def test_nothing_to_compare_says_nothing() -> None:
    assert conclusion(headlines([_record("full", None, score=0.8)])) == ""
    assert conclusion(headlines([])) == ""
