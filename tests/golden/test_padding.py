"""Prompts of a left-padded batch keep the tokens that each keeps alone, for every method.

The model computes in float64, so that both runs agree to rounding and no near tie flips.
"""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvp.hf import evicting
from kvp.protection import UNPROTECTED, Protection
from policies.registry import ALLOCATORS, SCORERS, make_method

LENGTHS = (64, 47, 23, 64)
METHOD_SPECS = [name for name in SCORERS if name != "oracle"]  # the future cannot be run
SPLIT_SPECS = [
    "snapkv+pyramid", "snapkv+windowkv", "kvzip+ada", "kvzip+global",
    "snapkv+shared",    "gvote+self_sized",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.3, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).double().requires_grad_(False).train(False)


def kept(spec, model, tokenizer, batch, protection):
    """Positions that stay, per prompt, layer and KV head, of one left-padded batch."""
    ids, mask = batch
    scorer, allocator = make_method(spec)
    with evicting(model, scorer, "50%", protection, allocator=allocator, tokenizer=tokenizer):
        cache = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=1, do_sample=False,
            return_dict_in_generate=True,
        ).past_key_values  # fmt: skip
    end = torch.iinfo(torch.int64).max
    return [
        [
            [[p for p in head.tolist() if 0 <= p < end] for head in layer.positions[index]]
            for layer in cache.layers
        ]
        for index in range(len(ids))
    ]


@pytest.mark.parametrize("spec", [*METHOD_SPECS, *SPLIT_SPECS])
def test_prompts_keep_what_they_keep_alone(spec, model, letters, left_padded):
    generator = torch.Generator().manual_seed(8)
    prompts = [torch.randint(1, 42, (length,), generator=generator) for length in LENGTHS]
    protection = Protection(sinks=2, recents=3) if "+" in spec else UNPROTECTED
    tokenizer = letters()
    together = kept(spec, model, tokenizer, left_padded(prompts), protection)
    for prompt, result in zip(prompts, together, strict=True):
        assert result == kept(spec, model, tokenizer, left_padded([prompt]), protection)[0]
        budget = (len(prompt) + 1) // 2
        if "self_sized" not in spec:
            assert sum(len(head) for layer in result for head in layer) == 3 * 2 * budget


def test_every_allocator_that_needs_no_file_is_run():
    named = {spec.partition("+")[2] or "uniform" for spec in SPLIT_SPECS + METHOD_SPECS}
    assert set(ALLOCATORS) - {"evolved"} <= named
