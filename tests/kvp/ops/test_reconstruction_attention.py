"""The replay signal against loops in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvp.ops.reconstruction_attention import reconstruction_attention

Array = np.ndarray


def _loops(
    queries: Array, keys: Array, pass_keys: Array, w: Array, u: Array, scaling: float
) -> Array:
    group, tokens, _ = queries.shape
    result = np.zeros(len(keys))
    for g in range(group):
        for j in range(tokens):
            seen = np.concatenate([keys, pass_keys[: j + 1]])
            weights = np.exp(scaling * (seen @ queries[g, j]))
            attention = weights[: len(keys)] / weights.sum()
            result = np.maximum(result, u[j] * w[g] * attention)
    return result


def _case(group: int, cached: int, tokens: int, width: int = 4) -> tuple[Array, ...]:
    rng = np.random.default_rng(100 * cached + tokens)
    return (
        2 * rng.normal(size=(group, tokens, width)), rng.normal(size=(cached, width)),
        rng.normal(size=(tokens, width)), rng.random((group, cached)), rng.random(tokens),
    )  # fmt: skip


def _float32(*arrays: Array) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(array, dtype=torch.float32) for array in arrays)


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize(("cached", "tokens"), [(1, 1), (1, 9), (13, 1), (20, 11)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [1, 4, 256])
def test_against_loops(group: int, cached: int, tokens: int, weighted: bool, block: int) -> None:
    queries, keys, pass_keys, w, u = _case(group, cached, tokens)
    options: dict[str, Any] = {"scaling": 0.7, "block": block}
    if weighted:
        options["key_weights"], options["query_weights"] = _float32(w, u)
    else:
        w, u = np.ones_like(w), np.ones_like(u)
    result = reconstruction_attention(*_float32(queries, keys, pass_keys), **options)
    assert result.dtype == torch.float32
    expected = _loops(queries, keys, pass_keys, w, u, 0.7)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-7)


def test_leading_axes_are_independent() -> None:
    queries, keys = torch.randn(2, 3, 2, 5, 4), torch.randn(2, 3, 8, 4)
    pass_keys = torch.randn(2, 3, 5, 4)
    result = reconstruction_attention(queries, keys, pass_keys, scaling=0.5)
    for entry in range(2):
        for head in range(3):
            of_head = (t[entry, head] for t in (queries, keys, pass_keys))
            alone = reconstruction_attention(*of_head, scaling=0.5)
            torch.testing.assert_close(result[entry, head], alone)


def test_half_precision_and_huge_logits() -> None:
    queries, keys, pass_keys, w, u = _case(2, 9, 6)
    half = [tensor.bfloat16() for tensor in _float32(queries, keys, pass_keys)]
    expected = _loops(*(t.double().numpy() for t in half), np.ones_like(w), np.ones_like(u), 0.5)
    signal = reconstruction_attention(*half, scaling=0.5)
    np.testing.assert_allclose(signal, expected, rtol=1e-4, atol=1e-6)
    assert reconstruction_attention(*(1e4 * t for t in half), scaling=0.5).isfinite().all()
