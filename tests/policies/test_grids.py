"""Grids of the tuning: each option takes its declared values, which enclose default and presets."""

from contextlib import suppress

import pytest

from kvp.errors import UsageError
from policies.registry import ALLOCATORS, SCORERS

OPTIONS = [*SCORERS.values(), *ALLOCATORS.values()]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.__name__)
def test_declared_values_are_accepted_and_reach_past_default_and_presets(options):
    for name, values in options.grid.items():
        assert all(_accepted(options, name, value) for value in values), name
        settings = [getattr(options(), name)]
        settings += [preset[name] for preset in options.presets.values() if name in preset]
        numbers = [value for value in values if type(value) in (int, float)]
        assert numbers == sorted(numbers)
        assert {one for one in settings if type(one) not in (int, float)} <= set(values), name


def _accepted(options, name, value):
    """Alone, or together with a preset."""
    for settings in ({}, *options.presets.values()):
        with suppress(UsageError):
            return options(**{**settings, name: value})
    return None
