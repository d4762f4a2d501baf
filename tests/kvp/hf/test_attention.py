import pytest
import torch

from kvp.errors import ModelError
from kvp.hf import EvictingCache
from kvp.hf.attention import grouped_attention


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_evicting_cache_refuses_other_attention(qwen, prompt, attention, one_line):
    qwen.set_attn_implementation(attention)
    with one_line(ModelError, match="set_attn_implementation"):
        qwen(prompt(8), past_key_values=EvictingCache())


@pytest.mark.parametrize("softcap", [None, 1e4])
@pytest.mark.parametrize("mask_heads", [1, 2])
def test_grouped_attention_is_masked_softmax(softcap, mask_heads):
    """Fused, and product by product, as under a cap that no logit reaches."""
    options = {"scaling": 0.7, "softcap": softcap}
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 6, 3, 4, generator=generator)
    keys, values = torch.randn(2, 2, 2, 5, 4, generator=generator)
    visible = torch.rand(2, mask_heads, 3, 5, generator=generator) > 0.4
    visible[:, :, :, 2] = True
    visible[1, 0, 1] = False  # a query that sees nothing
    wide_keys, wide_values = (x.double().repeat_interleave(3, dim=1) for x in (keys, values))
    for mask in (visible, None):
        result = grouped_attention(query, keys, values, mask, options)
        assert result.shape == (2, 3, 6, 4)
        seen = torch.ones(1, 1, 1, 1) if mask is None else mask
        seen = seen.repeat_interleave(6 // seen.shape[1], dim=1)
        weights = (0.7 * query.double() @ wide_keys.mT).exp() * seen
        expected = weights @ wide_values / weights.sum(-1, keepdim=True).clamp_min(1e-9)
        assert result[1, 1, :3].any() == (mask is None)
        torch.testing.assert_close(result.double(), expected.transpose(1, 2), rtol=0, atol=1e-5)
