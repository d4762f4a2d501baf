"""Grids of the tuning: how numbers go on, and that each option takes its declared values."""

from __future__ import annotations

import pytest

from kvp.errors import UsageError
from policies.registry import ALLOCATORS, METHODS, SHARES, Choices, Numbers, Options

KERNEL = Numbers(values=(3, 7, 15), minimum=1, odd=True)
WINDOW = Numbers(values=(4, 8), minimum=1)


def test_numbers_go_on_by_halving_and_doubling_up_to_the_bounds() -> None:
    assert [KERNEL.above(15, 512), KERNEL.above(31, 60), KERNEL.above(59, 60)] == [31, 59, None]
    assert [KERNEL.below(3), KERNEL.below(1)] == [1, None]
    assert [WINDOW.above(8, 12), WINDOW.above(12, 12), WINDOW.below(4), WINDOW.below(1)] == [
        12, None, 2, None,
    ]  # fmt: skip
    assert Numbers(values=(0, 4)).above(0, 9) == 1
    assert SHARES.above(1.0, 512) is None
    assert SHARES.below(0.0) is None
    assert Numbers(values=(1.0, 2.0), minimum=1).above(2.0, 512) == 4.0


def test_known_values_are_the_nearest_neighbours() -> None:
    assert KERNEL.above(7, 512, {3, 7, 11, 15}) == 11
    assert KERNEL.below(7, {3, 5, 15}) == 5


def test_a_value_halfway_is_one_the_option_takes() -> None:
    assert (KERNEL.between(15, 31), KERNEL.between(7, 15), KERNEL.between(3, 7)) == (23, 11, 5)
    assert WINDOW.between(4, 5) is None
    assert SHARES.between(0.2, 0.35) == 0.28
    assert SHARES.between(0.3, 0.35) is None


OPTIONS: list[type[Options]] = [*METHODS.values(), *ALLOCATORS.values()]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.__name__)
def test_declared_values_are_accepted_and_reach_past_default_and_presets(
    options: type[Options],
) -> None:
    for name, grid in options.grid.items():
        values = [*grid.values, *(["auto"] if isinstance(grid, Numbers) and grid.auto else [])]
        accepted = [value for value in values if _accepted(options, name, value)]
        assert set(accepted) == set(values), name
        settings = [getattr(options(), name)]
        settings += [preset[name] for preset in options.presets.values() if name in preset]
        if isinstance(grid, Choices):
            assert set(settings) <= set(grid.values), name
        else:
            assert sorted(grid.values) == list(grid.values)
            assert grid.minimum <= grid.values[0]


def _accepted(options: type[Options], name: str, value: object) -> bool:
    """Alone, or together with a preset."""
    for settings in ({}, *options.presets.values()):
        try:
            options(**{**settings, name: value})
        except UsageError:
            continue
        return True
    return False
