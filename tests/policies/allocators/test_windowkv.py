"""WindowKV's budgets: the code's integers, bounds; `tests/golden` has the paper's rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvp.ranking import Request
from policies.registry import make_allocator

LayersOf = Callable[..., Request]


def by_group(spec: str, request: Request, gamma: int) -> list[int]:
    """One count per group; all layers of a group and all their heads must agree."""
    counts = make_allocator(spec).allocate(request)
    groups = list(counts.split(gamma))
    assert all((group == group[0, 0]).all() for group in groups)
    return [int(group[0, 0]) for group in groups]


@pytest.mark.parametrize(
    ("layers", "gamma", "budget", "counts"),
    [
        (28, 7, 512, [768, 598, 428, 258]),
        (28, 7, 1024, [1536, 1195, 854, 513]),
        (28, 7, 2048, [3072, 2390, 1708, 1026]),
        (32, 8, 512, [732, 586, 440, 294]),
    ],
)
def test_the_integers_of_the_code(
    layers_of: LayersOf, layers: int, gamma: int, budget: int, counts: list[int]
) -> None:
    request = layers_of(layers, budget, 9000)
    assert by_group("windowkv(rounding=faithful)", request, gamma) == counts
    spec = f"windowkv(group={gamma},rounding=faithful)"
    assert by_group(spec, request, gamma) == counts


def test_a_shorter_last_group_keeps_the_sum(layers_of: LayersOf) -> None:
    request = layers_of(10, 90, 4000)
    counts = make_allocator("windowkv(group=4)").allocate(request)[:, 0]
    # Per layer 154.29, 90 and 25.71, for 4, 4 and 2 layers 1028.6 in all; scaled to 900 these are
    # 135, 78.75 and 22.5, and four are rounded up.
    assert counts.tolist() == [135] * 4 + [79] * 4 + [22] * 2
    assert int(counts.sum()) == 900


def test_what_does_not_fit_goes_to_the_other_groups(layers_of: LayersOf) -> None:
    counts = make_allocator("windowkv(group=1)").allocate(layers_of(4, 60, 80))[:, 0].tolist()
    # Line 115.7 78.6 41.4 4.3: two layers at all 80, the others share 80 as 41.4 to 4.3.
    assert counts == [80, 80, 72, 8]
