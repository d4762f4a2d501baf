"""The size of a ranker is that of its tensors; a step is measured on the clock that is given."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvp.costs import Lengths, ModelSize, Plan, TrainingSize
from kvp.geometry import Geometry
from policies.ranker import HeadRankers, RankerSpec, parameters_per_head
from policies.ranker_rate import measured_ranker_flops, ranker_flops_of, size_of_ranker
from train.optim.muon import Muon

SPEC = RankerSpec(head_dim=16, hidden=32, neighbours=3)


def test_products_are_those_of_the_network() -> None:
    size = size_of_ranker(SPEC)
    assert size.parameters == parameters_per_head(SPEC)
    rankers, tokens = HeadRankers(SPEC, 2), 50
    keys = torch.randn(2, tokens, 16)
    with FlopCounterMode(display=False) as counter:
        scores = rankers(keys, keys, torch.arange(tokens), tokens)
    forward = counter.get_total_flops()
    assert forward == pytest.approx(2 * 2 * tokens * size.products, rel=0.05)  # less the last layer
    with FlopCounterMode(display=False) as counter:
        scores.sum().backward()
    assert counter.get_total_flops() < 2.1 * forward
    optimizer = Muon(rankers, lr=0.1, weight_decay=0.0)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == pytest.approx(2 * size.update_flops, rel=0.01)


def test_operations_per_second_follow_the_clock() -> None:
    seconds = itertools.count(0, 2)
    rate = measured_ranker_flops(
        SPEC, heads=2, tokens=100, device=torch.device("cpu"), clock=lambda: float(next(seconds))
    )
    assert rate == 6 * size_of_ranker(SPEC).products * 100 * 2 / 2


def test_a_plan_says_how_many_rankers_and_tokens_a_step_has() -> None:
    plan = Plan(
        model=ModelSize(
            geometry=Geometry(layers=1, query_heads=4, kv_heads=2, head_dim=16),
            layers=1,
            parameters=1000,
            layer_parameters=400,
            head_parameters=100,
            hidden=16,
            intermediate=32,
        ),
        dtype="float32",
        lengths=Lengths(prompt=90, answer=10),
        max_tokens=100,
        train=4,
        validation=1,
        ranker=size_of_ranker(SPEC),
        training=TrainingSize(contexts=3, uniform_weight=0.0),
        buffer=4,
        traced=4,
        points=1,
    )
    seconds = itertools.count(0, 2)
    measured = ranker_flops_of(SPEC, plan)
    rate = measured(torch.device("cpu"), lambda: float(next(seconds)))
    assert rate == 6 * size_of_ranker(SPEC).products * (3 * 90) * 2 / 2
