from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from kvp.errors import KvpError, ModelError, UsageError
from kvp.geometry import Geometry
from kvp.hf import geometry_of, load_model, loading
from kvp.hf.model_config import check_config


@pytest.fixture
def words() -> PreTrainedTokenizerFast:
    """A tokenizer that no model class of transformers builds: one token per letter or digit."""
    letters = {
        letter: index for index, letter in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789")
    }
    tokenizer = Tokenizer(WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = Split("", behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


@pytest.fixture
def folder(
    build: Callable[[str], PreTrainedModel], words: PreTrainedTokenizerFast, tmp_path: Path
) -> Path:
    """A tiny Qwen2 with its tokenizer, saved as users have them."""
    path = tmp_path / "tiny"
    build("qwen2").save_pretrained(path)
    words.save_pretrained(path)
    return path


def refusal(*args: Any, **options: Any) -> str:
    """The one line that loading is refused with."""
    with pytest.raises(KvpError) as caught:
        load_model(*args, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def test_a_folder_is_loaded_without_the_network(
    folder: Path, words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, tokenizer = load_model(str(folder), dtype="bfloat16")
    assert model.config._attn_implementation == "kvp"
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.dtype == torch.bfloat16
    assert tokenizer.encode("b2 z") == words.encode("b2 z") == [2, 29, 0, 26]
    ids = torch.arange(1, 9)[None]
    assert stock.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, stock(ids).logits)


def test_attention_is_chosen_by_name(folder: Path) -> None:
    model, _ = load_model(str(folder), attention="eager")
    assert model.config._attn_implementation == "kvp_eager"
    with pytest.raises(UsageError, match="--attention flash is not one of sdpa, eager"):
        load_model(str(folder), attention="flash")


def test_missing_parts_are_named(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(str(tmp_path / "nowhere"))
    assert "no such folder" in refusal("./nowhere")
    (tmp_path / "bare").mkdir()
    assert "no config.json" in refusal(str(tmp_path / "bare"))
    assert "no model" in refusal("nobody/has-this-model")
    assert "no model" in refusal("not a model id!")
    without = shutil.copytree(folder, tmp_path / "without")
    for file in without.glob("token*"):
        file.unlink()
    assert "no tokenizer" in refusal(str(without))
    (folder / "model.safetensors").unlink()
    assert "no model weights" in refusal(str(folder))


def test_damaged_parts_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    assert "no model weights" in refusal(str(folder))
    (folder / "config.json").write_text("{")
    assert "no model" in refusal(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    assert "no model" in refusal(str(folder))


def test_remote_code_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('remote code ran')\n")
    assert "no model" in refusal(str(folder))


def test_devices_and_dtypes_are_checked(folder: Path) -> None:
    assert "--dtype int8" in refusal(str(folder), dtype="int8")
    assert "--device abacus" in refusal(str(folder), device="abacus")
    if not torch.cuda.is_available():
        assert "--device cuda" in refusal(str(folder), device="cuda")


@pytest.mark.parametrize(
    ("config", "geometry"),
    [
        (Qwen2Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2), (32, 4, 2, 8)),
        (LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2), (2, 4, 4, 8)),
        (Qwen3Config(num_attention_heads=8, num_key_value_heads=2, head_dim=16), (32, 8, 2, 16)),
        (GPT2Config(n_layer=2, n_head=4, n_embd=32), (2, 4, 4, 8)),
    ],
)
def test_geometry(config: Any, geometry: tuple[int, int, int, int]) -> None:
    layers, query_heads, kv_heads, head_dim = geometry
    assert geometry_of(config) == Geometry(
        layers=layers, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim
    )


def test_geometry_of_a_nested_text_model() -> None:
    from transformers import LlavaConfig

    text = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
    )
    nested = LlavaConfig(text_config=text)
    assert geometry_of(nested) == Geometry(layers=3, query_heads=4, kv_heads=2, head_dim=8)


def test_geometry_that_does_not_exist() -> None:
    from transformers import MambaConfig

    for config in (MambaConfig(), Qwen2Config(num_attention_heads=5, num_key_value_heads=2)):
        with pytest.raises(ModelError, match="no uniform attention heads"):
            geometry_of(config)


def test_other_attention_is_refused() -> None:
    from transformers import FalconH1Config, MambaConfig

    chunked = ["chunked_attention"] * 32
    for config, message in (
        (MistralConfig(layer_types=chunked, attention_chunk_size=8), "no layer of full attention"),
        (MambaConfig(), "no layer of full attention"),
        (FalconH1Config(), "no layer of full attention"),
        (DeepseekV3Config(), "kv_lora_rank"),
    ):
        with pytest.raises(ModelError, match=message):
            check_config(config)


def test_weights_that_are_a_pickle_of_something_else_are_one_line(folder: Path) -> None:
    """Not opened by transformers: a pickle may hold any code."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert f"--model {folder}: no model weights (" in refusal(str(folder))


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str, cuda: bool = True) -> None:
    """Pretend that packages, and perhaps a CUDA device, are there."""
    monkeypatch.setattr(loading, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)


def test_quantization_says_what_it_lacks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--quantization 2bit is not one of none, 8bit, 4bit" in refusal(
        str(folder), quantization="2bit"
    )
    installed(monkeypatch)
    for bits in ("8bit", "4bit"):
        line = refusal(str(folder), quantization=bits)
        assert f"--quantization {bits} needs bitsandbytes: pip install" in line
    assert "device_map needs accelerate: pip install" in refusal(str(folder), device_map="auto")
    installed(monkeypatch, "bitsandbytes")
    assert "needs accelerate" in refusal(str(folder), quantization="4bit")
    installed(monkeypatch, "bitsandbytes", "accelerate", cuda=False)
    for options in ({}, {"device_map": "auto"}):
        line = refusal(str(folder), quantization="4bit", **options)
        assert line.startswith("--quantization 4bit needs a CUDA device: use --device cuda")
    installed(monkeypatch, "bitsandbytes", "accelerate")
    assert "needs a CUDA device" in refusal(str(folder), quantization="8bit", device="cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", ["none", "8bit", "4bit"])
@pytest.mark.parametrize("spread", ["auto", {"": 0, "lm_head": "cpu"}, None])
def test_what_transformers_is_asked_for(
    folder: Path,
    build: Callable[[str], PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    bits: str,
    spread: Any,
    dtype: torch.dtype,
) -> None:
    """Quantisation itself needs a GPU; which options reach it does not."""
    asked: dict[str, Any] = {}
    made = build("qwen2")
    moved: list[Any] = []

    def from_pretrained(source: str, **options: Any) -> Any:
        asked.update(options)
        monkeypatch.setattr(made, "to", lambda place: moved.append(place) or made)
        return made, {"missing_keys": []}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(loading, "torch_device", torch.device)
    installed(monkeypatch, "bitsandbytes", "accelerate")
    model, _ = load_model(
        str(folder), device="cuda:0", dtype=str(dtype).removeprefix("torch."),
        quantization=bits, device_map=spread,
    )  # fmt: skip
    assert model is made
    assert (asked["dtype"], asked["attn_implementation"]) == (dtype, "kvp")
    cuda = torch.device("cuda:0")
    plain = bits == "none" and spread is None
    assert moved == ([cuda] if plain else [])
    expected = {"": cuda} if spread is None else spread
    assert asked.get("device_map") == (None if plain else expected)
    config = asked.get("quantization_config")
    if bits == "none":
        assert config is None
    else:
        assert isinstance(config, BitsAndBytesConfig)
        assert (config.load_in_8bit, config.load_in_4bit) == (bits == "8bit", bits == "4bit")
    if bits == "4bit":
        assert (config.bnb_4bit_quant_type, config.bnb_4bit_compute_dtype) == ("nf4", dtype)
