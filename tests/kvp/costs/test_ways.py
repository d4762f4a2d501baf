"""Every part of a cost against numbers counted by hand, one rate at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvp.costs import ONLINE, Lengths, Plan, Rates, costs_of, recommended
from kvp.costs.memory import Memory, collecting_memory, online_memory, training_memory
from kvp.store import planned_bytes

FULL, IMPORTANCE, MODEL = range(3)
PROMPT = 2 * (2 * 400 * 90 + 100) + 2 * 2 * 4 * 8 * 90**2
"""Operations of a forward pass over 90 tokens: weights, output head, causal attention."""
WHOLE = 2 * (2 * 400 * 100 + 100) + 2 * 2 * 4 * 8 * 100**2
AGAIN = 2 * (2 * 400 + 100) * 10 + 2 * 4 * 4 * 8 * (90 * 10 + 10**2 / 2)
"""Of feeding 10 tokens to a cache of 90: weights and output head of each, attention to 95 keys."""


def test_the_model_reads_a_prompt_once_and_its_answer_once_more(plan: Plan, free: Rates) -> None:
    rates = replace(free, prompt_flops=1.0)
    costs = costs_of(plan, rates)
    assert [cost.collect_seconds for cost in costs] == [24 * (PROMPT + AGAIN)] * 3
    given = replace(plan, lengths=replace(plan.lengths, answers="reference"))
    assert costs_of(given, rates)[FULL].collect_seconds == 24 * WHOLE
    twice = replace(plan, labels=1)
    assert costs_of(twice, rates)[FULL].collect_seconds == 24 * (3 * PROMPT + AGAIN)
    both = replace(given, labels=1)
    assert costs_of(both, rates)[FULL].collect_seconds == 24 * (3 * PROMPT + WHOLE)


def test_prompts_that_were_made_count(plan: Plan, free: Rates) -> None:
    made = replace(plan, lengths=replace(plan.lengths, make_seconds=0.5))
    for answers in ("model", "reference"):
        lengths = replace(made.lengths, answers=answers)
        for cost in costs_of(replace(made, lengths=lengths), free):
            assert cost.collect_seconds == pytest.approx(24 * 0.5)


def test_answers_are_decoded_token_by_token_and_in_batches(plan: Plan, free: Rates) -> None:
    rates = replace(free, decode_layer_seconds=1.0, decode_step_seconds=0.5)
    assert costs_of(plan, rates)[FULL].collect_seconds == 24 * 10 * (2 + 0.5)
    batched = replace(plan, batch=5)
    assert costs_of(batched, rates)[FULL].collect_seconds == 24 * 10 * (2 + 0.5) / 5


def test_a_given_rate_replaces_the_model(plan: Plan, free: Rates) -> None:
    rates = replace(free, prompt_flops=1.0, write_bytes=1.0)
    free_model = costs_of(plan, replace(rates, prompt_flops=math.inf))[FULL].collect_seconds
    cost = costs_of(plan, rates, tokens_per_second=50.0)[FULL]
    assert cost.collect_seconds == pytest.approx(free_model + 24 * 100 / 50)


def test_stores_are_written_and_read_as_large_as_planned(plan: Plan, free: Rates) -> None:
    raw = planned_bytes(plan.model.geometry, dtype="float32", tokens=100)
    cost = costs_of(plan, replace(free, write_bytes=1.0))[FULL]
    assert cost.collect_seconds == pytest.approx(24 * raw)
    assert cost.disk_bytes == round(24 * raw * 0.9)
    # every sequence once, validation ones once more for each of two other labels,
    # and keys and values of the training sequences for the statistics of features
    read = costs_of(plan, replace(free, read_bytes=1.0))[FULL]
    keys_values = planned_bytes(plan.model.geometry, dtype="float32", tokens=100, store="kv")
    assert read.train_seconds == pytest.approx(
        (20 + 4 + 8) * raw + (44 - 32) * keys_values, rel=1e-4
    )


def test_an_importance_store_has_rates_of_its_own(plan: Plan, free: Rates) -> None:
    keys_values, whole = (
        planned_bytes(
            plan.model.geometry,
            dtype="float32",
            tokens=100,
            store=store,
            grid=4 if store == "importance" else 0,
        )
        for store in ("kv", "importance")
    )
    packed = costs_of(plan, replace(free, write_importance_bytes=1.0))
    assert packed[IMPORTANCE].collect_seconds == pytest.approx(24 * whole)
    assert packed[FULL].collect_seconds < 1e-6
    looked_up = costs_of(plan, replace(free, read_grid_bytes=1.0))[IMPORTANCE].train_seconds
    pictures = 2 * 0.6
    # a label of every training sequence, three of every validation sequence
    assert looked_up == pytest.approx((20 + 3 * 4) * (whole - keys_values) + pictures)


def test_little_memory_reads_sequences_again(plan: Plan, free: Rates) -> None:
    rates = replace(free, read_bytes=1.0)
    training = replace(plan.training, steps=1000, memory_bytes=1.0)
    long = replace(plan, training=training, buffer=1)
    small = replace(long, max_tokens=1)  # the buffer of a running model asks for next to nothing
    assert small.memory_gb == 1
    less = replace(small, lengths=Lengths(prompt=900_000, answer=100_000))
    much = replace(less, training=replace(training, memory_bytes=1e12))
    assert costs_of(less, rates)[FULL].train_seconds > 5 * costs_of(much, rates)[FULL].train_seconds


def test_a_step_is_three_passes_and_an_update_of_every_head(plan: Plan, free: Rates) -> None:
    rates = replace(free, ranker_flops=1.0)
    step = 4 * (2 * 90 * 40 * 6 + 1000)
    # validations after 5 and 10 steps and the last evaluation, with its baselines
    held_out = 4 * 90 * (3 * 3 * 2 * 40 + 3 * 6e5) + 2 * 0.6
    expected = 10 * step + held_out
    assert costs_of(plan, rates)[MODEL].train_seconds == pytest.approx(expected)
    again = replace(plan, training=replace(plan.training, activation_bytes=1.0))
    assert costs_of(again, rates)[MODEL].train_seconds == pytest.approx(
        expected + 10 * 4 * 2 * 90 * 40 * 2
    )


def test_labels_count_pairs_of_the_future(plan: Plan, free: Rates) -> None:
    # points before the answer: all 10 future queries, each once, with all keys up to its own
    rates = replace(free, pairs=1.0)
    pairs = 10 * 95 * 2 * 4
    once = 1.0  # a share of 1 is met by one draw
    assert plan.training.point_counts(1, plan.lengths) == (once, 0.0, 0.0)
    validation = 4 * 0.5 * 3 * pairs  # three labels at one of two points
    online = costs_of(plan, rates)[MODEL].collect_seconds
    assert online == pytest.approx(20 * pairs + 2 * validation)
    grid = costs_of(plan, replace(free, grid_pairs=1.0))[IMPORTANCE].collect_seconds
    # maxima over the causal square of every query head, sums from its middle on
    assert grid == pytest.approx(24 * (1 + 3 / 4) * 100**2 / 2 * 2 * 4)


def test_labels_anywhere_count_a_third_of_the_square(plan: Plan) -> None:
    training = replace(plan.training, uniform_points=4)
    assert training.label_pairs((0, 0, 3.0), plan.lengths) == pytest.approx(3 * 100**2 / 3)
    exact = sum((100 - n) * (100 + n) / 2 for n in range(100)) / 100
    assert training.label_pairs((0, 0, 1.0), plan.lengths) == pytest.approx(exact, rel=0.01)


def test_an_accelerator_computes_while_a_store_is_written(plan: Plan, free: Rates) -> None:
    rates = replace(free, write_bytes=1.0, decode_step_seconds=1.0)
    written = 24 * planned_bytes(plan.model.geometry, dtype="float32", tokens=100)
    alone = costs_of(plan, rates)[FULL].collect_seconds
    assert alone == pytest.approx(written + 24 * 10)
    beside = costs_of(plan, replace(rates, accelerator=True))[FULL].collect_seconds
    assert beside == pytest.approx(written)


def test_an_accelerator_reads_while_it_computes(plan: Plan, free: Rates) -> None:
    rates = replace(free, read_bytes=1.0, ranker_flops=1.0)
    alone = costs_of(plan, rates)[FULL].train_seconds
    beside = costs_of(plan, replace(rates, accelerator=True))[FULL].train_seconds
    reading = costs_of(plan, replace(free, read_bytes=1.0))[FULL].train_seconds
    steps = 10 * 4 * (2 * 90 * 40 * 6 + 1000)
    assert alone - beside == pytest.approx(min(reading, steps))


def test_memory_of_every_program(plan: Plan) -> None:
    qkv = planned_bytes(plan.model.geometry, dtype="float32", tokens=100)
    weights = 4 * 1000
    alone, beside = (collecting_memory(plan, here, "qkv") for here in (False, True))
    assert beside.device_bytes > weights + qkv
    assert alone.device_bytes == 0
    assert alone.ram_bytes == pytest.approx(beside.ram_bytes + beside.device_bytes)
    # a store that fits is remembered whole
    assert training_memory(plan, True, "qkv").ram_bytes >= 24 * qkv
    bare = training_memory(plan, True, "importance").ram_bytes
    assert training_memory(plan, True, "qkv").ram_bytes - bare >= 24 * qkv / 2  # its queries
    quantised = replace(plan, quantization="4bit")
    saved = online_memory(plan, True).device_bytes - online_memory(quantised, True).device_bytes
    assert saved == 1000 * 3.5


def test_the_buffer_asks_for_what_kvp_train_asks(plan: Plan) -> None:
    keys_values = planned_bytes(plan.model.geometry, dtype="float32", tokens=100, store="kv")
    point = 4 * 4 * 100
    assert plan.buffer_bound == 20 * (keys_values + point) + 4 * (keys_values + 6 * point)
    assert plan.memory_gb == 1
    queries = planned_bytes(plan.model.geometry, dtype="float32", tokens=100)
    assert replace(plan, points=100).buffer_bound == 24 * queries


def test_points_that_are_kept_are_those_that_there_are(plan: Plan) -> None:
    training = replace(plan.training, uniform_points=4)
    assert [training.points(epochs) for epochs in (1, 6, 80)] == [1, 6, 6]
    assert replace(training, uniform_points=0).points(80) == 80


def test_labels_of_a_grid_take_their_bytes(plan: Plan) -> None:
    one, two = (replace(plan, grid=40, grid_labels=n).stored_bytes("importance") for n in (1, 2))
    assert two - one == pytest.approx(0.9 * 24 * 100 * 4 * (40 - 4) * 2, abs=1)


def test_the_fastest_way_that_fits_is_recommended(plan: Plan, free: Rates) -> None:
    full, importance, model = costs_of(plan, free)
    rows = [
        replace(full, train_seconds=100.0),
        replace(importance, train_seconds=80.0),
        replace(model, train_seconds=85.0),
    ]
    assert recommended(rows).way == ONLINE  # a little slower, and nothing on disk
    rows[MODEL] = replace(rows[MODEL], train_seconds=99.0)
    assert recommended(rows).way == "importance store"
    large = Memory(ram_bytes=1e12)
    rows[IMPORTANCE] = replace(rows[IMPORTANCE], memory=large)
    assert recommended(rows, ram_bytes=1e9).way == ONLINE
    everything = [replace(row, memory=large) for row in rows]
    everything[FULL] = replace(everything[FULL], memory=Memory(ram_bytes=1e11))
    assert recommended(everything, ram_bytes=1e9).way == "full traces"
