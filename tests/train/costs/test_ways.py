"""Parts are added up as they happen; numbers counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from train.costs.memory import Memory, collecting_memory, online_memory, training_memory
from train.costs.plan import Plan
from train.costs.ways import (
    ONLINE,
    Seconds,
    StoreSeconds,
    TrainingSeconds,
    costs_of,
    recommended,
)

from kvp.costs import Lengths, ModelSize, span
from kvp.geometry import Geometry
from kvp.store import planned_bytes
from train.config import TrainConfig

GEOMETRY = Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8)
MODEL = ModelSize(
    geometry=GEOMETRY,
    layers=2,
    parameters=1000,
    layer_parameters=400,
    head_parameters=100,
    hidden=16,
    intermediate=32,
)
CONFIG = TrainConfig(
    out="p",
    dry_run=True,
    steps=10,
    contexts=2,
    compress_prompt=1.0,
    compress_context=0.0,
    compress_uniform=0.0,
    validate_every=5,
    validation_contexts=3,
    calibration="none",
    memory_gb=1.0,
    length=90,
    max_new_tokens=10,
)
PLAN = Plan(
    config=CONFIG,
    geometry=GEOMETRY,
    dtype="float32",
    model=MODEL,
    lengths=Lengths(prompt=90, answer=10, make_seconds=0.5),
    train=20,
    validation=4,
    buffer=20,
    traced=20,
    kept_points=1,
)
SECONDS = Seconds(
    source="made up",
    accelerator=False,
    sequence=3.0,
    stores={
        "qkv": StoreSeconds(write=7.0, read=100.0, exact=1000.0, anywhere=1e9),
        "importance": StoreSeconds(grid=5.0, write=9.0, read=200.0, exact=2000.0, anywhere=1e9),
    },
    training=TrainingSeconds(step=1e4, evaluated=1e5, compared=1e6),
)
KV, QKV = (
    planned_bytes(GEOMETRY, dtype="float32", tokens=100, store=store) for store in ("kv", "qkv")
)
HELD_OUT = 2 * 3 * 1e5 + 3 * 1e6
"""Validations after 5 and 10 steps, and the last evaluation."""


def test_every_part_counts_as_often_as_it_happens() -> None:
    full, importance, online = costs_of(PLAN, SECONDS)
    assert full.collect_seconds == 24 * (0.5 + 3 + 7)
    assert importance.collect_seconds == 24 * (0.5 + 3 + 5 + 9)
    # 20 training sequences are read and labelled once, 4 validation sequences for two labels
    assert full.train_seconds == 1e5 + 28 * 100 + (20 + 2 * 3) * 1000 + HELD_OUT
    assert importance.train_seconds == 1e5 + 28 * 200 + (20 + 2 * 3) * 2000 + HELD_OUT
    assert online.collect_seconds == 24 * (0.5 + 3) + (20 + 2 * 3) * 1000
    assert online.train_seconds == 1e5 + HELD_OUT


def test_an_accelerator_computes_while_a_store_is_written_and_read() -> None:
    full = costs_of(PLAN, replace(SECONDS, accelerator=True))[0]
    assert full.collect_seconds == 24 * 7
    assert full.train_seconds == 1e5 + HELD_OUT


def test_points_are_met_once() -> None:
    assert PLAN.points(1) == (1, 0)
    config = replace(CONFIG, compress_uniform=3.0, uniform_points=4, min_prefix=50)
    exact, anywhere = replace(PLAN, config=config).points(2)
    assert exact == pytest.approx(1 - 0.75**2)
    assert anywhere == pytest.approx(4 * (1 - (1 - 3 / 16) ** 2))
    assert replace(PLAN, config=config).prefix == pytest.approx(90 / 4 + 75 * 3 / 4)


def test_little_memory_reads_and_labels_again() -> None:
    long = Lengths(prompt=900_000, answer=100_000)  # a buffer for prompts of 90 tokens
    plan = replace(PLAN, lengths=long, config=replace(CONFIG, steps=1000))
    much = replace(plan, config=replace(plan.config, memory_gb=1e6))
    few, many = (costs_of(one, SECONDS)[0].train_seconds for one in (much, plan))
    assert few == 1e7 + 28 * 100 + 26 * 1000 + 200 * 3 * 1e5 + 3e6
    assert many > few + 1000 * 1000


def test_bytes_of_stores_and_buffers() -> None:
    assert PLAN.stored_bytes("qkv") == round(24 * QKV * 0.9)
    point = 4 * 4 * 100
    assert PLAN.buffer_bytes(20, 100, 1) == 20 * (KV + point) + 4 * (KV + 6 * point)
    assert PLAN.buffer_bytes(20, 100, 99) == 24 * QKV
    reading = replace(PLAN, config=replace(CONFIG, inputs="key,recent"))
    assert reading.buffer_bytes(20, 100, 1) == 24 * QKV
    assert (PLAN.stores, reading.stores) == (("qkv", "importance"), ("qkv",))


def test_memory_of_every_program() -> None:
    alone, beside = (collecting_memory(PLAN, here, "qkv") for here in (False, True))
    assert beside.device_bytes > 4 * 1000 + QKV
    assert alone.device_bytes == 0
    assert alone.ram_bytes == pytest.approx(beside.ram_bytes + beside.device_bytes)
    bare = training_memory(PLAN, True, "importance").ram_bytes
    assert training_memory(PLAN, True, "qkv").ram_bytes - bare > 0.9 * 24 * QKV / 2  # its queries
    quantised = replace(PLAN, config=replace(CONFIG, quantization="4bit"))
    saved = online_memory(PLAN, True).device_bytes - online_memory(quantised, True).device_bytes
    assert saved == 1000 * 3.5


def test_the_fastest_way_that_fits_is_recommended() -> None:
    full, importance, model = costs_of(PLAN, SECONDS)
    rows = [
        replace(row, collect_seconds=0.0, train_seconds=seconds)
        for row, seconds in ((full, 100.0), (importance, 80.0), (model, 85.0))
    ]
    assert recommended(rows).way == ONLINE  # a little slower, and nothing on disk
    rows[2] = replace(rows[2], train_seconds=99.0)
    assert recommended(rows).way == "importance store"
    rows[1] = replace(rows[1], memory=Memory(ram_bytes=1e12))
    assert recommended(rows, ram_bytes=1e9).way == ONLINE
    assert recommended(rows, ram_bytes=1.0).way == min(rows, key=lambda r: r.memory.ram_bytes).way


@pytest.mark.parametrize(("seconds", "text"), [(61, "61 s"), (600, "10 min"), (9000, "2.5 h")])
def test_time_spans_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text
