"""Logits behind a gated cache: no gates are the plain model, closed gates are deleted tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvp.hf import load_model, observe
from kvp.hf.extra_passes import gated_logits

TOKENS, CACHED = 40, 30


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_model("nano")[0]


@pytest.fixture(scope="module")
def seen(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T], and keys and values [L, H, N, D] of the first of them."""
    ids = torch.randint(5, 4000, (TOKENS,), generator=torch.Generator().manual_seed(0))
    states = observe(model, ids[None])
    keys = torch.cat(list(states.keys))[:, :, :CACHED]
    return ids, keys, torch.cat(list(states.values))[:, :, :CACHED]


def test_without_gates_it_is_the_plain_model(
    model: PreTrainedModel, seen: tuple[torch.Tensor, ...]
) -> None:
    ids, keys, values = seen
    with torch.no_grad():
        plain = model(input_ids=ids[None]).logits[0, CACHED:]
        gated = gated_logits(model, keys, values, ids[CACHED:])
        opened = gated_logits(model, keys, values, ids[CACHED:], torch.zeros(keys.shape[:3]))
    torch.testing.assert_close(gated, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(opened, plain, atol=1e-4, rtol=1e-4)


def test_closed_gates_are_deleted_tokens(
    model: PreTrainedModel, seen: tuple[torch.Tensor, ...]
) -> None:
    ids, keys, values = seen
    kept = torch.arange(0, CACHED, 3)
    gates = torch.full(keys.shape[:3], -torch.inf)
    gates[..., kept] = 0.0
    cache = DynamicCache(config=model.config)
    for layer in range(keys.shape[0]):
        cache.update(keys[layer, :, kept][None], values[layer, :, kept][None], layer)
    with torch.no_grad():
        deleted = model(
            input_ids=ids[None, CACHED:],
            past_key_values=cache,
            position_ids=torch.arange(CACHED, TOKENS)[None],
        ).logits[0]
        gated = gated_logits(model, keys, values, ids[CACHED:], gates)
    torch.testing.assert_close(gated, deleted, atol=1e-4, rtol=1e-4)


def test_every_head_has_its_own_gates_and_gradients_reach_them(
    model: PreTrainedModel, seen: tuple[torch.Tensor, ...]
) -> None:
    ids, keys, values = seen
    gates = torch.full(keys.shape[:3], -0.7, requires_grad=True)
    following = ids[CACHED:]

    def loss(log_gates: torch.Tensor) -> torch.Tensor:
        logits = gated_logits(model, keys, values, following, log_gates)
        return logits.double().log_softmax(-1)[-1, 7]

    (gradient,) = torch.autograd.grad(loss(gates), gates)
    place = tuple(int(i) for i in (gradient.abs() == gradient.abs().max()).nonzero()[0])
    step = torch.zeros_like(gates)
    step[place] = 1e-2
    with torch.no_grad():
        slope = (loss(gates + step) - loss(gates - step)) / 2e-2
    assert float(slope) == pytest.approx(float(gradient[place]), rel=2e-2)
    assert (gradient.flatten(2).abs().sum(-1) > 0).all()
