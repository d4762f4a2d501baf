"""The full T x T attention matrix in float64 NumPy: the truth that operators are compared with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

FullAttention = Callable[[np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture
def full_attention() -> FullAttention:
    """Causal probabilities [G, T, T] of one KV head, row j over keys i, in float64."""

    def compute(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        group, tokens, width = queries.shape
        rows = np.zeros((group, tokens, tokens))
        for g in range(group):
            for j in range(tokens):
                logits = keys[: j + 1] @ queries[g, j] / np.sqrt(width)
                weights = np.exp(logits - logits.max())
                rows[g, j, : j + 1] = weights / weights.sum()
        return rows

    return compute
