"""The operators against the full T x T matrix in float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvp.ops.attention_rows import attention_rows
from kvp.ops.column_sums import column_sums
from kvp.ops.future_attention import future_attention, peak_attention


def _full_attention(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Causal probabilities [G, T, T] of one KV head, row j over keys i, in float64."""
    group, tokens, width = queries.shape
    rows = np.zeros((group, tokens, tokens))
    for g in range(group):
        for j in range(tokens):
            logits = keys[: j + 1] @ queries[g, j] / np.sqrt(width)
            weights = np.exp(logits - logits.max())
            rows[g, j, : j + 1] = weights / weights.sum()
    return rows


def _case(group: int, tokens: int, width: int = 8, scale: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(group * 1000 + tokens)
    return rng.normal(size=(group, tokens, width)) * scale, rng.normal(size=(tokens, width))


def _single(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float32)


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize(("cut", "stop"), [(20, 37), (1, 37), (36, 37), (20, 31), (0, 5)])
@pytest.mark.parametrize("block", [1, 3, 256])
def test_future_attention(group: int, cut: int, stop: int, block: int) -> None:
    queries, keys = _case(group, 37, scale=3.0)
    expected = _full_attention(queries, keys)[:, cut:stop, :cut].max(axis=0).sum(axis=0)
    found = future_attention(_single(queries), _single(keys), cut, stop, block)
    assert found.dtype == torch.float32
    assert found.shape == (cut,)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    largest = _full_attention(queries, keys)[:, cut:stop, :cut].max(axis=(0, 1))
    peak = peak_attention(_single(queries), _single(keys), cut, stop, block)
    np.testing.assert_allclose(peak, largest, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("block", [1, 5, 37, 256])
def test_column_sums(group: int, block: int) -> None:
    queries, keys = _case(group, 37, scale=3.0)
    found = column_sums(_single(queries), _single(keys), block)
    assert found.shape == (group, 37)
    np.testing.assert_allclose(found, _full_attention(queries, keys).sum(1), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found.sum(-1), 37, rtol=1e-5)


def test_one_query_by_hand() -> None:
    # Keys 0 and 1; the query at 1 scores them log 3 and 0, so they get 3/4 and 1/4.
    keys = torch.tensor([[np.log(3.0)], [0.0]], dtype=torch.float32)
    queries = torch.ones(1, 2, 1)
    assert future_attention(queries, keys, cut=1).item() == pytest.approx(0.75)
    np.testing.assert_allclose(column_sums(queries, keys), [[1.75, 0.25]], rtol=1e-6)


def test_the_maximum_over_query_heads_is_taken_per_query() -> None:
    # Head 0 looks at key 0 in query 2 and at key 1 in query 3; head 1 the other way round.
    keys = torch.eye(2).repeat(2, 1) * 40
    looks = torch.tensor([[[40.0, 0.0], [0.0, 40.0]], [[0.0, 40.0], [40.0, 0.0]]])
    queries = torch.zeros(2, 4, 2)
    queries[:, 2:] = looks
    # Keys 0/2 and 1/3 are twins: query 2 splits key 0's share with itself, query 3 both.
    found = future_attention(queries, keys, cut=2)
    np.testing.assert_allclose(found, [0.5 + 0.5, 1.0 + 0.5], atol=1e-6)


def test_more_than_one_unit_per_query_only_with_groups() -> None:
    queries, keys = _case(7, 37, scale=5.0)
    total = future_attention(_single(queries), _single(keys), 30).sum().item()
    single = future_attention(_single(queries[:1]), _single(keys), 30).sum().item()
    assert single <= 7
    assert single < total <= 7 * 7


def test_leading_axes_are_independent() -> None:
    queries = torch.randn(2, 3, 2, 19, 8)
    keys = torch.randn(2, 3, 19, 8)
    future, sums = future_attention(queries, keys, 11), column_sums(queries, keys)
    assert future.shape == (2, 3, 11)
    assert sums.shape == (2, 3, 2, 19)
    for layer in range(2):
        for head in range(3):
            q, k = queries[layer, head], keys[layer, head]
            torch.testing.assert_close(future[layer, head], future_attention(q, k, 11))
            torch.testing.assert_close(sums[layer, head], column_sums(q, k))


def test_padding_and_past_queries_are_never_read() -> None:
    queries, keys = torch.randn(2, 24, 8), torch.randn(24, 8)
    expected = future_attention(queries[:, :17], keys[:17], 9)
    queries[:, 17:], keys[17:] = torch.nan, torch.nan
    queries[:, :9] = torch.nan
    torch.testing.assert_close(future_attention(queries, keys, 9, 17, block=5), expected)


def test_no_future_is_no_importance() -> None:
    assert torch.equal(future_attention(torch.randn(1, 6, 4), torch.randn(6, 4), 6), torch.zeros(6))


def test_half_precision_inputs_are_computed_in_float32() -> None:
    queries, keys = torch.randn(2, 33, 8).bfloat16(), torch.randn(33, 8).bfloat16()
    exact = _full_attention(queries.double().numpy(), keys.double().numpy())
    found = future_attention(queries, keys, 20)
    np.testing.assert_allclose(found, exact[:, 20:, :20].max(0).sum(0), rtol=1e-4, atol=1e-6)


def test_huge_logits_do_not_overflow() -> None:
    queries, keys = torch.randn(1, 12, 4) * 1e4, torch.randn(12, 4) * 1e4
    assert future_attention(queries, keys, 6).isfinite().all()


def test_blocks_cover_the_range_once() -> None:
    queries, keys = torch.randn(1, 10, 4), torch.randn(10, 4)
    shapes = [tuple(rows.shape) for rows in attention_rows(queries, keys, 2, 9, 3)]
    assert shapes == [(1, 3, 5), (1, 3, 8), (1, 1, 9)]


def test_wrong_shapes_and_ranges_are_refused() -> None:
    queries, keys = torch.randn(2, 10, 4), torch.randn(10, 4)
    with pytest.raises(ValueError, match="disagree"):
        future_attention(queries, torch.randn(9, 4), 3)
    with pytest.raises(ValueError, match="disagree"):
        column_sums(torch.randn(10, 4), keys)
    for cut, stop in ((5, 4), (3, 11), (11, None)):
        with pytest.raises(ValueError, match="no queries"):
            future_attention(queries, keys, cut, stop)
