"""The sentence under the closing table, from records made by hand."""

from __future__ import annotations

from typing import Any

from eval.summary import conclusion


def _record(method: str, budget: str | None, **fields: Any) -> dict[str, Any]:
    return {
        "method": method, "variant": "auto", "allocator": "uniform", "protected": False,
        "policy": None, "protocol": "query_aware", "task": "niah_single_1", "budget_spec": budget,
        "example": "a", "score": None, "nll": None, "reply_tokens": None, **fields,
    }  # fmt: skip


def test_learned_attention_free_and_best_methods_are_compared_with_the_full_cache() -> None:
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
    assert conclusion(records) == (
        "At 12.5% of the cache (the question seen before compression) kvp+global answers 90% of "
        "what the full cache answers; the best attention-free method without training, keydiff, "
        "25%; the best method without training, kvzip, 75%."
    )


def test_nulls_are_named_apart() -> None:
    records = [
        _record("full", None, score=1.0),
        _record("ring", "25%", score=0.5),
        _record("random", "25%", score=0.6),
        _record("knorm", "25%", score=0.4),
    ]
    assert conclusion(records).endswith(
        "the best method without training, knorm, answers 40% of what the full cache answers; "
        "the best null, random, 60%."
    )


def test_without_answers_the_sentence_is_about_perplexity() -> None:
    records = [
        _record("full", None, nll=0.0, reply_tokens=2),
        _record("knorm", "25%", nll=1.3862943611198906, reply_tokens=2),
    ]
    assert conclusion(records) == (
        "At 25% of the cache (the question seen before compression) the best method without "
        "training, knorm, has 2.00 times the perplexity of the full cache."
    )


def test_nothing_to_compare_says_nothing() -> None:
    assert conclusion([_record("full", None, score=0.8)]) == ""
    assert conclusion([]) == ""
