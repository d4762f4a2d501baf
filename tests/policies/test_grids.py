"""Grids of the tuning: how numbers go on, and that each option takes its declared values."""

import pytest

from kvp.errors import UsageError
from policies.registry import ALLOCATORS, METHODS, SHARES, Choices, Numbers

KERNEL = Numbers(values=(3, 7, 15), minimum=1, odd=True)
WINDOW = Numbers(values=(4, 8), minimum=1)


def test_numbers_go_on_by_halving_and_doubling_up_to_the_bounds():
    assert KERNEL.step_up(15, 512) == 31
    assert [KERNEL.step_up(31, 60), KERNEL.step_up(59, 60)] == [59, None]
    assert [KERNEL.step_down(3), KERNEL.step_down(1)] == [1, None]
    assert [WINDOW.step_up(8, 12), WINDOW.step_up(12, 12)] == [12, None]
    assert [WINDOW.step_down(4), WINDOW.step_down(1)] == [2, None]
    assert Numbers(values=(0, 4)).step_up(0, 9) == 1
    assert SHARES.step_up(1.0, 512) is None
    assert SHARES.step_down(0.0) is None
    assert Numbers(values=(1.0, 2.0), minimum=1).step_up(2.0, 512) == 4.0


def test_known_values_are_the_nearest_neighbours():
    assert KERNEL.step_up(7, 512, {3, 7, 11, 15}) == 11
    assert KERNEL.step_down(7, {3, 5, 15}) == 5


def test_a_value_halfway_is_one_the_option_takes():
    assert (KERNEL.bisect(15, 31), KERNEL.bisect(7, 15), KERNEL.bisect(3, 7)) == (23, 11, 5)
    assert WINDOW.bisect(4, 5) is None
    assert SHARES.bisect(0.2, 0.35) == 0.28
    assert SHARES.bisect(0.3, 0.35) is None


OPTIONS = [*METHODS.values(), *ALLOCATORS.values()]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.__name__)
def test_declared_values_are_accepted_and_reach_past_default_and_presets(options):
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


def _accepted(options, name, value):
    """Alone, or together with a preset."""
    for settings in ({}, *options.presets.values()):
        try:
            options(**{**settings, name: value})
        except UsageError:
            continue
        return True
    return False
