"""The benchmark of scoring runs, and products are counted as the formulas say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

TOKENS, HIDDEN, REACH, HEADS = 48, 16, 3, 1
NETWORKS = "loop,stacked"


@pytest.fixture
def report(run_benchmark: Callable[..., None], tmp_path: Path) -> dict[str, Any]:
    out = tmp_path / "out.json"
    shapes = ["--tokens", str(TOKENS), "--hidden", str(HIDDEN), "--neighbours", f"0,{REACH}"]
    rest = ["--model_width", "896", "--repeats", "2", "--calls", "1", "--network", NETWORKS]
    run_benchmark("ranker_scoring", *shapes, *rest, "--out", str(out))
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_every_scorer_is_a_share_of_the_prefill(report: dict[str, Any]) -> None:
    assert report["machine"]["torch"]
    (found,) = report["results"]
    assert found["tokens"] == TOKENS
    assert len(found["scorers"]) == 3 + 2 * 2 * 2 * 2
    for record in found["scorers"]:
        assert 0 < record["share_low"] <= record["share"] <= record["share_high"]
        share = record["flops"] / found["prefill_flops"]
        assert record["flop_share"] == pytest.approx(share, abs=1e-6)
    recorded = [one for one in found["scorers"] if one["scorer"] == "kvp" and not one["recent"]]
    columns = 2 * 128 * HIDDEN + 35 * 32 + (2 * HIDDEN + 32) * HIDDEN + HIDDEN * HIDDEN + HIDDEN
    for record in recorded:
        taps = 2 * REACH + 1 if record["neighbours"] else 0
        assert record["flops"] == 2 * TOKENS * HEADS * (columns + taps * HIDDEN)
    sizes = {(one["neighbours"], one["weights"]): one["bytes"] for one in recorded}
    statistics = 28 * HEADS * 4 * 4 * 128
    for reach in (0, REACH):
        whole, half = (sizes[reach, weights] for weights in ("float32", "bfloat16"))
        assert 2 * (half - statistics) == whole - statistics


def test_work_of_a_prefill_is_what_torch_counts(report: dict[str, Any]) -> None:
    config = Qwen2Config(
        hidden_size=896, num_attention_heads=7, num_key_value_heads=1, intermediate_size=4736,
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        states, positions = torch.empty(1, TOKENS, 896), torch.arange(TOKENS)[None]
        layer = Qwen2DecoderLayer(config, layer_idx=0)
        embeddings = Qwen2RotaryEmbedding(config)(states, positions)
        with FlopCounterMode(display=False) as counter:
            layer(states, position_embeddings=embeddings, attention_mask=None)
    later = 4 * 896 * TOKENS * (TOKENS - 1) // 2  # causal attention leaves these pairs out
    counted = counter.get_total_flops()
    assert counted - later == report["results"][0]["prefill_flops"]
