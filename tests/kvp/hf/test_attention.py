import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig

from kvp.errors import ModelError
from kvp.hf import EvictingCache
from kvp.hf.attention import ATTENTIONS, grouped_attention


def test_eager_is_transformers_eager(model, prompt):
    """Without a cache, with an ordinary one, and with an evicting one that keeps everything."""
    ids = prompt(24, batch=2)
    padding = torch.ones_like(ids)
    padding[0, :9] = 0
    model.set_attn_implementation("eager")
    stock = model(ids, use_cache=False).logits
    padded = model(ids, attention_mask=padding, use_cache=False).logits
    model.set_attn_implementation(ATTENTIONS["eager"])
    own = model(ids, attention_mask=padding, use_cache=False).logits
    torch.testing.assert_close(own[0, 9:], padded[0, 9:], rtol=0, atol=1e-5)
    torch.testing.assert_close(own[1], padded[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(model(ids, use_cache=False).logits, stock, rtol=0, atol=1e-6)
    for cache in (DynamicCache(config=model.config), EvictingCache()):
        first = model(ids[:, :15], past_key_values=cache).logits
        rest = model(ids[:, 15:], past_key_values=cache).logits
        parts = torch.cat([first, rest], dim=1)
        torch.testing.assert_close(parts, stock, rtol=0, atol=2e-5)


class Attending(nn.Module):
    """An attention module that computes its products in one way."""

    def __init__(self, attention):
        super().__init__()
        self.config = PreTrainedConfig(attn_implementation=attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_evicting_cache_refuses_other_attention(qwen, prompt, attention, one_line):
    qwen.set_attn_implementation(attention)
    with one_line(ModelError, match="set_attn_implementation"):
        qwen(prompt(8), past_key_values=EvictingCache())


@pytest.mark.parametrize("kind", ATTENTIONS.values())
@pytest.mark.parametrize("mask_heads", [1, 2])
def test_grouped_attention_is_masked_softmax(kind, mask_heads):
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 6, 3, 4, generator=generator)
    keys, values = torch.randn(2, 2, 2, 5, 4, generator=generator)
    visible = torch.rand(2, mask_heads, 3, 5, generator=generator) > 0.4
    visible[:, :, :, 2] = True
    visible[1, 0, 1] = False  # a query that sees nothing
    wide_keys, wide_values = (x.double().repeat_interleave(3, dim=1) for x in (keys, values))
    for mask in (visible, None):
        result = grouped_attention(Attending(kind), query, keys, values, mask, {"scaling": 0.7})
        assert result.shape == (2, 3, 6, 4)
        seen = torch.ones(1, 1, 1, 1) if mask is None else mask
        seen = seen.repeat_interleave(6 // seen.shape[1], dim=1)
        weights = (0.7 * query.double() @ wide_keys.mT).exp() * seen
        expected = weights @ wide_values / weights.sum(-1, keepdim=True).clamp_min(1e-9)
        assert result[1, 1, :3].any() == (mask is None)
        torch.testing.assert_close(result.double(), expected.transpose(1, 2), rtol=0, atol=1e-5)
