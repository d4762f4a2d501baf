from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvp.errors import UsageError
from kvp.hf import EvictingCache, observe

Prompt = Callable[..., Tensor]
TOLERANCE = 1e-4


def random_sets(batch: int, layers: int, heads: int, tokens: int, sizes: Sequence[int]) -> list:
    """Kept tokens [entry][layer][head], a different random set everywhere."""
    generator = torch.Generator().manual_seed(5)
    return [
        [
            [
                sorted(torch.randperm(tokens, generator=generator)[: sizes[entry]].tolist())
                for _ in range(heads)
            ]
            for _ in range(layers)
        ]
        for entry in range(batch)
    ]


def slots(sets: list, layers: int) -> list[Tensor]:
    """Per layer [B, H, S], filled up with -1."""
    width = max(len(head) for entry in sets for layer in entry for head in layer)
    return [
        torch.tensor(
            [[head + [-1] * (width - len(head)) for head in entry[layer]] for entry in sets]
        )
        for layer in range(layers)
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_evicted_is_bitwise_the_plain_model(
    model: PreTrainedModel, prompt: Prompt, padded: bool
) -> None:
    ids = prompt(30, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = int(not padded)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = []
    for attention, cache in (("kvp", EvictingCache()), ("sdpa", DynamicCache(config=model.config))):
        model.set_attn_implementation(attention)
        parts = []
        for start, stop in ((0, 20), (20, 27), (27, 28), (28, 29), (29, 30)):
            parts.append(
                model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=cache,
                ).logits
            )
        logits.append(torch.cat(parts, dim=1))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("chunk", [1, 7])
def test_dropping_equals_masking(
    model: PreTrainedModel, prompt: Prompt, masked_logits: Callable[..., Tensor], chunk: int
) -> None:
    """Four entries of one prefill, each layer and head with its own set; then 14 more tokens."""
    tokens, follow = 40, 14
    ids = prompt(tokens + follow)
    seen = observe(model, ids[:, :tokens])
    sets = random_sets(4, 3, 2, tokens, sizes=(12, 5, 29, 1))
    cache = EvictingCache.select(seen.keys, seen.values, slots(sets, 3), seen=tokens)
    assert cache.get_seq_length() == tokens
    parts = [
        model(ids[:, start : start + chunk].expand(4, -1), past_key_values=cache).logits
        for start in range(tokens, tokens + follow, chunk)
    ]
    logits = torch.cat(parts, dim=1)
    full = model(ids, use_cache=False).logits[0, tokens:]
    for entry in range(4):
        expected = masked_logits(model, ids, tokens, sets[entry])[0, tokens:]
        assert (logits[entry] - expected).abs().max() <= TOLERANCE
        assert (logits[entry] - full).abs().max() > 0.01  # the eviction is felt


@pytest.mark.parametrize("sizes", [(9, 6), (9, 9)])
def test_left_padded_sequences_equal_each_alone(
    model: PreTrainedModel,
    prompt: Prompt,
    masked_logits: Callable[..., Tensor],
    sizes: tuple[int, int],
) -> None:
    """Prompts of 40 and 28 tokens are shrunk; then a chunk of 7, padded in one entry, and 1."""
    long, short = prompt(48, seed=2), prompt(34, seed=3)
    ids = torch.cat([long[:, :40], torch.nn.functional.pad(short[:, :28], (12, 0))])
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    cache = EvictingCache()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    sets = random_sets(2, 3, 2, 28, sizes=sizes)
    for layer in range(3):
        indices = slots(sets, 3)[layer]
        indices[1] = torch.where(indices[1] >= 0, indices[1] + 12, -1)
        cache.layers[layer] = cache.layers[layer].select(indices)
    chunk = torch.cat([long[:, 40:47], torch.nn.functional.pad(short[:, 28:33], (2, 0))])
    mask = torch.cat([mask, torch.tensor([[1] * 7, [0, 0] + [1] * 5])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    first = model(
        chunk, attention_mask=mask, position_ids=positions[:, 40:], past_key_values=cache
    ).logits
    last = torch.stack([long[0, 47:48], short[0, 33:34]])
    positions = torch.tensor([[47], [33]])
    second = model(last, position_ids=positions, past_key_values=cache).logits
    expected = masked_logits(model, long, 40, sets[0])[0, 40:]
    assert (torch.cat([first[0], second[0]]) - expected).abs().max() <= TOLERANCE
    expected = masked_logits(model, short, 28, sets[1])[0, 28:]
    assert (torch.cat([first[1, 2:], second[1]]) - expected).abs().max() <= TOLERANCE


def test_bytes_are_those_of_the_tensors(model: PreTrainedModel, prompt: Prompt) -> None:
    head_dim = model.config.head_dim if model.config.model_type == "qwen3" else 8
    seen = observe(model, prompt(80))
    per_token = 3 * 2 * head_dim * 4 * 2  # layers, heads, dimensions, bytes, key and value
    assert seen.cache.nbytes == 80 * per_token
    for layer in seen.cache.layers:  # not a window into a fused projection
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
    kept = [torch.arange(10).expand(5, 2, -1)] * 3
    cache = EvictingCache.select(seen.keys, seen.values, kept, seen=80)
    assert cache.nbytes == 5 * 10 * per_token
    for step in range(4):
        model(prompt(1).expand(5, -1), past_key_values=cache)
        model(prompt(1), past_key_values=seen.cache)
        for grown, slots_stored in ((cache, 5 * (10 + step + 1)), (seen.cache, 80 + 10)):
            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for layer in grown.layers
                for tensor in (layer.keys, layer.values)
            }
            assert grown.nbytes == sum(storages.values()) == slots_stored * per_token


@pytest.mark.parametrize("feed", [1, 20])
def test_tokens_already_cached_are_refused(
    qwen: PreTrainedModel, prompt: Prompt, feed: int
) -> None:
    ids = prompt(20)
    seen = observe(qwen, ids)
    shrunk = EvictingCache.select(
        seen.keys, seen.values, [torch.arange(5).expand(1, 2, -1)] * 3, seen=20
    )
    for cache in (seen.cache, shrunk):
        with pytest.raises(UsageError, match="at least one prompt token"):
            qwen(
                ids[:, -feed:],
                position_ids=torch.arange(20 - feed, 20)[None],
                past_key_values=cache,
            )


def test_masks_that_cannot_be_read_are_refused(qwen: PreTrainedModel, prompt: Prompt) -> None:
    for mask in (torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 9, dtype=torch.bool)):
        with pytest.raises(UsageError, match="attention_mask must be 2-D"):
            qwen(prompt(4), attention_mask=mask, past_key_values=EvictingCache())


def test_rollback_and_gradients_are_refused(qwen: PreTrainedModel, prompt: Prompt) -> None:
    cache = observe(qwen, prompt(8)).cache
    cache.crop(0)
    with pytest.raises(UsageError, match="rolled back"):
        cache.crop(-2)
    qwen.requires_grad_(True)
    with pytest.raises(UsageError, match="no_grad"):
        qwen(prompt(8), past_key_values=EvictingCache())


def test_selection_must_fit(qwen: PreTrainedModel, prompt: Prompt) -> None:
    seen = observe(qwen, prompt(8, batch=2))
    for indices in (torch.zeros(3, 2, 4).long(), torch.zeros(2, 3, 4).long()):
        with pytest.raises(ValueError, match="do not select"):
            EvictingCache.select(seen.keys, seen.values, [indices] * 3, seen=8)
    with pytest.raises(ValueError, match="7 tokens seen"):
        EvictingCache.select(seen.keys, seen.values, [torch.zeros(2, 2, 4).long()] * 3, seen=7)
