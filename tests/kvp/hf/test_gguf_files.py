"""Settings of a model in a GGUF file are taken over, or refused in one line."""

import math
import struct

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from kvp.errors import ContextError, ModelError
from kvp.hf import load_model
from kvp.hf.loading import load_config
from kvp.hf.rotary import rope_of
from kvp.llamacpp.slots import read_gguf

SIZES = {
    "vocab_size": 600, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 65536,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.06,
}  # fmt: skip


@pytest.fixture
def write(model_folder, tmp_path, write_gguf):
    """Write a random model as a GGUF file: the model, and the file's name."""

    def written(config, name="small", **told):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                torch.nn.init.normal_(parameter, 0.5, 0.3)
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, model, model_folder / "tokenizer.json", **told)
        return model, str(path)

    return written


def turns(base=1e4):
    """Frequencies without scaling."""
    return base ** -(np.arange(0, 64, 2) / 64)


def yarn(factor, limit):
    """Frequencies as YaRN's paper has them, with betas 32 and 1."""
    ends = [64 * math.log(limit / (2 * math.pi * beta)) / (2 * math.log(1e4)) for beta in (32, 1)]
    low, high = math.floor(ends[0]), math.ceil(ends[1])
    slow = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    return turns() * (1 - slow) + turns() / factor * slow


def divisors(factor, limit=8192):
    """What llama.cpp's converter writes of Llama 3's scaling, with a base of 500,000."""
    fast = np.clip((limit * turns(5e5) / (2 * math.pi) - 1) / 3, 0, 1)
    return (1 / (fast + (1 - fast) / factor)).astype(np.float32)


LLAMA, QWEN = LlamaConfig(**SIZES), Qwen2Config(**SIZES)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
LIMIT = {"rope.scaling.original_context_length": 4096}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
HALF, BASE = {"rope.scaling.attn_factor": 0.5}, {"rope.freq_base": 5e5}
USUAL = 1 + 0.1 * math.log(4)
NOTHING = {
    "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.finetuned": True, "attention.causal": True,
    "expert_count": 0, "logit_scale": 0.0,
}  # fmt: skip


def freqs(divided):
    return {"rope_freqs.weight": np.asarray(divided, np.float32)}


@pytest.mark.parametrize(
    ("config", "fields", "tensors", "expected", "scaling"),
    [
        (LLAMA, LINEAR, {}, turns() / 4, 1),
        (QWEN, {"rope.scaling.factor": 4.0}, {}, turns() / 4, 1),  # llama.cpp takes it for linear
        (QWEN, {"rope.scale_linear": 2.0}, {}, turns() / 2, 1),
        (LLAMA, {**LINEAR, "rope.scaling.type": "none"}, {}, turns(), 1),
        (QWEN, YARN | LIMIT | HALF, {}, yarn(4, 4096), USUAL / 2),
        (QWEN, YARN, {}, yarn(4, 65536), USUAL),
        (LLAMA, BASE, freqs(divisors(8)), turns(5e5) / divisors(8), 1),
        (LLAMA, NOTHING, freqs(np.ones(32)), turns(), 1),
    ],
    ids=["linear", "default", "old", "none", "yarn", "yarn-limit", "llama-3", "nothing"],
)
def test_keys_are_turned_as_the_file_says(
    write, tmp_path, config, fields, tensors, expected, scaling
):
    _, file = write(config, fields=fields, tensors=tensors)
    loaded, _ = load_model(file)
    loaded.save_pretrained(tmp_path / "saved")
    for model in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        rope = rope_of(model, 8192)
        np.testing.assert_allclose(rope.frequencies, expected, rtol=3e-6)
        assert rope.scaling == pytest.approx(scaling)


@pytest.mark.parametrize("config", [LLAMA, Qwen3Config(**SIZES, head_dim=32, rms_norm_eps=0.01)])
def test_logits_equal_those_of_the_model_that_was_converted(write, config):
    model, file = write(config)
    loaded, _ = load_model(file)
    ids = torch.randint(3, 600, (1, 40), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


BIAS = {"blk.0.attn_q.bias": np.ones(128, np.float32)}


@pytest.mark.parametrize(
    ("config", "fields", "tensors", "message"),
    [
        (Gemma2Config(**SIZES, head_dim=32), {}, {}, "architecture gemma2, kvp loads files of lla"),
        (LLAMA, {"residual_scale": 2.0, "embedding_scale": 3.0}, {}, "residual_scale, llama.embed"),
        (LLAMA, {"attention.causal": False}, {}, "attention.causal"),
        (QWEN, {"attention.sliding_window": 16}, {}, "attention.sliding_window"),
        (QWEN, {"rope.dimension_sections": [16, 8, 8, 0]}, {}, "rope.dimension_sections"),
        (LLAMA, YARN | {"rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast"),
        (QWEN, {"rope.dimension_count": 32}, {}, "no RoPE"),
        (LLAMA, {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, {}, "no RoPE"),
        (LLAMA, LINEAR | HALF, {}, "no RoPE"),
        (LLAMA, BASE | LINEAR, freqs(divisors(8)), "no RoPE"),
        (LLAMA, BASE, freqs(divisors(8, 4096)), "no RoPE"),
        (LLAMA, {}, {"rope_factors_long.weight": np.ones(32, np.float32)}, "no RoPE"),
        (LLAMA, {}, freqs([math.nan] * 32), "no RoPE"),
        (LLAMA, LINEAR | {"rope.scaling.factor": "four"}, {}, "taken over"),
        (LLAMA, {}, BIAS, "weights"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(
    write, config, fields, tensors, message, one_line
):
    _, file = write(config, fields=fields, tensors=tensors)
    with one_line(ModelError, match=message) as refused:
        load_model(file)
    assert str(refused.value).startswith(file)
    assert len(str(refused.value).removeprefix(file)) < 250


def field(name, kind, content):
    """A field of a GGUF file."""
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + content


def text(content):
    return struct.pack("<Q", len(content)) + content


KIND = field("general.architecture", 8, text(b"llama"))
BYTES = {
    "an endless list": (0, 2, KIND + field("llama.x", 9, struct.pack("<IQ", 6, 2**63))),
    "endless fields": (0, 2**60, KIND),
    "no name": (0, 0, b""),
    "half a character": (0, 1, field("general.architecture", 8, text(b"\xff"))),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_file_of_any_bytes_is_one_line(name, tmp_path):
    tensors, fields, content = BYTES[name]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + content)
    for read in (read_gguf, load_config):
        with pytest.raises((ContextError, ModelError)) as refused:
            read(str(file))
        assert str(file) in str(refused.value)
        assert str(refused.value).isprintable()
        assert len(str(refused.value).removeprefix(str(file))) < 250
