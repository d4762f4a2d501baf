from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvp.errors import UsageError
from kvp.hf import EvictingCache, observe

Prompt = Callable[..., Tensor]


def test_tensors_are_what_attention_used(model: PreTrainedModel, prompt: Prompt) -> None:
    """Keys and values are those of a stock cache; softmax(q k) is the stock attention."""
    ids = prompt(18, batch=2)
    seen = observe(model, ids)
    stock = DynamicCache(config=model.config)
    model.set_attn_implementation("eager")
    output = model(ids, past_key_values=stock, output_attentions=True)
    causal = torch.ones(18, 18).tril().bool()
    for layer in range(3):
        torch.testing.assert_close(seen.keys[layer], stock.layers[layer].keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            seen.values[layer], stock.layers[layer].values, atol=1e-5, rtol=0
        )
        repeated = seen.keys[layer].repeat_interleave(2, dim=1)
        scores = seen.queries[layer] @ repeated.mT / repeated.shape[-1] ** 0.5
        attention = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        torch.testing.assert_close(attention, output.attentions[layer], atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.logits, output.logits, atol=1e-4, rtol=0)


def test_recent_queries_and_last_logits(qwen: PreTrainedModel, prompt: Prompt) -> None:
    ids = prompt(18)
    everything = observe(qwen, ids)
    recent = observe(qwen, ids, queries=5, last_logits=True)
    assert recent.logits.shape == (1, 1, 64)
    torch.testing.assert_close(recent.logits[:, 0], everything.logits[:, -1], atol=1e-5, rtol=0)
    for mine, whole in zip(recent.queries, everything.queries, strict=True):
        assert torch.equal(mine, whole[:, :, 13:])
        assert mine.untyped_storage().nbytes() == mine.nbytes  # not a window into a longer tensor
    assert observe(qwen, ids, queries=0).queries == ()


def test_continuing_adds_keys_and_leaves_the_first_observation_alone(
    qwen: PreTrainedModel, prompt: Prompt
) -> None:
    ids = prompt(90)
    whole = observe(qwen, ids)
    first = observe(qwen, ids[:, :20])
    before = [keys.clone() for keys in first.keys]
    second = observe(qwen, ids[:, 20:25], cache=first.cache)
    third = observe(qwen, ids[:, 25:], cache=second.cache)
    assert third.cache is first.cache
    for layer in range(3):
        assert torch.equal(first.keys[layer], before[layer])
        torch.testing.assert_close(third.keys[layer], whole.keys[layer], atol=1e-5, rtol=0)
        queries = torch.cat([part.queries[layer] for part in (first, second, third)], dim=2)
        torch.testing.assert_close(queries, whole.queries[layer], atol=1e-5, rtol=0)
    torch.testing.assert_close(third.logits, whole.logits[:, 25:], atol=1e-4, rtol=0)


def test_attention_and_recorder_are_given_back(
    qwen: PreTrainedModel, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen.set_attn_implementation("sdpa")
    cache = observe(qwen, prompt(8)).cache
    assert qwen.config._attn_implementation == "sdpa"
    assert cache.recorder is None

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(qwen.model.layers[1].mlp, "forward", fail)
    with pytest.raises(RuntimeError, match="no more"):
        observe(qwen, prompt(1), cache=cache)
    assert qwen.config._attn_implementation == "sdpa"
    assert cache.recorder is None


def test_shrunk_caches_are_refused(qwen: PreTrainedModel, prompt: Prompt) -> None:
    seen = observe(qwen, prompt(8))
    kept = [torch.arange(4).expand(1, 2, -1)] * 3
    cache = EvictingCache.select(seen.keys, seen.values, kept, seen=8)
    with pytest.raises(UsageError, match="every token"):
        observe(qwen, prompt(1), cache=cache)
