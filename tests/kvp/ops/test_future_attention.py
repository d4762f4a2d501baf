"""Future attention against the full matrix in float64."""

import numpy as np
import pytest
import torch

import kvp.ops.future_attention as module
from kvp.ops.future_attention import (
    future_attention,
    max_future_attention,
    receive_by_tiles,
    received_attention,
)


def _case(group, tokens, scale=3.0):
    rng = np.random.default_rng(group * 1000 + tokens)
    return rng.normal(size=(group, tokens, 8)) * scale, rng.normal(size=(tokens, 8))


def _single(array):
    return torch.tensor(array, dtype=torch.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize(
    ("prefix", "stop"), [(20, 37), (1, 37), (36, 37), (20, 31), (0, 5), (5, 5)]
)
@pytest.mark.parametrize("block", [1, 3, 256])
def test_one_compression_point(full_attention, group, prefix, stop, block, weighted):
    queries, keys = _case(group, 37)
    of_query = np.random.default_rng(3).random(37) * (np.arange(37) % 5 > 0)
    weights = _single(of_query) if weighted else None
    paid = full_attention(queries, keys)[:, prefix:stop, :prefix].max(axis=0)
    paid = paid * of_query[prefix:stop, None] if weighted else paid
    q, k = _single(queries), _single(keys)
    for result in (
        receive_by_tiles(q, k, prefix, stop, prefix, block=block, weights=weights),
        future_attention(q, k, prefix, stop, weights),
        *([] if weighted else [received_attention(q, k, prefix, stop, prefix)]),
    ):
        assert result.dtype == torch.float32
        np.testing.assert_allclose(result, paid.sum(axis=0), rtol=2e-5, atol=2e-6)
    largest = paid.max(axis=0, initial=0.0)
    for result in (
        receive_by_tiles(q, k, prefix, stop, prefix, "max", block, weights),
        max_future_attention(q, k, prefix, stop, weights),
    ):
        np.testing.assert_allclose(result, largest, rtol=2e-5, atol=2e-6)


def test_one_query_by_hand():
    # Keys 0 and 1; the query at 1 scores them log 3 and 0, so they get 3/4 and 1/4.
    keys = torch.tensor([[np.log(3.0)], [0.0]], dtype=torch.float32)
    queries = torch.ones(1, 2, 1)
    assert future_attention(queries, keys, prefix_length=1).item() == pytest.approx(0.75)
    both = receive_by_tiles(queries, keys, 0, 2, 2)  # query 0 sees itself alone
    np.testing.assert_allclose(both, [1.75, 0.25], rtol=1e-6)


def test_the_maximum_over_query_heads_is_taken_per_query():
    # Head 0 looks at key 0 in query 2 and at key 1 in query 3; head 1 the other way round.
    keys = torch.eye(2).repeat(2, 1) * 40
    looks = torch.tensor([[[40.0, 0.0], [0.0, 40.0]], [[0.0, 40.0], [40.0, 0.0]]])
    queries = torch.zeros(2, 4, 2)
    queries[:, 2:] = looks
    # Keys 0/2 and 1/3 are twins: query 2 splits key 0's share with itself, query 3 both.
    result = future_attention(queries, keys, prefix_length=2)
    np.testing.assert_allclose(result, [0.5 + 0.5, 1.0 + 0.5], atol=1e-6)


@pytest.mark.parametrize("tile", [1, 2 * 11 * 5, 2 * 19 * 64 * 4, 2**23])
def test_leading_axes_are_independent(monkeypatch, tile):
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "SMALL_TILE", tile)
    queries, keys = torch.randn(2, 3, 2, 19, 8), torch.randn(2, 3, 19, 8)
    future = future_attention(queries, keys, 11)
    assert future.shape == (2, 3, 11)
    for layer in range(2):
        for head in range(3):
            q, k = queries[layer, head], keys[layer, head]
            torch.testing.assert_close(future[layer, head], receive_by_tiles(q, k, 11, 19, 11))
    assert future_attention(queries[:0], keys[:0], 11).shape == (0, 3, 11)
    assert future_attention(queries[..., :0, :], keys[..., :0, :], 0).shape == (2, 3, 0)


def test_padding_and_past_queries_are_never_read():
    queries, keys = torch.randn(2, 24, 8), torch.randn(24, 8)
    expected = future_attention(queries[:, :17], keys[:17], 9)
    queries[:, 17:], keys[17:] = torch.nan, torch.nan
    queries[:, :9] = torch.nan
    torch.testing.assert_close(future_attention(queries, keys, 9, 17), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_is_computed_in_float32(full_attention, dtype):
    queries, keys = torch.randn(2, 33, 8).to(dtype), torch.randn(33, 8).to(dtype)
    exact = full_attention(queries.double().numpy(), keys.double().numpy())
    result = future_attention(queries, keys, 20)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result, exact[:, 20:, :20].max(0).sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_errors_are_those_of_float32(full_attention, scale):
    queries, keys = (x.astype(np.float32) for x in _case(3, 301, scale))
    exact = full_attention(queries.astype(np.float64), keys.astype(np.float64))
    exact = exact[:, 100:, :100].max(0).sum(0)
    error = np.abs(future_attention(_single(queries), _single(keys), 100).numpy() - exact).max()
    assert error <= 3e-5 * exact.max()
    assert future_attention(1e4 * _single(queries), 1e4 * _single(keys), 100).isfinite().all()


def test_wrong_shapes_and_ranges_are_refused():
    queries, keys = torch.randn(2, 10, 4), torch.randn(10, 4)
    for attention in (future_attention, max_future_attention):
        with pytest.raises(ValueError, match="disagree"):
            attention(queries, torch.randn(9, 4), 3)
        with pytest.raises(ValueError, match="disagree"):
            attention(torch.randn(10, 4), keys, 3)
        for prefix, stop in ((5, 4), (3, 11), (11, None)):
            with pytest.raises(ValueError, match="no queries"):
                attention(queries, keys, prefix, stop)
        with pytest.raises(ValueError, match=r"weights of queries must be \[T\]"):
            attention(queries, keys, 3, weights=torch.ones(9))
