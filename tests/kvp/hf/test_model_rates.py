"""Layers of the models that a dry run is about are measured."""

from __future__ import annotations

import pytest
import torch
from kvp.hf.model_rates import sequence_seconds
from transformers import GPT2Config, PreTrainedConfig, Qwen2Config

from kvp.costs import Lengths, ModelSize
from kvp.errors import UsageError
from kvp.geometry import Geometry
from kvp.hf.model_size import size_of

CPU = torch.device("cpu")


def qwen(hidden: int, layers: int = 3) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=500,
    )


def seconds(config: PreTrainedConfig, size: ModelSize, lengths: Lengths, batch: int = 1) -> float:
    return sequence_seconds(config, size, lengths, dtype="float32", batch=batch, device=CPU)


def test_larger_models_and_longer_answers_take_longer() -> None:
    small, large = (
        seconds(config, size_of(config), Lengths(prompt=64, answer=4), batch=2)
        for config in (qwen(64), qwen(1024))
    )
    assert 0 < small < large
    config = qwen(256)
    given = Lengths(prompt=64, answer=32, answers="reference")
    written = Lengths(prompt=64, answer=32)
    assert seconds(config, size_of(config), given) < seconds(config, size_of(config), written)


def test_a_model_that_does_not_run_in_parts_is_refused() -> None:
    size = size_of(qwen(64))
    with pytest.raises(UsageError, match="--rates measured: layers of model type 'gpt2'"):
        seconds(GPT2Config(), size, Lengths(prompt=2000, answer=4))


def test_operations_by_hand() -> None:
    size = ModelSize(
        geometry=Geometry(layers=2, query_heads=4, kv_heads=2, head_dim=8),
        layers=2,
        parameters=1000,
        layer_parameters=400,
        head_parameters=100,
        hidden=16,
        intermediate=32,
    )
    assert size.flops(90) == 2 * (2 * 400 * 90 + 100) + 2 * 2 * 4 * 8 * 90**2
    again = 2 * (2 * 400 + 100) * 10 + 2 * 4 * 4 * 8 * (90 * 10 + 10**2 / 2)
    assert size.flops(10, cached=90, logits=10) == again
