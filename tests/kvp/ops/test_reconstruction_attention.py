"""The replay signal, dense and blocked, against loops in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvp.ops.reconstruction_attention import (
    reconstruction_attention,
    reconstruction_attention_reference,
)

Array = np.ndarray
both = pytest.mark.parametrize(
    "signal", [reconstruction_attention, reconstruction_attention_reference]
)


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


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize(("cached", "tokens"), [(1, 1), (1, 9), (13, 1), (20, 11)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block", [None, 1, 4, 11, 256])
def test_against_loops(
    group: int, cached: int, tokens: int, weighted: bool, block: int | None
) -> None:
    queries, keys, pass_keys, w, u = _case(group, cached, tokens)
    options: dict[str, Any] = {"scaling": 0.7}
    if weighted:
        options["key_weights"], options["query_weights"] = _float32(w, u)
    else:
        w, u = np.ones_like(w), np.ones_like(u)
    inputs = _float32(queries, keys, pass_keys)
    if block is None:
        result = reconstruction_attention_reference(*inputs, **options)
    else:
        result = reconstruction_attention(*inputs, **options, block=block)
    assert result.dtype == torch.float32
    expected = _loops(queries, keys, pass_keys, w, u, 0.7)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-7)


@both
def test_one_query_by_hand(signal: Any) -> None:
    # Logits log 6, 0 and (own) 0: shares 6/8, 1/8, 1/8; the key weight 2 and the query's 3 follow.
    keys = torch.tensor([[np.log(6.0)], [0.0]], dtype=torch.float32)
    one = torch.ones(1, 1, 1)
    plain = signal(one, keys, torch.zeros(1, 1), scaling=1.0)
    np.testing.assert_allclose(plain, [0.75, 0.125], rtol=1e-6)
    weighted = signal(
        one, keys, torch.zeros(1, 1), scaling=1.0,
        key_weights=torch.tensor([[2.0, 1.0]]), query_weights=torch.tensor([3.0]),
    )  # fmt: skip
    np.testing.assert_allclose(weighted, [4.5, 0.375], rtol=1e-6)


@both
def test_leading_axes_are_independent(signal: Any) -> None:
    queries, keys, pass_keys = (
        torch.randn(2, 3, 2, 5, 4),
        torch.randn(2, 3, 8, 4),
        torch.randn(2, 3, 5, 4),
    )
    result = signal(queries, keys, pass_keys, scaling=0.5)
    assert result.shape == (2, 3, 8)
    for entry in range(2):
        for head in range(3):
            alone = signal(
                queries[entry, head], keys[entry, head], pass_keys[entry, head], scaling=0.5
            )
            torch.testing.assert_close(result[entry, head], alone)


@both
def test_later_keys_of_the_pass_are_not_seen(signal: Any) -> None:
    """The maximum sits at the first query, so what the others bring must not matter to it."""
    queries, keys, pass_keys = torch.zeros(1, 4, 2), torch.randn(6, 2), torch.zeros(4, 2)
    queries[0, 1:] = torch.tensor([60.0, 0.0])
    pass_keys[1:] = torch.tensor([60.0, 0.0])  # takes all attention of the later queries
    np.testing.assert_allclose(
        signal(queries, keys, pass_keys, scaling=1.0), np.full(6, 1 / 7), rtol=1e-6
    )


@both
def test_half_precision_and_huge_logits(signal: Any) -> None:
    queries, keys, pass_keys, w, u = _case(2, 9, 6)
    half = [tensor.bfloat16() for tensor in _float32(queries, keys, pass_keys)]
    expected = _loops(*(t.double().numpy() for t in half), np.ones_like(w), np.ones_like(u), 0.5)
    np.testing.assert_allclose(signal(*half, scaling=0.5), expected, rtol=1e-4, atol=1e-6)
    assert signal(*(1e4 * t for t in half), scaling=0.5).isfinite().all()


@both
def test_shapes_that_disagree(signal: Any) -> None:
    queries, keys, pass_keys = torch.randn(2, 5, 4), torch.randn(8, 4), torch.randn(5, 4)
    for bad in (
        (queries[:, :4], keys, pass_keys), (queries[0], keys, pass_keys),
        (queries, keys[:, :3], pass_keys),
        (queries, keys[None], pass_keys),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="disagree"):
            signal(*bad, scaling=1.0)
    with pytest.raises(ValueError, match="disagree"):
        signal(queries, keys, pass_keys, scaling=1.0, key_weights=torch.ones(2, 5))
    with pytest.raises(ValueError, match="disagree"):
        signal(queries, keys, pass_keys, scaling=1.0, query_weights=torch.ones(4))


def test_blocks_need_a_query() -> None:
    with pytest.raises(ValueError, match="at least one query"):
        reconstruction_attention(
            torch.ones(1, 1, 1), torch.ones(1, 1), torch.ones(1, 1), scaling=1, block=0
        )
