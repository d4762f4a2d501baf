"""Column sums and blocks of attention against the full T x T matrix in float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvp.ops.streaming_softmax import attention_blocks, column_sums

FullAttention = Callable[[np.ndarray, np.ndarray], np.ndarray]


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("block", [1, 5, 37, 256])
def test_column_sums(full_attention: FullAttention, group: int, block: int) -> None:
    rng = np.random.default_rng(group)
    queries, keys = 3 * rng.normal(size=(group, 37, 8)), rng.normal(size=(37, 8))
    result = column_sums(torch.tensor(queries).float(), torch.tensor(keys).float(), block)
    assert result.shape == (group, 37)
    np.testing.assert_allclose(result, full_attention(queries, keys).sum(1), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(result.sum(-1), 37, rtol=1e-5)


def test_blocks_cover_the_range_once() -> None:
    queries, keys = torch.randn(1, 10, 4), torch.randn(10, 4)
    shapes = [tuple(block.shape) for block in attention_blocks(queries, keys, 2, 9, 3)]
    assert shapes == [(1, 3, 5), (1, 3, 8), (1, 1, 9)]


def test_wrong_shapes_and_ranges_are_refused() -> None:
    queries, keys = torch.randn(2, 10, 4), torch.randn(10, 4)
    with pytest.raises(ValueError, match="disagree"):
        column_sums(torch.randn(10, 4), keys)
    for start, stop, block in ((5, 4, 2), (3, 11, 2), (-1, 4, 2), (0, 4, 0)):
        with pytest.raises(ValueError, match="no queries"):
            list(attention_blocks(queries, keys, start, stop, block))
