"""Rates are measured on the models they are about; the clock is a parameter, so times are known."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import Qwen2Config

from kvp.costs import Lengths
from kvp.errors import UsageError
from kvp.hf.model_rates import measured_model_rates
from kvp.hf.model_size import size_of
from kvp.hf.rates import rates_of


def config(**sizes: int) -> Qwen2Config:
    return Qwen2Config(
        **{
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 500,
            **sizes,
        }
    )


def test_a_wider_model_decodes_more_slowly() -> None:
    slow, fast = (
        measured_model_rates(
            config(hidden_size=hidden, intermediate_size=4 * hidden),
            device=torch.device("cpu"),
            dtype=torch.float32,
            tokens=64,
            batch=2,
            clock=time.process_time,
        )
        for hidden in (1536, 64)
    )
    assert slow.decode_layer_seconds > fast.decode_layer_seconds > 0
    assert min(slow.prompt_flops, fast.prompt_flops, slow.pairs, slow.copy_bytes) > 0


def test_rates_say_where_they_come_from() -> None:
    size, lengths = size_of(config()), Lengths(prompt=64, answer=4)

    def rates(name: str, device: str = "cpu") -> object:
        return rates_of(
            name,  # type: ignore[arg-type]
            config(),
            size,
            lengths,
            device=device,
            dtype="float32",
            batch=1,
            ranker_flops=lambda device, clock: 7.0,
        )

    measured = rates("measured")
    assert "measured on cpu" in measured.source  # type: ignore[attr-defined]
    assert measured.ranker_flops == 7.0  # type: ignore[attr-defined]
    assert "not measured: h200" in rates("h200", "cuda").source  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="--device cuda:9 is not available"):
        rates("measured", "cuda:9")
