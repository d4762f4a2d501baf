"""Rates are measured on the models they are about; the clock is a parameter, so times are known."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import Qwen2Config

from kvp.config_groups import RatesName
from kvp.costs import Lengths, Plan, RankerSize, Rates, TrainingSize
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


def plan_of(config: Qwen2Config, tokens: int = 64, batch: int = 1) -> Plan:
    return Plan(
        model=size_of(config),
        dtype="float32",
        lengths=Lengths(prompt=tokens, answer=4),
        max_tokens=tokens + 4,
        train=4,
        validation=1,
        ranker=RankerSize(parameters=50, products=40, token_bytes=64, update_flops=1000.0),
        training=TrainingSize(),
        buffer=4,
        traced=4,
        points=1,
        grid=8,
        batch=batch,
    )


def test_a_wider_model_decodes_more_slowly() -> None:
    slow, fast = (
        measured_model_rates(
            wide,
            plan_of(wide, batch=2),
            device=torch.device("cpu"),
            clock=time.process_time,
        )
        for wide in (
            config(hidden_size=hidden, intermediate_size=4 * hidden) for hidden in (1536, 64)
        )
    )
    assert slow.decode_layer_seconds > fast.decode_layer_seconds > 0
    assert min(slow.prompt_flops, fast.prompt_flops, slow.pairs, slow.copy_bytes) > 0
    assert min(slow.grid_pairs, fast.grid_pairs) > 0


def test_rates_say_where_they_come_from() -> None:
    def rates(name: RatesName, device: str = "cpu") -> Rates:
        return rates_of(
            name,
            config(),
            plan_of(config()),
            device=device,
            ranker_flops=lambda device, clock: 7.0,
        )

    measured = rates("measured")
    assert "measured on cpu" in measured.source
    assert measured.ranker_flops == 7.0
    assert "not measured: h200" in rates("h200", "cuda").source
    with pytest.raises(UsageError, match="--device cuda:9 is not available"):
        rates("measured", "cuda:9")
