"""Which sequences are in the buffer, by brute force."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from train.online.schedule import Schedule

from train.data.compression_points import sequence_order
from train.recipe import PRESETS


@pytest.mark.parametrize(("buffer", "epochs"), [(4, 2), (6, 4), (5, 3), (3, 7), (4, 1), (1, 3)])
def test_every_sequence_has_its_epochs_and_never_comes_back(buffer: int, epochs: int) -> None:
    schedule = Schedule(buffer=buffer, epochs_per_sequence=epochs)
    passes = 40
    windows = [range(schedule.start(p), schedule.start(p) + schedule.size) for p in range(passes)]
    seen = Counter(number for window in windows for number in window)
    settled = range(buffer, windows[-1].start)  # neither in the first buffer nor in the last
    assert settled
    assert {seen[number] for number in settled} == {epochs}
    assert all(one.start <= following.start for one, following in pairwise(windows))
    assert all(seen[number] <= epochs for number in range(buffer))


@pytest.mark.parametrize(
    ("buffer", "epochs", "sequences"), [(4, 2, 0), (5, 3, 0), (3, 5, 0), (6, 2, 5), (4, 2, 9)]
)
@pytest.mark.parametrize("points_per_sequence", [1, 3])
def test_draws_are_computed_ahead(
    buffer: int, epochs: int, sequences: int, points_per_sequence: int
) -> None:
    schedule = Schedule(buffer=buffer, epochs_per_sequence=epochs, sequences=sequences)
    recipe = replace(
        PRESETS["fourier"], steps=13, contexts=4, points_per_sequence=points_per_sequence
    )
    expected: dict[int, list[int]] = {}
    for draw in range(13 * 4):
        passes, index = divmod(draw // points_per_sequence, schedule.size)
        order = sequence_order(schedule.size, seed=3, passes=passes)
        expected.setdefault(schedule.start(passes) + int(order[index]), []).append(draw)
    needed = schedule.needed(recipe)
    assert max(expected) < needed
    for number in range(needed + 2):
        assert schedule.draws(number, recipe, seed=3) == expected.get(number, [])


@pytest.mark.parametrize(("points_per_sequence", "sequences"), [(1, 0), (3, 0), (1, 9)])
@pytest.mark.parametrize("slots", [range(5), range(0, 5, 2), range(1, 5, 2)])
def test_a_process_reads_the_sequences_of_its_contexts_in_their_order(
    points_per_sequence: int, sequences: int, slots: range
) -> None:
    schedule = Schedule(buffer=4, epochs_per_sequence=2, sequences=sequences)
    recipe = replace(
        PRESETS["fourier"], steps=7, contexts=5, points_per_sequence=points_per_sequence
    )
    expected: dict[int, list[int]] = {}
    for draw in [step * 5 + slot for step in range(7) for slot in slots]:
        passes, index = divmod(draw // points_per_sequence, schedule.size)
        order = sequence_order(schedule.size, seed=3, passes=passes)
        numbers = expected.setdefault(passes, [])
        number = schedule.start(passes) + int(order[index])
        if number not in numbers:
            numbers.append(number)
    for passes in range(schedule.passes(recipe)):
        assert schedule.order(passes, recipe, slots, seed=3) == expected.get(passes, [])


def test_data_that_fits_is_never_replaced() -> None:
    schedule = Schedule(buffer=8, epochs_per_sequence=2, sequences=5)
    assert (schedule.size, schedule.start(100), schedule.rolls) == (5, 0, False)
    assert schedule.needed(PRESETS["fourier"]) == 5


def test_without_epochs_none_is_replaced() -> None:
    schedule = Schedule(buffer=8, epochs_per_sequence=0)
    assert (schedule.size, schedule.start(100), schedule.rolls) == (8, 0, False)
    assert schedule.needed(PRESETS["fourier"]) == 8
    recipe = replace(PRESETS["fourier"], steps=5, contexts=4)
    draws = [draw for number in range(8) for draw in schedule.draws(number, recipe, seed=1)]
    assert sorted(draws) == list(range(20))
