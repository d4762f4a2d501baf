"""Operators of grouped queries against loops and full matrices in float64 NumPy."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvp.ops.attention import column_sums, recent_attention, reconstruction_attention


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("block", [1, 5, 37, 256])
def test_column_sums(full_attention, group, block):
    rng = np.random.default_rng(group)
    queries, keys = 3 * rng.normal(size=(group, 37, 8)), rng.normal(size=(37, 8))
    result = column_sums(torch.tensor(queries).float(), torch.tensor(keys).float(), block)
    assert result.shape == (group, 37)
    np.testing.assert_allclose(result, full_attention(queries, keys).sum(1), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(result.sum(-1), 37, rtol=1e-5)


def _loops(queries, keys, pass_keys, w, u, scaling):
    group, tokens, _ = queries.shape
    result = np.zeros(len(keys))
    for g in range(group):
        for j in range(tokens):
            seen = np.concatenate([keys, pass_keys[: j + 1]])
            weights = np.exp(scaling * (seen @ queries[g, j]))
            attention = weights[: len(keys)] / weights.sum()
            result = np.maximum(result, u[j] * w[g] * attention)
    return result


def _case(group, cached, tokens, width=4):
    rng = np.random.default_rng(100 * cached + tokens)
    return (
        2 * rng.normal(size=(group, tokens, width)), rng.normal(size=(cached, width)),
        rng.normal(size=(tokens, width)), rng.random((group, cached)), rng.random(tokens),
    )  # fmt: skip


def _float32(*arrays):
    return tuple(torch.tensor(array, dtype=torch.float32) for array in arrays)


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize(("cached", "tokens"), [(1, 1), (1, 9), (13, 1), (20, 11)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [1, 4, 256])
def test_reconstruction_attention_equals_loops(group, cached, tokens, weighted, block):
    queries, keys, pass_keys, w, u = _case(group, cached, tokens)
    options = {"scaling": 0.7, "block": block}
    if weighted:
        options["key_weights"], options["query_weights"] = _float32(w, u)
    else:
        w, u = np.ones_like(w), np.ones_like(u)
    result = reconstruction_attention(*_float32(queries, keys, pass_keys), **options)
    assert result.dtype == torch.float32
    expected = _loops(queries, keys, pass_keys, w, u, 0.7)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-7)


def test_half_precision_and_huge_logits():
    queries, keys, pass_keys, w, u = _case(2, 9, 6)
    half = [tensor.bfloat16() for tensor in _float32(queries, keys, pass_keys)]
    expected = _loops(*(t.double().numpy() for t in half), np.ones_like(w), np.ones_like(u), 0.5)
    signal = reconstruction_attention(*half, scaling=0.5)
    np.testing.assert_allclose(signal, expected, rtol=1e-4, atol=1e-6)
    assert reconstruction_attention(*(1e4 * t for t in half), scaling=0.5).isfinite().all()


BATCH, HEADS, GROUP, TOKENS, WIDTH = 2, 2, 8, 64, 512


class LargestResult(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def largest_result(compute):
    with LargestResult() as mode:
        compute()
    return mode.elements


def test_operators_hold_no_keys_per_group():
    keys = drawn(BATCH, HEADS, TOKENS, WIDTH)
    queries = drawn(BATCH, HEADS, GROUP, TOKENS, WIDTH)
    few = queries[..., :2, :]
    assert largest_result(lambda: column_sums(few, keys[..., :2, :], 2)) <= keys.numel()

    def replayed():
        return reconstruction_attention(few, keys, keys[..., :2, :], scaling=1.0)

    assert largest_result(replayed) <= keys.numel()
    last = few.flatten(1, 2)
    assert largest_result(lambda: recent_attention(last, keys, 2)) <= keys.numel()
