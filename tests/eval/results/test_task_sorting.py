"""Tasks that cannot tell methods apart."""

import pytest
from toy_results import hand_answers, hand_record, sentences_of


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
        return hand_answers(*found, prompts=100, task=task, metric=metric)

    odd = of("vt", {"full": full, "random": null, "knorm": 0.2})
    sure = of("niah_single_1", {"full": 1.0, "random": 0.0, "knorm": 1.0})
    first, *others = sentences_of([*odd, *sure]).splitlines()
    assert first.startswith(said or "At 50% of the cache")
    if said:
        assert "knorm, answers 100% (95 % interval 98 to 100)" in others[0]
        (alone,) = sentences_of(odd).splitlines()
        assert alone.startswith(said.replace("Set apart", "No task here can tell methods apart"))


def test_texts_that_need_no_context_are_set_apart():
    def of(gain):
        return sentences_of([
            hand_record("full", None, nll=20.0, reply_tokens=10),
            hand_record("random", "6%", nll=20.0 + 10 * gain, reply_tokens=10),
            hand_record("ring", "6%", nll=30.0, reply_tokens=10),  # not the best null
            hand_record("knorm", "6%", nll=20.0 + 5 * gain, reply_tokens=10),
        ])  # fmt: skip

    assert of(0.04) == (
        "No task here can tell methods apart: nothing is lost without context on niah_single_1 "
        "(random at 6%: full gains 0.04 nats per token)."
    )
    told = of(0.06).splitlines()
    assert "knorm, has a perplexity of 7.61" in told[0]  # exp(2.03)
    words = "random, has a perplexity of 7.85: +0.030 nats per token (+0.000 to +0.030), 0.97 x the"
    assert words in told[1]
