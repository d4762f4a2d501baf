"""Weights are counted as the model has them, without making it."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2Config

from kvp.hf import load_config
from kvp.hf.model_size import size_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_the_bundled_model_shares_its_embedding_with_its_head() -> None:
    size = size_of(load_config("nano"))
    model = AutoModelForCausalLM.from_config(load_config("nano"))
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    assert size.head_parameters == model.get_output_embeddings().weight.numel()
    assert size.parameters < 6_000_000


def test_weights_of_a_layer_by_hand() -> None:
    size = size_of(Qwen2Config(**SIZES, tie_word_embeddings=False))
    attention = 32 * 32 + 32 + 2 * (32 * 16 + 16) + 32 * 32
    layer = attention + 3 * 32 * 48 + 2 * 32
    assert size.parameters == 3 * layer + 32 + 2 * 100 * 32
    assert size.layer_parameters == round((3 * layer + 32) / 3)
    assert size.head_parameters == 100 * 32


def test_of_experts_those_that_compute_are_multiplied() -> None:
    both = size_of(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=4))
    one = size_of(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1))
    assert both.parameters == one.parameters
    assert both.layer_parameters - one.layer_parameters == 3 * 3 * 32 * 48
