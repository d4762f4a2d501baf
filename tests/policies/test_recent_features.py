"""What the last queries attend to, as features: against plain sums, and what must not matter."""

import math

import pytest
import torch

from policies.ranker import RECENT_FEATURES, RECENT_QUERIES, recent_features


def tensors(tokens, seed=0):
    """Queries [2, 4, tokens, 8] and keys [2, 2, tokens, 8]."""
    random = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2, 4, tokens, 8, generator=random),
        torch.randn(2, 2, tokens, 8, generator=random),
    )


def attention(queries, keys, head):
    """Causal attention of the two query heads of a KV head, [2, tokens, tokens] float64."""
    tokens = keys.shape[1]
    rows = []
    for query_head in (2 * head, 2 * head + 1):
        logits = queries[query_head].double() @ keys[head].double().T / math.sqrt(8)
        unseen = torch.ones(tokens, tokens).triu(1).bool()
        rows.append(logits.masked_fill(unseen, -torch.inf).softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 9, 50])
def test_columns_are_attention_pooled_and_largest(tokens):
    queries, keys = tensors(tokens)
    features = recent_features(queries, keys)
    assert features.shape == (2, 2, tokens, RECENT_FEATURES)
    for entry, head in ((0, 0), (1, 1)):
        paid = attention(queries[entry], keys[entry], head)
        columns = []
        for window in (1, 4, 16, 32):
            mean = paid[:, -window:].mean((0, 1))
            columns.append(mean)
            for half in (3, 15, 31):
                near = [mean[max(0, i - half) : i + half + 1].max() for i in range(tokens)]
                columns.append(torch.stack(near))
        columns.append(paid[:, -32:].amax((0, 1)))
        expected = (torch.stack(columns, -1) * tokens).clamp_min(1e-3).log()
        torch.testing.assert_close(
            features[entry, head, :, :-1].double(), expected, atol=1e-4, rtol=0
        )
        last = features[entry, head, :, -1].tolist()
        assert last == [float(i >= tokens - 32) for i in range(tokens)]


def test_only_the_last_queries_are_read():
    queries, keys = tensors(60)
    expected = recent_features(queries, keys)
    torch.testing.assert_close(recent_features(queries[:, :, -RECENT_QUERIES:], keys), expected)
