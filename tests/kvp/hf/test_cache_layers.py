"""Layers of the evicting cache: logits as under a mask, and bytes of the kept tokens alone."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvp.errors import UsageError
from kvp.hf import EvictingCache, run_and_record
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache_layers import TAIL_GROWTH, EvictingLayer, RaggedLayer
from kvp.hf.visibility import EMPTY

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")

TOLERANCE = 1e-4


def uneven_sets(batch, tokens, *, seed=5, full_layer=2):
    """Kept tokens of 3 layers with 2 heads: from 1 token (the first head) to all (`full_layer`)."""
    generator = torch.Generator().manual_seed(seed)

    def some(entry, layer, head):
        size = int(torch.randint(2, tokens, (1,), generator=generator))
        size = 1 if (layer, head) == (0, 0) else tokens if layer == full_layer else size
        return sorted(torch.randperm(tokens, generator=generator)[:size].tolist())

    return [
        [[some(entry, layer, head) for head in range(2)] for layer in range(3)]
        for entry in range(batch)
    ]


def slots(sets, layer):
    """Kept tokens of a layer, [B, H, S], filled up with -1."""
    width = max(len(head) for entry in sets for head in entry[layer])
    return torch.tensor(
        [[head + [-1] * (width - len(head)) for head in entry[layer]] for entry in sets]
    )


def feed(model, cache, ids, mask, cuts):
    """Logits of ids [B, T], fed from cut to cut."""
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    parts = [
        model(
            ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache,
            position_ids=positions[:, start:stop],
        ).logits
        for start, stop in pairwise(cuts)
    ]  # fmt: skip
    return torch.cat(parts, dim=1)


def shrink_cache(model, ids, sets):
    seen = run_and_record(model, ids)
    indices = [slots(sets, layer) for layer in range(3)]
    return EvictingCache.gather(seen.keys, seen.values, indices, seen=ids.shape[1])


def test_dropping_equals_masking_after_chunks_of_any_length(model, prompt, masked_logits):
    """Three entries of one prefill; then 1, 2, 7, 64, 1 and 1 more tokens."""
    tokens, chunks = 40, (1, 2, 7, 64, 1, 1)
    ids = prompt(tokens + sum(chunks))
    sets = uneven_sets(3, tokens)
    cache = shrink_cache(model, ids[:, :tokens], sets)
    assert [type(layer) for layer in cache.layers] == [RaggedLayer, RaggedLayer, EvictingLayer]
    logits = torch.cat(
        [
            model(part.expand(3, -1), past_key_values=cache).logits
            for part in ids[:, tokens:].split(chunks, dim=1)
        ],
        dim=1,
    )
    full = model(ids, use_cache=False).logits[0, tokens:]
    for entry in range(3):
        expected = masked_logits(model, ids, tokens, sets[entry])[0, tokens:]
        assert (logits[entry] - expected).abs().max() <= TOLERANCE
        assert (logits[entry] - full).abs().max() > 0.01  # the eviction is felt


def test_bf16_stays_near_the_masked_reference(qwen, prompt, masked_logits):
    ids = prompt(30)
    sets = uneven_sets(1, 20)
    truth = masked_logits(qwen, ids, 20, sets[0])[0, 20:]
    qwen.to(torch.bfloat16)
    reference = masked_logits(qwen, ids, 20, sets[0])[0, 20:].float()
    logits = qwen(ids[:, 20:], past_key_values=shrink_cache(qwen, ids[:, :20], sets)).logits[0]
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - truth).abs().mean() <= 1.5 * (reference - truth).abs().mean()


def storage_bytes(layer):
    """Bytes of all tensors that a layer, or what it holds, points to."""

    def tensors(of):
        for value in vars(of).values():
            if isinstance(value, Tensor):
                yield value
            elif hasattr(value, "__dict__") and not isinstance(value, type):
                yield from tensors(value)

    storages = [tensor.untyped_storage() for tensor in tensors(layer)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_memory_is_that_of_the_tokens_kept():
    """Keys, values, positions and lengths of a long cache: within 2 % of the tokens' bytes."""
    tokens, width, batch, heads = 20_000, 64, 2, 4
    keys = torch.zeros(batch, heads, tokens, width, dtype=torch.bfloat16)
    lengths = torch.tensor([[20_000, 1, 700, 12_345], [8_192, 30, 19_999, 4_000]])
    indices = torch.arange(tokens).expand(batch, heads, -1)
    indices = indices.where(indices < lengths[..., None], -1)
    cache = EvictingCache.gather([keys], [keys], [indices], seen=tokens)
    token = 2 * width * 2
    kept = int(lengths.sum()) * token
    assert cache.nbytes == kept
    assert cache.entry_nbytes == [int(entry.sum()) * token for entry in lengths]

    assert storage_bytes(cache.layers[0]) <= 1.02 * kept + 1000
    cache.layers[0].update(keys[:, :, :1], keys[:, :, :1])
    constant = TAIL_GROWTH * batch * heads * token
    assert cache.nbytes == kept + constant
    assert storage_bytes(cache.layers[0]) <= 1.02 * kept + constant + 2000


