from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.hf import Prefill, observe, prefill
from kvp.hf.prefill import unpadded
from kvp.scoring import ALL_QUERIES, Needs

Prompt = Callable[..., Tensor]


@pytest.fixture
def seen(qwen: PreTrainedModel, prompt: Prompt) -> Prefill:
    """Twelve tokens with the last five queries."""
    return prefill(qwen, prompt(12, batch=2), [Needs(queries=5), Needs(queries=1)])


def test_views_carry_what_was_declared(seen: Prefill) -> None:
    future = [torch.rand(2, 2, 12) for _ in range(3)]
    for index, view in enumerate(seen.views(Needs(queries=3, future=True), 7, future=future)):
        assert (view.layer, view.budget) == (index, 7)
        assert view.keys is seen.keys[index]
        assert view.values is seen.values[index]
        assert view.positions.tolist() == [list(range(12))] * 2
        assert view.queries is not None
        assert torch.equal(view.queries, seen.queries[index][:, :, 2:])
        assert view.future is future[index]
    bare = next(iter(seen.views(Needs(), 7, future=future)))
    assert bare.queries is None
    assert bare.future is None


def test_views_hold_the_token_that_is_fed_again(qwen: PreTrainedModel, prompt: Prompt) -> None:
    ids, needs = prompt(12), Needs(queries=3, future=True, hidden_after=2)
    whole = prefill(qwen, ids, needs)
    seen = prefill(qwen, ids, needs, fed_again=1)
    assert (whole.tokens, seen.tokens) == (12, 11)
    future = [torch.rand(1, 2, 11) for _ in range(3)]
    for view, (index, other) in zip(
        seen.views(needs, 7, future=future),
        enumerate(whole.views(Needs(queries=3, hidden_after=2), 7)),
        strict=True,
    ):
        assert torch.equal(view.keys, other.keys)
        assert torch.equal(view.positions, other.positions)
        assert view.queries is not None
        assert other.queries is not None
        assert torch.equal(view.queries, other.queries)
        assert view.hidden is not None
        assert other.hidden is not None
        assert torch.equal(view.hidden.mean, other.hidden.mean)
        assert view.future is not None
        assert torch.equal(view.future[..., :11], future[index])
        assert view.future[..., 11].tolist() == [[0.0, 0.0]]
        assert (view.fed_again, other.fed_again) == (1, 0)


def test_views_refuse_what_was_not_observed(seen: Prefill) -> None:
    with pytest.raises(ValueError, match="12 queries are needed, 5"):
        next(iter(seen.views(Needs(queries=ALL_QUERIES), 7)))
    with pytest.raises(ValueError, match="future"):
        next(iter(seen.views(Needs(future=True), 7)))


def test_what_several_scorers_need_is_recorded_once(qwen: PreTrainedModel, prompt: Prompt) -> None:
    needs = [Needs(queries=3, hidden_after=4), Needs(queries=ALL_QUERIES), Needs(hidden_after=2)]
    seen = prefill(qwen, prompt(12), needs)
    assert seen.queries[0].shape[2] == 12
    for need in needs:
        first = next(iter(seen.views(need, 7)))
        assert (first.hidden is None) == (need.hidden_after is None)
    assert prefill(qwen, prompt(12)).queries == ()


def test_stored_tensors_serve_what_needs_no_model(qwen: PreTrainedModel, prompt: Prompt) -> None:
    seen = prefill(qwen, prompt(12), Needs(queries=2))
    stored = Prefill(keys=seen.keys, values=seen.values, queries=seen.queries)
    view = next(iter(stored.views(Needs(queries=2), 7)))
    assert view.keys is seen.keys[0]
    with pytest.raises(ValueError, match="set inputs"):
        next(iter(stored.views(Needs(rope=True), 7)))


@pytest.mark.parametrize(
    ("padding", "one_by_one", "sizes"),
    [([0, 0], False, [(2, 12)]), ([0, 0], True, [(1, 12)] * 2), ([0, 5], False, [(1, 12), (1, 7)])],
)
def test_parts_hold_no_padding(
    qwen: PreTrainedModel,
    prompt: Prompt,
    padding: list[int],
    one_by_one: bool,
    sizes: list[tuple[int, int]],
) -> None:
    ids = prompt(12, batch=2)
    seen = observe(qwen, ids, hidden_after=(2,))
    parts = unpadded(seen, padding, qwen, ids, one_by_one=one_by_one)
    assert [(p.keys[0].shape[0], p.tokens) for _, p in parts] == sizes
    assert [batch.start for batch, _ in parts] == list(range(len(parts)))
    for batch, part in parts:
        assert torch.equal(part.values[1], seen.values[1][batch, :, padding[batch.start] :])
        view = next(iter(part.views(Needs(queries=3, hidden_after=2), 7)))
        assert view.queries is not None
        assert torch.equal(view.queries, seen.queries[0][batch, :, -3:])
