"""What rankers are made of: features by hand, every bad value named, keys seen from the end."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvp.rope import Rope
from policies.ranker import HeadRankers, RankerSpec, position_features, rotate_keys_to_end

FOURIER = RankerSpec(head_dim=8, hidden=12, position_width=6, frequencies=5, reference_length=64)


def test_fourier_features_by_hand():
    """Two frequencies: wavelengths 4 and 8; position 2 of 9 tokens."""
    spec = RankerSpec(head_dim=8, hidden=6, frequencies=2, reference_length=8)
    features = position_features(spec, torch.tensor([2]), 9)[0]
    log9 = np.log(9)
    expected = [0.25, np.log(3) / log9, np.log(7) / log9, 0.0, 1.0, -1.0, 0.0]
    torch.testing.assert_close(features, torch.tensor(expected).float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"architecture": "tree"}, "unknown architecture 'tree'"),
        ({"inputs": ("key", "key")}, "once each, got .'key', 'key'"),
        ({"architecture": "paper", "inputs": ("key",)}, "has the inputs key, value, position, and"),
        ({"architecture": "paper", "neighbours": 3}, "choose fourier"),
        ({"blocks": 5}, "blocks must be 1 or 2"), ({"hidden": 0}, "hidden must be greater than or"),
        ({"neighbours": -2}, "neighbours must be greater than or equal to 0, got -2"),
    ],
)  # fmt: skip
def test_bad_specs_are_value_errors(bad, message):
    with pytest.raises(ValueError, match=message):
        RankerSpec(**{"head_dim": 8, "hidden": 6, **bad})


def test_inputs_have_one_order():
    spec = replace(FOURIER, inputs=("distance", "key"))
    assert spec == replace(FOURIER, inputs=("key", "distance"))
    assert spec.inputs == ("key", "distance")


FREQUENCIES = (1.0, 0.25, 0.0625)
HEADS, TOKENS, WIDTH = 2, 9, 8


def spec_of(**settings):
    given = {"inputs": ("key", "value", "distance"), "key_frequencies": FREQUENCIES, **settings}
    return RankerSpec(head_dim=WIDTH, hidden=6, **given)


def rotated(keys, positions):
    rope = Rope(frequencies=torch.tensor(FREQUENCIES))
    return rope.rotate(keys, *rope.rotation(positions))


@pytest.mark.parametrize("shift", [1, 17, 100_000])
def test_scores_do_not_depend_on_the_position_of_the_text(shift):
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


def test_a_query_after_the_end_sees_the_turned_key_at_its_distance():
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, 1, WIDTH, generator=generator)
    length, ahead, position = 40, 5, 12
    at = torch.tensor([position])
    logit = rotated(query, torch.tensor([length + ahead])) @ rotated(key, at).T
    turned = rotate_keys_to_end(spec_of(), rotated(key, at), at, length)
    torch.testing.assert_close(rotated(query, torch.tensor([ahead])) @ turned.T, logit)


@pytest.mark.parametrize("reach", [0, 4])
def test_places_beyond_reach_of_both_ends_are_alike(reach):
    """One token, put at every place of a context of 40."""
    inputs = ("key", "value", "position", "distance")
    rankers = HeadRankers(spec_of(inputs=inputs, reach=reach), HEADS, torch.Generator())
    keys, values = torch.randn(2, HEADS, 1, WIDTH).expand(-1, -1, 40, -1)
    places = torch.arange(40)
    scores = rankers(rotated(keys, places), values, places, 40)
    alike = (scores - scores[:, 20:21]).abs() < 1e-5
    expected = torch.zeros(40, dtype=torch.bool)
    expected[[20] if reach == 0 else range(reach, 40 - reach)] = True
    assert (alike == expected).all()


def test_a_long_context_ends_as_a_short_one_does():
    """Within reach of an end tokens have the scores that they have in any other length."""
    inputs = ("key", "value", "position", "distance")
    rankers = HeadRankers(spec_of(inputs=inputs, reach=4), HEADS, torch.Generator())
    keys, values = torch.randn(2, HEADS, 40, WIDTH)
    long = rankers(rotated(keys, torch.arange(40)), values, torch.arange(40), 40)
    for part in (slice(0, 4), slice(36, 40)):
        ten = slice(0, 10) if part.start == 0 else slice(30, 40)
        places = torch.arange(10)
        short = rankers(rotated(keys[:, ten], places), values[:, ten], places, 10)
        torch.testing.assert_close(long[:, part], short[:, part.start - ten.start :][:, :4])
