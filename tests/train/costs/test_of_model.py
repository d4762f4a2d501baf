"""Seconds from data sheets; the table of a 7B model as README shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from train.costs.of_model import assumed_seconds
from train.costs.plan import Plan
from train.costs.table import recommendation, table_lines
from train.costs.ways import costs_of, recommended

from kvp.hf import load_config
from train.config import TrainConfig
from train.dry_run import planned


@pytest.fixture(scope="module")
def qwen() -> Plan:
    folder = str(Path(__file__).parents[3] / "benchmarks" / "configs" / "qwen2.5-7b")
    config = TrainConfig(out="p", dry_run=True, model=folder, dtype="bfloat16", length=4096)
    return planned(config, load_config(folder))


def lines(plan: Plan) -> list[str]:
    seconds = assumed_seconds(plan, "h100")
    return table_lines(plan, seconds, costs_of(plan, seconds))


def test_the_table_of_a_7b_model(qwen: Plan) -> None:
    assert lines(qwen)[:5] == [
        "28 layers x 4 KV heads (28 query heads, head_dim 128), 7.62 B parameters, bfloat16; "
        "100 training and 40 validation sequences of at most 4096 + 128 tokens; 300 steps of 4 "
        "contexts",
        "way                   disk      RAM      GPU  collecting  training  in all",
        "full traces       106.8 GB  38.7 GB  18.4 GB       6 min    23 min  29 min",
        "importance store   28.9 GB  35.1 GB  21.0 GB       3 min     3 min   6 min",
        "--source model        none  38.9 GB  31.6 GB       3 min      38 s   3 min",
    ]
    assert lines(qwen)[5].startswith("disk, RAM and GPU memory: counted, with --memory_gb 49")
    assert lines(qwen)[6].startswith("times: assumed, not measured: h100, 40% of the peak")


def test_the_sentence_names_the_way_and_when_another_is_better(qwen: Plan) -> None:
    costs = costs_of(qwen, assumed_seconds(qwen, "h100"))
    text = recommendation(recommended(costs), costs)
    assert text.startswith("recommended: --source model, 3 min in all and nothing on disk")
    assert "collect once (importance store: 3 min each" in text
    assert recommendation(costs[1], costs).endswith("on disk")


def test_a_model_that_does_not_fit_is_named(qwen: Plan) -> None:
    large = replace(qwen, model=replace(qwen.model, parameters=70_553_706_496))
    assert lines(large)[-1].startswith(
        "warning: full traces, importance store, --source model: more than the 80.0 GB of one GPU"
    )
    smaller = replace(large, config=replace(large.config, quantization="4bit"))
    assert not any("warning" in line for line in lines(smaller))


def test_answers_in_batches_and_faster_devices_take_less_time(qwen: Plan) -> None:
    one, eight = (assumed_seconds(replace(qwen, batch=n), "h100").sequence for n in (1, 8))
    assert eight < one / 3
    assert assumed_seconds(qwen, "a100").training.step > assumed_seconds(qwen, "h200").training.step
