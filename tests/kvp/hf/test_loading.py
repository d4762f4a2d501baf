"""Models are loaded from folders and GGUF files, and wrong ones refused in one line."""

import json
import math
import re
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvp.errors import KvpError, ModelError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_model
from kvp.hf.model_checks import check_model
from kvp.hf.model_config import check_config
from kvp.hf.model_identity import model_identity, weights_digest


@pytest.fixture
def folder(build, letters, tmp_path):
    """A tiny Qwen2 with a tokenizer that no model class builds, saved as users have them."""
    path = tmp_path / "tiny"
    build("qwen2").save_pretrained(path)
    letters().save_pretrained(path)
    return path


def refusal(*args, **options):
    """The one line that loading is refused with."""
    with pytest.raises(KvpError) as caught:
        load_model(*args, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def test_a_folder_is_loaded_without_the_network(folder, letters, monkeypatch, capfd):
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def refuse(*_, **__):
        raise AssertionError("network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    capfd.readouterr()
    model, tokenizer = load_model(str(folder), dtype="bfloat16")
    assert capfd.readouterr() == ("", "")
    assert model.config._attn_implementation == "kvp"
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.dtype == torch.bfloat16
    assert tokenizer.encode("b2 z") == letters().encode("b2 z")
    assert letters().tokenize("b2 z") == ["b", "2", " ", "z"]
    ids = torch.arange(1, 9)[None]
    assert stock.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, stock(ids).logits)


def test_settings_are_checked(folder):
    assert "--dtype int8" in refusal(str(folder), dtype="int8")
    assert "--revision v2" in refusal(str(folder), revision="v2")
    assert "--device abacus" in refusal(str(folder), device="abacus")
    assert "are offloaded" in refusal(str(folder), device="meta")  # it was moved there
    if not torch.cuda.is_available():
        assert "--device cuda" in refusal(str(folder), device="cuda")


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_weight_that_is_missing_or_not_finite_is_named(folder, value):
    """transformers would fill a missing one with random numbers."""
    weights = load_file(folder / "model.safetensors")
    if value is None:
        del weights["model.layers.1.mlp.up_proj.weight"]
        message = r"1 weights are missing .* model\.layers\.1\.mlp\.up_proj\.weight"
    else:
        weights["model.layers.2.self_attn.k_proj.weight"][3, 5] = value
        message = r"model\.layers\.2\.self_attn\.k_proj\.weight holds NaN"
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert re.search(message, refusal(str(folder)))


def test_missing_and_damaged_parts_are_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no such folder" in refusal(str(tmp_path / "nowhere"))
    assert "missing.gguf: no such file" in refusal(str(tmp_path / "missing.gguf"))
    (tmp_path / "bare").mkdir()
    assert "no config.json" in refusal(str(tmp_path / "bare"))
    shutil.copytree(folder, tmp_path / "models" / "qwen2.5-tiny")
    assert "(did you mean models/qwen2.5-tiny?): no model (no" in refusal("Qwen2.5-tiny")
    said = "--model nobody/qwen2.5-7b: no model (no folder here; We couldn't connect to"
    assert said in refusal("nobody/qwen2.5-7b")
    assert "no model" in refusal("not a model id!")
    without = shutil.copytree(folder, tmp_path / "without")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (without / file).unlink()
        assert "no tokenizer (its files are missing or empty)" in refusal(str(without))
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    assert "no model weights" in refusal(str(folder))
    (folder / "model.safetensors").unlink()
    # Not opened by transformers: a pickle may hold any code.
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert f"--model {folder}: no model weights (" in refusal(str(folder))
    for text in ("{", json.dumps({"model_type": "unheard_of"})):
        (folder / "config.json").write_text(text)
        assert "no model" in refusal(str(folder))


def test_impossible_sizes_are_one_line(folder):
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("num_hidden_layers", 0), ("hidden_size", "x"), ("num_key_value_heads", 3)):
        (folder / "config.json").write_text(json.dumps({**config, key: value, "layer_types": None}))
        assert "model" in refusal(str(folder))


def test_remote_code_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('remote code ran')\n")
    assert "no model" in refusal(str(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MistralConfig(layer_types=["chunked_attention"] * 32, attention_chunk_size=8),
            "no layer of full attention",
        ),
        (BartConfig(), "has an encoder"),
        (Qwen2Config(num_attention_heads=5, num_key_value_heads=2), "no uniform attention heads"),
    ],
    ids=["chunked", "encoder", "heads"],
)
def test_models_without_heads_to_evict_from_are_refused(config, message):
    with pytest.raises(ModelError, match=message):
        (geometry_of if "uniform" in message else check_config)(config)


@pytest.mark.parametrize(
    ("config", "geometry"),
    [
        (Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2), (32, 4, 2, 8)),
        (Qwen3Config(num_attention_heads=8, num_key_value_heads=2, head_dim=16), (32, 8, 2, 16)),
        (GPT2Config(n_layer=2, n_head=4, n_embd=32), (2, 4, 4, 8)),
        (
            LlavaConfig(text_config=LlamaConfig(hidden_size=32, num_attention_heads=4)),
            (32, 4, 4, 8),
        ),
    ],
)
def test_the_geometry_of_every_kind_of_config(config, geometry):
    names = ("layers", "query_heads", "kv_heads", "head_dim")
    assert geometry_of(config) == Geometry(**dict(zip(names, geometry, strict=True)))


@pytest.fixture
def file(model_folder, tmp_path, write_gguf):
    """The small Qwen2 of `model_folder` as a GGUF file."""
    model, _ = load_model(str(model_folder))
    path = tmp_path / "small-qwen.gguf"
    write_gguf(path, model, model_folder / "tokenizer.json")
    return path


def test_the_model_equals_its_safetensors(file, model_folder, tmp_path, capfd):
    theirs, letters = load_model(str(model_folder))
    ours, tokenizer = load_model(str(file))
    ids = tokenizer("The grass is green. 123 a", return_tensors="pt").input_ids
    assert torch.equal(ids, letters("The grass is green. 123 a", return_tensors="pt").input_ids)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    assert model_identity(str(file), None, tokenizer, None)["id"] == "small-qwen"
    assert weights_digest(ours) == weights_digest(theirs)
    ours.save_pretrained(tmp_path / "saved")  # an ordinary model
    assert "Converting" not in capfd.readouterr().err


def test_a_model_that_works_on_cached_keys_itself_is_refused_at_once(one_line):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**sizes, num_attention_heads=4)).train(False)
    with one_line(ModelError, match="kvp cannot evict from DiffLlamaForCausalLM") as caught:
        check_model(model)
    assert "load_model" not in str(caught.value)
