"""What dry runs print: the table of Qwen2.5-7B and 70B shapes as it is, and its sentences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvp.costs import (
    Lengths,
    ModelSize,
    Plan,
    RankerSize,
    TrainingSize,
    assumed_rates,
    costs_of,
    recommendation,
    recommended,
    span,
    table_lines,
)
from kvp.geometry import Geometry

QWEN = Plan(
    model=ModelSize(
        geometry=Geometry(layers=28, query_heads=28, kv_heads=4, head_dim=128),
        layers=28,
        parameters=7_615_616_512,
        layer_parameters=233_057_920,
        head_parameters=544_997_376,
        hidden=3584,
        intermediate=18944,
    ),
    dtype="bfloat16",
    lengths=Lengths(prompt=4096, answer=128),
    max_tokens=4224,
    train=100,
    validation=40,
    ranker=RankerSize(
        parameters=291_009, products=287_584, token_bytes=14_840, update_flops=1_617_701_750.0
    ),
    training=TrainingSize(),
    buffer=100,
    traced=100,
    points=18,
    batch=3,
)


def lines(plan: Plan, device: str = "h100") -> list[str]:
    rates = assumed_rates(device, plan.model, plan.lengths, 2, plan.batch)
    return table_lines(plan, rates, costs_of(plan, rates))


def test_the_table_of_a_7b_model() -> None:
    assert lines(QWEN)[:5] == [
        "28 layers x 4 KV heads (28 query heads, head_dim 128), 7.62 B parameters, bfloat16; "
        "100 training and 40 validation sequences of at most 4096 + 128 tokens; 1,000 steps of 8 "
        "contexts",
        "way                   disk      RAM      GPU  collecting  training  in all",
        "full traces       106.8 GB  41.7 GB  19.0 GB       6 min    64 min  71 min",
        "importance store   28.9 GB  36.6 GB  21.0 GB       3 min    10 min  13 min",
        "--source model        none  40.4 GB  37.4 GB       4 min     9 min  12 min",
    ]


def test_the_table_of_a_thousand_sequences() -> None:
    """A tenth are held at a time, each in eight epochs."""
    rolling = replace(QWEN, train=1000, traced=1087, points=8, epochs=8)
    assert lines(rolling)[1:5] == [
        "way                   disk      RAM      GPU  collecting  training   in all",
        "full traces       793.5 GB  43.8 GB  19.0 GB      47 min     3.5 h    4.3 h",
        "importance store  214.9 GB  43.0 GB  21.0 GB      22 min    94 min  116 min",
        "--source model        none  38.7 GB  37.4 GB      28 min     9 min   37 min",
    ]


def test_every_number_says_where_it_comes_from() -> None:
    counted, times = lines(QWEN)[5:7]
    assert counted.startswith("disk, RAM and GPU memory: counted, with --memory_gb 51")
    assert times.startswith("times: assumed, not measured: h100, 40% of the peak of products")


def test_a_model_that_does_not_fit_is_named() -> None:
    large = replace(QWEN, model=replace(QWEN.model, parameters=70_553_706_496))
    warning = lines(large)[-1]
    assert warning.startswith("warning: full traces, importance store, --source model: more than")
    assert "--quantization 8bit or 4bit" in warning
    assert not any("warning" in line for line in lines(replace(large, quantization="4bit")))


def test_answers_in_batches_take_less_time() -> None:
    rates = assumed_rates("h100", QWEN.model, QWEN.lengths, 2, 1)
    alone, batched = (replace(QWEN, batch=batch) for batch in (1, 8))
    faster = assumed_rates("h100", QWEN.model, QWEN.lengths, 2, 8)
    one, eight = (
        costs_of(plan, speeds)[-1].collect_seconds
        for plan, speeds in ((alone, rates), (batched, faster))
    )
    assert eight < one / 3


def test_the_sentence_names_the_way_and_when_another_is_better() -> None:
    rates = assumed_rates("h100", QWEN.model, QWEN.lengths, 2, 1)
    costs = costs_of(QWEN, rates)
    best = recommended(costs)
    assert best.way == "--source model"
    assert best.seconds < 3600  # the target: less than an hour of an H100
    text = recommendation(best, costs)
    assert text.startswith(f"recommended: --source model, {span(best.seconds)} in all and nothing")
    assert "collect once (importance store" in text
    assert recommendation(costs[1], costs).endswith("on disk")


@pytest.mark.parametrize(("seconds", "text"), [(61, "61 s"), (600, "10 min"), (9000, "2.5 h")])
def test_time_spans_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text
