"""RoPE against complex numbers: two channels are one number, which a position multiplies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvp.rope import Rope


def _turned(vectors, turn):
    """Multiply the pairs (i, i + R / 2) of vectors [..., D] by complex `turn` [..., R / 2]."""
    half = turn.shape[-1]
    pairs = (vectors[..., :half] + 1j * vectors[..., half : 2 * half]) * turn
    return np.concatenate([pairs.real, pairs.imag, vectors[..., 2 * half :]], axis=-1)


@pytest.fixture
def frequencies():
    return np.array([1.0, 0.3, 0.01])


@pytest.mark.parametrize("width", [6, 9], ids=["whole", "partial"])
@pytest.mark.parametrize("scaling", [1.0, 1.4])
def test_rotation_and_its_inverse(frequencies, width, scaling):
    rope = Rope(frequencies=torch.tensor(frequencies), scaling=scaling)
    vectors = np.random.default_rng(0).standard_normal((2, 5, width))
    positions = np.array([0, 1, 7, 100, 5000])
    expected = _turned(vectors, scaling * np.exp(1j * positions[:, None] * frequencies))
    at = torch.tensor(positions)
    rotated = rope.rotate(torch.tensor(vectors).float(), *rope.rotation(at))
    np.testing.assert_allclose(rotated.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(rope.unrotate(rotated, at).numpy(), vectors, atol=1e-5)


def test_far_positions_keep_their_angle(frequencies):
    """A million radians in float32 would be off by a sixteenth of one."""
    rope = Rope(frequencies=torch.tensor(frequencies).float())
    cosine, sine = rope.rotation(torch.tensor([1_000_003]))
    angle = 1_000_003 * frequencies.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(cosine[0].numpy(), np.cos(angle), atol=1e-6)
    np.testing.assert_allclose(sine[0].numpy(), np.sin(angle), atol=1e-6)


def test_mean_rotation_is_the_mean_of_rotated_vectors(frequencies):
    rope = Rope(frequencies=torch.tensor(frequencies), scaling=1.2)
    vector = np.random.default_rng(1).standard_normal(8)
    turns = 1.2 * np.exp(1j * np.arange(40, 57)[:, None] * frequencies)
    expected = _turned(np.broadcast_to(vector, (17, 8)), turns).mean(axis=0)
    moved = rope.rotate(torch.tensor(vector).float(), *rope.mean_rotation(40, 17))
    np.testing.assert_allclose(moved.numpy(), expected, atol=1e-5)


@given(st.integers(-5000, 0), st.integers(0, 5000), st.integers(0, 5000))
def test_turned_keys_meet_queries_at_their_true_distance(by, key, query):
    generator = torch.Generator().manual_seed(abs(by))
    rope = Rope(frequencies=1e4 ** (-torch.arange(0, 16, 2) / 16), scaling=1.3)
    plain = torch.randn(2, 20, generator=generator)  # four channels do not rotate
    there = [rope.rotate(each, *rope.rotation(torch.tensor(at)))
             for each, at in zip(plain, (key, query), strict=True)]  # fmt: skip
    moved = rope.rotate(plain[1], *rope.rotation(torch.tensor(query + by)))
    assert float((rope.shift(there[0], by) @ moved - there[0] @ there[1]).abs()) < 1e-3
