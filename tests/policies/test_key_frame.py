"""Keys seen from the end of the cache: scores do not depend on the position of the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvp.rope import Rope
from policies.ranker import HeadRankers, RankerSpec, keys_seen_from_the_end

FREQUENCIES = (1.0, 0.25, 0.0625)
HEADS, TOKENS, WIDTH = 2, 9, 8


def spec_of(**settings: Any) -> RankerSpec:
    given = {"inputs": ("key", "value", "distance"), "key_frequencies": FREQUENCIES, **settings}
    return RankerSpec(head_dim=WIDTH, hidden=6, **given)


def rotated(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rope = Rope(frequencies=torch.tensor(FREQUENCIES))
    return rope.rotate(keys, *rope.rotation(positions))


@pytest.mark.parametrize("shift", [1, 17, 100_000])
def test_scores_do_not_depend_on_the_position_of_the_text(shift: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(HEADS, TOKENS, WIDTH, generator=generator) for _ in range(2))
    rankers = HeadRankers(spec_of(), HEADS, generator)
    positions = torch.arange(TOKENS)
    scores = rankers(rotated(keys, positions), values, positions, TOKENS)
    moved = rankers(rotated(keys, positions + shift), values, positions + shift, TOKENS + shift)
    torch.testing.assert_close(moved, scores, atol=2e-3 if shift > 1_000 else 1e-5, rtol=0)
    as_stored = HeadRankers(spec_of(key_frequencies=()), HEADS, torch.Generator().manual_seed(0))
    one = as_stored(rotated(keys, positions), values, positions, TOKENS)
    other = as_stored(rotated(keys, positions + shift), values, positions + shift, TOKENS + shift)
    assert (one - other).abs().max() > 0.01


def test_a_query_after_the_end_sees_the_turned_key_at_its_distance() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, WIDTH, generator=generator)
    length, ahead, position = 40, 5, 12
    logit = (
        rotated(query, torch.tensor([length + ahead])) @ rotated(key, torch.tensor([position])).T
    )
    turned = keys_seen_from_the_end(spec_of(), rotated(key, torch.tensor([position])), length)
    torch.testing.assert_close(rotated(query, torch.tensor([ahead])) @ turned.T, logit)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": ("value",)}, "need the fourier architecture and keys"),
        ({"architecture": "paper", "inputs": ("key", "value", "position")}, "need the fourier"),
        ({"key_frequencies": (1.0,) * 5}, "at most head_dim / 2 numbers"),
        ({"key_frequencies": ("1.0",)}, "at most head_dim / 2 numbers"),
        ({"key_frequencies": (float("nan"),)}, "at most head_dim / 2 numbers"),
    ],
)
def test_frequencies_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec_of(**settings)