def test_positions_of_what_is_stored(qwen, prompt):
    seen = run_and_record(qwen, prompt(20))
    indices = torch.tensor([[[3, 7, 9], [5, -1, -1]], [[-1, 2, -1], [-1, -1, -1]]])
    cache = EvictingCache.gather(seen.keys, seen.values, [indices] * 3, seen=20)
    layer = cache.layers[1]
    assert isinstance(layer, RaggedLayer)
    assert layer.lengths.tolist() == [[3, 1], [1, 0]]
    assert torch.equal(layer.keys, seen.keys[1][0][[0, 0, 0, 1, 0], [3, 7, 9, 5, 2]])
    e = EMPTY
    expected = [[[3, 7, 9], [5, e, e]], [[2, e, e], [e, e, e]]]
    assert layer.positions.tolist() == expected
    assert (cache.get_seq_length(), cache.get_mask_sizes(4, 0)) == (20, (4, 20))
    cache.recorder = QueryRecorder(4)
    qwen(prompt(2).expand(2, -1), past_key_values=cache)
    assert layer.positions.tolist() == [[[*head, 20, 21] for head in entry] for entry in expected]
    cache.end_prompt()
    cache.reset()
    assert (cache.get_seq_length(), cache.nbytes, cache.evicted) == (0, 0, False)
    assert (cache.shrunk_at, cache.prompt_tokens) == (0, None)
    qwen(prompt(2), past_key_values=cache)  # of another batch size


@pytest.mark.parametrize("padded", [False, True])
def test_nothing_evicted_is_bitwise_the_plain_model(model, prompt, padded):
    ids = prompt(30, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = int(not padded)
    logits = []
    for attention, cache in (("kvp", EvictingCache()), ("sdpa", DynamicCache(config=model.config))):
        model.set_attn_implementation(attention)
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        logits.append((whole, feed(model, cache, ids, mask, (0, 20, 27, 28, 29, 30))))
    assert all(map(torch.equal, *logits))


def test_bytes_are_those_of_the_tensors(model, prompt):
    head_dim = model.config.head_dim if model.config.model_type == "qwen3" else 8
    seen = run_and_record(model, prompt(80))
    per_token = 3 * 2 * head_dim * 4 * 2  # layers, heads, dimensions, bytes, key and value
    assert seen.cache.nbytes == 80 * per_token
    for layer in seen.cache.layers:  # not a window into a fused projection
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
    kept = [torch.arange(10).expand(5, 2, -1)] * 3
    cache = EvictingCache.gather(seen.keys, seen.values, kept, seen=80)
    assert cache.nbytes == 5 * 10 * per_token
    for step in range(4):
        model(prompt(1).expand(5, -1), past_key_values=cache)
        model(prompt(1), past_key_values=seen.cache)
        for grown, slots_stored in ((cache, 5 * (10 + step + 1)), (seen.cache, 80 + 10)):
            assert grown.nbytes == slots_stored * per_token


def test_tokens_already_cached_are_refused(qwen, prompt):
    ids, positions = prompt(20), torch.tensor([[19]])
    for cache in (run_and_record(qwen, ids).cache, shrink_cache(qwen, ids, uneven_sets(1, 20))):
        with pytest.raises(UsageError, match="at least one prompt token"):
            qwen(ids[:, -1:], position_ids=positions, past_key_values=cache)


def test_rollback_odd_masks_dropout_gradients_and_autocast_are_refused(qwen, prompt):
    for mask in (torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 9, dtype=torch.bool)):
        with pytest.raises(UsageError, match="attention_mask must be 2-D"):
            qwen(prompt(4), attention_mask=mask, past_key_values=EvictingCache())
    cache = run_and_record(qwen, prompt(8)).cache
    cache.crop(0)
    with pytest.raises(UsageError, match="rolled back"):
        cache.crop(-2)
    cache = shrink_cache(qwen, prompt(20), uneven_sets(1, 20, full_layer=None))
    qwen.train()
    for block in qwen.model.layers:
        block.self_attn.attention_dropout = 0.5
    with pytest.raises(UsageError, match=r"model\.eval\(\)"):
        qwen(prompt(1), position_ids=torch.tensor([[20]]), past_key_values=cache)
    qwen.eval().requires_grad_(True)
    with pytest.raises(UsageError, match="no_grad"):
        qwen(prompt(8), past_key_values=EvictingCache())
    with pytest.raises(UsageError, match="no autocast"), torch.autocast("cpu"), torch.no_grad():
        qwen(prompt(8), past_key_values=EvictingCache())
