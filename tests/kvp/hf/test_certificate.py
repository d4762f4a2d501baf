"""Weights in a cache reach the attention, and errors are estimated from what it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.errors import UsageError
from kvp.hf import EvictingCache, load_model, observe
from kvp.hf.certificate import estimated_errors
from kvp.hf.eviction import evicting, prefill_and_evict
from kvp.hf.gated import gated_logits
from kvp.hf.generation import next_logits
from policies import make_allocator, make_scorer

CACHED, FED = 30, 5


def cache_of(
    model: PreTrainedModel, ids: Tensor, *, ragged: bool, weighted: bool = True, entries: int = 2
) -> tuple[EvictingCache, Tensor, Tensor, Tensor]:
    """A cache with weights, the keys and values [L, H, N, D] it is of, and log gates [L, H, N]."""
    seen = observe(model, ids[None, :CACHED], last_logits=True)
    generator = torch.Generator().manual_seed(3)
    shape = (len(seen.keys), seen.keys[0].shape[1], CACHED)
    order = torch.rand(shape, generator=generator).argsort(-1)
    counts = torch.randint(6, 12, shape[:2], generator=generator) if ragged else 9
    stays = order < (counts[..., None] if isinstance(counts, Tensor) else counts)
    bias = torch.rand(shape, generator=generator).mul(3) * (order > 4)
    gates = torch.where(stays, bias if weighted else 0.0, -torch.inf)
    width = int(stays.sum(-1).max())
    first = stays.long().argsort(dim=-1, descending=True, stable=True)[..., :width]
    absent = ~stays.gather(-1, first)
    tokens = first.masked_fill(absent, -1)
    added = gates.gather(-1, first).masked_fill(absent, 0.0)
    cache = EvictingCache.select(
        seen.keys, seen.values, [layer.expand(entries, -1, -1) for layer in tokens], seen=CACHED,
        bias=[layer.expand(entries, -1, -1) for layer in added] if weighted else None,
    )  # fmt: skip
    return cache, torch.cat(list(seen.keys)), torch.cat(list(seen.values)), gates


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("attention", ["kvp", "kvp_eager"])
def test_logits_are_those_of_all_tokens_with_the_weights_as_gates(
    qwen: PreTrainedModel, prompt: Callable[..., Tensor], ragged: bool, attention: str
) -> None:
    ids = prompt(CACHED + FED)[0]
    qwen.set_attn_implementation(attention)
    cache, keys, values, gates = cache_of(qwen, ids, ragged=ragged)
    expected = gated_logits(qwen, keys, values, ids[CACHED:], gates)
    with torch.no_grad():
        chunk = ids[None, CACHED : CACHED + 3].expand(2, -1)
        first = next_logits(qwen, chunk, cache, CACHED, keep=3)
        cache.batch_select_indices(torch.tensor([1]))
        second = next_logits(qwen, ids[None, -2:-1], cache, CACHED + 3, keep=1)
        cache.batch_repeat_interleave(2)
        third = next_logits(qwen, ids[None, -1:].expand(2, -1), cache, CACHED + 4, keep=1)
    torch.testing.assert_close(first[0], expected[:3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(second[0], expected[3:4], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(third[1], expected[4:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_weighted_cache_is_not_shrunk_again(
    qwen: PreTrainedModel, prompt: Callable[..., Tensor], ragged: bool
) -> None:
    cache, *_ = cache_of(qwen, prompt(CACHED)[0], ragged=ragged)
    heads = cache.layers[0].positions.shape[1]
    with pytest.raises(UsageError, match="drawn by lot"):
        cache.layers[0].select(torch.zeros(2, heads, 1, dtype=torch.int64))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_estimated_errors_are_those_of_the_attention_the_model_computes(
    qwen: PreTrainedModel, prompt: Callable[..., Tensor], ragged: bool, weighted: bool
) -> None:
    ids = prompt(CACHED + FED)[0]
    cache, *_ = cache_of(qwen, ids, ragged=ragged, weighted=weighted)
    inputs: list[Tensor] = []
    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for layer in qwen.model.layers
    ]
    fed = ids[None, CACHED:].expand(2, -1)
    found = list(estimated_errors(qwen, cache, fed, CACHED))
    for hook in hooks:
        hook.remove()
    assert len(found) == len(inputs) == 3
    for estimate, computed in zip(found, inputs, strict=True):
        output = estimate.output.transpose(1, 2).flatten(2).float()
        torch.testing.assert_close(output, computed, atol=1e-4, rtol=1e-4)
        assert estimate.error.shape == estimate.output.shape[:-1]
        assert bool(estimate.error.any()) is weighted
        assert bool((estimate.error > 0).all()) is weighted


def test_eviction_of_nano_with_draws_is_that_of_its_seed() -> None:
    model, _ = load_model("nano")
    ids = torch.randint(5, 4000, (1, 90), generator=torch.Generator().manual_seed(0))
    rule = make_allocator("sampled(share=0.4,split=ada)")
    first, second = (
        prefill_and_evict(model, ids, make_scorer("snapkv"), 40, allocator=rule, fed_again=1)
        for _ in range(2)
    )
    plain = prefill_and_evict(
        model, ids, make_scorer("snapkv"), 40, allocator=make_allocator("ada"), fed_again=1
    )
    assert first.nbytes == plain.nbytes
    for layer, other in zip(first.layers, second.layers, strict=True):
        assert torch.equal(layer.positions, other.positions)
        assert layer.slots[2].any()
        assert torch.equal(layer.slots[2], other.slots[2])
    with evicting(model, make_scorer("snapkv"), 40, allocator=rule):
        tokens = model.generate(
            ids.expand(2, -1), attention_mask=torch.ones(2, 90), max_new_tokens=3, do_sample=False
        )
    assert torch.equal(tokens[0], tokens[1])
