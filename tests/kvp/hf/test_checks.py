from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    JetMoeConfig,
    JetMoeForCausalLM,
    PreTrainedModel,
)

from kvp.errors import ModelError
from kvp.hf import load_model
from kvp.hf.model_access import check_model
from kvp.hf.model_config import check_config

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip

LATE: dict[str, Callable[[], PreTrainedModel]] = {
    "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES)),
    "jetmoe": lambda: JetMoeForCausalLM(
        JetMoeConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_key_value_heads=2,
            kv_channels=8,
            intermediate_size=48,
        )
    ),
}


@pytest.mark.parametrize("kind", sorted(LATE))
def test_models_that_would_fail_at_their_first_token_are_refused_at_once(kind: str) -> None:
    model = LATE[kind]().train(False)
    with pytest.raises(ModelError, match=f"kvp cannot evict from {type(model).__name__}") as caught:
        check_model(model)
    assert "\n" not in str(caught.value)
    assert "load_model" not in str(caught.value)


def test_models_with_an_encoder_are_refused() -> None:
    with pytest.raises(ModelError, match="has an encoder"):
        check_config(BartConfig())


def test_a_model_is_run_once(qwen: PreTrainedModel) -> None:
    calls: list[int] = []
    qwen.model.register_forward_pre_hook(lambda module, args: calls.append(1))
    check_model(qwen)
    check_model(qwen)
    assert len(calls) == 1


@pytest.fixture
def saved(qwen: PreTrainedModel, letters: Callable[..., Any], tmp_path: Path) -> Path:
    """A complete model folder."""
    qwen.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def test_a_missing_weight_is_named(saved: Path) -> None:
    """transformers would fill it with random numbers."""
    weights = load_file(saved)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved, metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"1 weights are missing .* model\.layers\.1\.mlp\.up_proj\.weight"
    ) as caught:
        load_model(str(saved.parent))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(saved: Path, value: float) -> None:
    weights = load_file(saved)
    weights["model.layers.2.self_attn.k_proj.weight"][3, 5] = value
    save_file(weights, saved, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.2\.self_attn\.k_proj\.weight holds NaN"):
        load_model(str(saved.parent))


def test_loading_prints_nothing(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, _ = load_model(str(saved.parent))
    assert capfd.readouterr() == ("", "")
    assert torch.isfinite(model.lm_head.weight).all()
