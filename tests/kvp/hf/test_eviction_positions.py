"""Models whose attention changes with the position: longrope and sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

from kvp.errors import KvpError, ModelError, UsageError
from kvp.hf import evicting, prefill_and_evict

Prompt = Callable[..., Tensor]


@pytest.fixture
def longrope() -> PreTrainedModel:
    """Phi-3 with other RoPE frequencies past 48 tokens."""
    torch.manual_seed(7)
    config = Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        original_max_position_embeddings=48, initializer_range=0.3, pad_token_id=0,
        bos_token_id=None, eos_token_id=None,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4, "original_max_position_embeddings": 48, "factor": 4.0,
        },
    )  # fmt: skip
    model = Phi3ForCausalLM(config).train(False).requires_grad_(False)
    model.set_attn_implementation("kvp")
    return model


def test_longrope_on_one_side_of_its_switch(
    longrope: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any, watched: Any
) -> None:
    """A shrunk cache must not make generate start over: only new tokens are fed."""
    for tokens in (40, 60):
        ids = prompt(tokens)
        cache = prefill_and_evict(longrope, ids[:, :-1], fixed(tokens - 1), 22)
        with watched(longrope) as calls:
            generate(longrope, ids, 6, past_key_values=cache)
        assert calls == [(1, [[index]]) for index in range(tokens - 1, tokens + 5)]


def test_longrope_prompts_beyond_the_switch(
    longrope: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    """generate drops its empty cache there; the answer must come from a shrunk one all the same."""
    ids = prompt(60)
    with evicting(longrope, fixed(60), 22):
        output = generate(longrope, ids, 6)
    assert output.past_key_values.layers[0].keys.shape[2] == 22 + 5
    cache = prefill_and_evict(longrope, ids, fixed(60), 22)
    expected = [int(generate(longrope, ids, 1).sequences[0, -1])]
    with torch.no_grad():
        for _ in range(5):
            logits = longrope(torch.tensor([expected[-1:]]), past_key_values=cache).logits
            expected.append(int(logits[0, -1].argmax()))
    assert output.sequences[0, 60:].tolist() == expected


def test_longrope_across_its_switch_is_refused(
    longrope: PreTrainedModel, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    ids = prompt(44)
    with evicting(longrope, fixed(44), 22), pytest.raises(UsageError, match="RoPE"):
        generate(longrope, ids, 10)
    cache = prefill_and_evict(longrope, ids, fixed(44), 22)
    with pytest.raises(UsageError, match="changes its RoPE after 48 tokens"):
        longrope(prompt(6), past_key_values=cache)


def test_tokens_beyond_a_window_as_long_as_the_model_are_refused(
    build: Any, prompt: Prompt, fixed: Any, generate: Any
) -> None:
    model = build("mistral")
    model.config.sliding_window = model.config.max_position_embeddings = 48
    with evicting(model, fixed(40), 22):
        generate(model, prompt(40), 9)
        with pytest.raises(UsageError, match="sliding window of 48 tokens, and the prompt"):
            generate(model, prompt(40), 10)
    with pytest.raises(UsageError, match="sliding window of 48 tokens, and the prompt"):
        prefill_and_evict(model, prompt(60), fixed(60), 22)


def test_chunks_in_every_layer_are_refused(build: Any, prompt: Prompt, fixed: Any) -> None:
    model = build("mistral")
    model.config.layer_types = ["chunked_attention"] * 3
    model.config.attention_chunk_size = 16
    for attempt in (
        lambda: evicting(model, fixed(30), 22),
        lambda: prefill_and_evict(model, prompt(30), fixed(30), 22),
    ):
        with pytest.raises(ModelError, match="no layer of full attention") as caught:
            attempt()
        assert isinstance(caught.value, KvpError)
        assert "\n" not in str(caught.value)
