from collections import Counter
from dataclasses import replace

import pytest

from kvp.store import SequenceRecord
from train.data.compression_points import (
    CompressionPoint,
    drawn_points,
    held_out_points,
    noise_seed,
    points_by_kind,
)
from train.recipe import PRESETS

RECIPE = PRESETS["fourier"]


def record(index=0, length=600, context=400, prompt=500):
    return SequenceRecord(
        index=index, id=str(index), task="t", split="train", length=length, context_length=context,
        prompt_length=prompt, token_ids=(0,) * length,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "uniform_points", "kinds"),
    [
        ((600, 400, 500), 3, {"prompt": [499], "context": [400], "uniform": [64, 332, 599]}),
        ((70, 3, 5), 0, {"uniform": [64, 65, 66, 67, 68, 69]}),  # every position without a grid
        ((64, 30, 60), 0, {}),  # too short
        ((65, 30, 60), 0, {"uniform": [64]}),
        ((100, 100, 100), 2, {"prompt": [99], "uniform": [64, 99]}),  # a context without a future
    ],
)
def test_kinds_of_compression_points(sizes, uniform_points, kinds):
    recipe = replace(RECIPE, uniform_points=uniform_points)
    assert points_by_kind(record(0, *sizes), recipe) == kinds


def test_draws_depend_on_seed_and_step_alone():
    records = [record(index) for index in range(5)]
    first = [list(drawn_points(records, RECIPE, seed=3, step=step)) for step in range(4)]
    again = [list(drawn_points(records, RECIPE, seed=3, step=step)) for step in (3, 2, 1, 0)][::-1]
    assert first == again
    assert first != [list(drawn_points(records, RECIPE, seed=4, step=step)) for step in range(4)]


def test_every_context_of_every_step_has_noise_of_its_own():
    assert len({noise_seed(3, step, index) for step in range(9) for index in range(9)}) == 81


def test_every_pass_uses_every_sequence_once():
    records = [record(index) for index in range(6)]
    recipe = replace(RECIPE, contexts=4)
    drawn = [
        point.sequence
        for step in range(9)
        for point in drawn_points(records, recipe, seed=0, step=step)
    ]
    assert [sorted(drawn[start : start + 6]) for start in range(0, 36, 6)] == [list(range(6))] * 6


def test_shares_of_kinds_follow_their_weights():
    recipe = replace(RECIPE, contexts=2_000, uniform_points=7)
    tokens = [point.prefix_length for point in drawn_points([record()], recipe, seed=0, step=0)]
    assert tokens.count(499) / 2_000 == pytest.approx(0.4, abs=0.04)
    assert tokens.count(400) / 2_000 == pytest.approx(0.4, abs=0.04)


def test_the_future_is_capped():
    recipe = replace(RECIPE, contexts=40, future_max=30)
    assert all(
        point.stop == min(point.prefix_length + 30, 600)
        for point in drawn_points([record()], recipe, seed=0, step=0)
    )
    whole = replace(recipe, future_max=0)
    assert {point.stop for point in drawn_points([record()], whole, seed=0, step=0)} == {600}


def test_validation_sees_every_sequence_before_second_points():
    records = [record(index) for index in (7, 9)]
    points = held_out_points(records, RECIPE, limit=3)
    assert points == [
        CompressionPoint(sequence=7, prefix_length=499, stop=600),
        CompressionPoint(sequence=9, prefix_length=400, stop=600),
        CompressionPoint(sequence=7, prefix_length=400, stop=600),
    ]
    uniform = replace(RECIPE, compress_prompt=0, compress_context=0, uniform_points=3)
    assert [point.prefix_length for point in held_out_points(records, uniform, limit=9)] == [
        332,
        332,
    ]


def test_few_validation_points_show_both_boundaries_of_every_task():
    tasks = ["a", "b"] * 4
    records = [replace(record(index), task=task) for index, task in enumerate(tasks)]
    points = held_out_points(records, RECIPE, limit=8)
    shown = [(tasks[point.sequence], point.prefix_length) for point in points]
    assert Counter(shown) == {(task, tokens): 2 for task in "ab" for tokens in (400, 499)}
    twice = held_out_points(records, RECIPE, limit=99)
    assert len(set(twice)) == 16
