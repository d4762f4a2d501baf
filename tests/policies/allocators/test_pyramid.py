"""PyramidKV: published integers and bounds; `tests/golden` has kvpress's and the exact sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvp.ranking import Request
from policies.registry import make_allocator

LayersOf = Callable[..., Request]


def per_layer(spec: str, request: Request) -> list[int]:
    counts = make_allocator(spec).allocate(request)
    assert (counts == counts[:, :1]).all()  # all heads of a layer equally
    return counts[:, 0].tolist()


@pytest.mark.parametrize(
    ("budget", "first", "last", "mean"),
    [(128, 242, 25, 133.5), (512, 991, 61, 526.0), (2048, 3986, 111, 2048.5)],
)
def test_the_published_integers_and_their_leak(
    layers_of: LayersOf, budget: int, first: int, last: int, mean: float
) -> None:
    counts = per_layer("pyramid(rounding=faithful)", layers_of(32, budget, 8192))
    assert (counts[0], counts[-1], np.mean(counts)) == (first, last, mean)
    assert len(set(np.diff(counts))) == 1


def test_the_published_integers_of_short_prompts(layers_of: LayersOf) -> None:
    spec = "pyramid(rounding=faithful)"
    # B = 120, N = 239 < 2 B: the same everywhere.
    assert per_layer(spec, layers_of(4, 128, 239)) == [128] * 4
    # N = 240: high = 234 >= 232, so 232; low = 8; steps of (232 - 8) // 3 = 74; 8 more for each.
    assert per_layer(spec, layers_of(4, 128, 240)) == [240, 166, 92, 18]


def test_the_protected_tokens_of_high_layers_are_paid_for_by_the_others(
    layers_of: LayersOf,
) -> None:
    # The line of B = 32 over 5 layers: 70.4, 55.2, 40, 24.8, 9.6. The highest is raised to 20; the
    # others share 180 in proportion to 190.4.
    counts = per_layer("pyramid", layers_of(5, 40, 500, floor=20))
    assert counts == [67, 52, 38, 23, 20]


def test_never_more_than_the_prompt_is_allocated(layers_of: LayersOf) -> None:
    # B = 52, high = 101.4 but at most 60 - 8 = 52: nothing is left of the pyramid.
    assert per_layer("pyramid", layers_of(4, 60, 60)) == [60] * 4
    # B = 42: high 52, low 32, and 8 for each.
    assert per_layer("pyramid", layers_of(3, 50, 60)) == [60, 50, 40]


def test_budgets_within_the_window_and_single_layers(layers_of: LayersOf) -> None:
    for rounding in ("exact", "faithful", "kvpress"):
        spec = f"pyramid(rounding={rounding})"
        assert per_layer(spec, layers_of(1, 64, 900)) == [64]
        assert per_layer(spec, layers_of(3, 8, 900)) in ([8, 8, 8], [16, 8, 0])
    assert per_layer("pyramid", layers_of(3, 5, 900)) == [5, 5, 5]
