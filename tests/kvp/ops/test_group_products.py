"""Grouped products: the numbers of broadcasting, and no tensor that holds the keys G times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvp.ops.group_products import group_products
from kvp.ops.reconstruction_attention import reconstruction_attention
from kvp.ops.streaming_softmax import attention_blocks
from kvp.rope import Rope
from kvp.scoring import HiddenStates, View
from policies.registry import make_scorer

BATCH, HEADS, GROUP, TOKENS, WIDTH = 2, 2, 8, 64, 512


class LargestResult(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def largest_result(compute: Callable[[], object]) -> int:
    with LargestResult() as mode:
        compute()
    return mode.elements


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 3, 7), (2, 4, 1)])
def test_equals_the_broadcast_product(shape: tuple[int, int, int]) -> None:
    heads, group, count = shape
    queries, keys = drawn(5, heads, group, count, 6).double(), drawn(5, heads, 11, 6).double()
    broadcast = queries @ keys[:, :, None].mT
    torch.testing.assert_close(group_products(queries, keys), broadcast, rtol=1e-12, atol=1e-12)


def test_operators_hold_no_keys_per_group() -> None:
    keys = drawn(BATCH, HEADS, TOKENS, WIDTH)
    queries = drawn(BATCH, HEADS, GROUP, TOKENS, WIDTH)
    few = queries[..., :2, :]
    blocks = attention_blocks(queries, keys, TOKENS - 2, TOKENS, 2)
    assert largest_result(lambda: list(blocks)) <= keys.numel()

    def replayed() -> Tensor:
        return reconstruction_attention(few, keys, keys[..., :2, :], scaling=1.0)

    assert largest_result(replayed) <= keys.numel()


@pytest.mark.parametrize(
    "spec", ["tova", "snapkv(window=2)", "windowkv(observed=2)", "gvote(future=9)"]
)
def test_scorers_hold_no_keys_per_group(spec: str) -> None:
    scorer = make_scorer(spec)
    keys = drawn(BATCH, HEADS, TOKENS, WIDTH)
    queries = drawn(BATCH, HEADS * GROUP, TOKENS, WIDTH)
    view = View(
        layer=0, keys=keys, values=keys, budget=8,
        positions=torch.arange(TOKENS).expand(BATCH, TOKENS),
        queries=queries[:, :, TOKENS - scorer.needs.queries :],
    )  # fmt: skip
    if scorer.needs.rope:
        states = HiddenStates(
            mean=drawn(BATCH, 3), variance=drawn(BATCH, 3).abs(),
            project=lambda hidden: queries[:, :, : hidden.shape[1]],
        )  # fmt: skip
        rope = Rope(frequencies=100.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2)))
        view = replace(view, rope=rope, hidden=states)
    assert largest_result(lambda: scorer.score(view)) <= keys.numel()
