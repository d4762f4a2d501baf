"""Models in GGUF files: equal to the same weights as safetensors, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from kvp import load_model
from kvp.errors import ModelError, UsageError
from kvp.hf import loading
from kvp.hf.model_access import model_identity

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write(path: Path, model: PreTrainedModel, tokenizer_json: Path, architecture: str) -> None:
    """Write a Qwen2 and its byte-level tokenizer as llama.cpp's converter does."""
    config, vocabulary = model.config, json.loads(tokenizer_json.read_text())["model"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in model.state_dict().items():
        for theirs, ours in PARTS.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(model_folder: Path, tmp_path: Path) -> Path:
    """The small Qwen2 of `model_folder` as a GGUF file."""
    model, _ = load_model(str(model_folder))
    path = tmp_path / "small-qwen.gguf"
    write(path, model, model_folder / "tokenizer.json", "qwen2")
    return path


@pytest.mark.parametrize("by", ["file", "folder"])
def test_the_model_equals_its_safetensors(
    file: Path, model_folder: Path, tmp_path: Path, by: str, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs, letters = load_model(str(model_folder))
    name = str(file if by == "file" else file.parent)
    ours, tokenizer = load_model(name)
    ids = tokenizer("The grass is green. 123 a", return_tensors="pt").input_ids
    assert torch.equal(ids, letters("The grass is green. 123 a", return_tensors="pt").input_ids)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    identity = model_identity(name, None, ours, tokenizer)
    assert identity["id"] == "small-qwen"
    assert identity["weights"] == model_identity("x", None, theirs, letters)["weights"]
    ours.save_pretrained(tmp_path / "saved")  # an ordinary model
    assert "Converting" not in capfd.readouterr().err


def test_files_that_cannot_be_read_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"missing.gguf: no such file"):
        load_model(str(tmp_path / "missing.gguf"))
    (tmp_path / "damaged.gguf").write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"damaged.gguf: no model \("):
        load_model(str(tmp_path / "damaged.gguf"))
    with pytest.raises(ModelError, match="holds 2 GGUF files, name one"):
        load_model(str(tmp_path))
    monkeypatch.setattr(loading, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'kvp-toolkit\[gguf\]'"):
        load_model(str(file))


def test_an_architecture_that_transformers_cannot_read_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    model, _ = load_model(str(model_folder))
    path = tmp_path / "other.gguf"
    write(path, model, model_folder / "tokenizer.json", "unheard_of")
    with pytest.raises(ModelError, match="unheard_of") as refusal:
        load_model(str(path))
    assert len(str(refusal.value).splitlines()) == 1
