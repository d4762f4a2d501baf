"""What a GGUF file says of a model beside its weights: taken over, or refused in one line."""

import math
import struct

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
    Starcoder2Config,
)

from kvp.errors import CacheError, ModelError
from kvp.hf import load_model
from kvp.hf.loading import load_config, load_tokenizer
from kvp.hf.model_access import rope_of
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


def turns(base=1e4, turned=64):
    """Frequencies without scaling."""
    return base ** -(np.arange(0, turned, 2) / turned)


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


LLAMA, QWEN, PHI = LlamaConfig(**SIZES), Qwen2Config(**SIZES), Phi3Config(**SIZES)
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
LIMIT = {"rope.scaling.original_context_length": 4096}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
HALF, BASE = {"rope.scaling.attn_factor": 0.5}, {"rope.freq_base": 5e5}
SHORT, LONG = np.linspace(1, 2, 32), np.linspace(1, 40, 32)
LISTS = {
    "rope_factors_short.weight": SHORT.astype(np.float32),
    "rope_factors_long.weight": LONG.astype(np.float32),
}
LONGROPE = {"rope.scaling.original_context_length": 8192, "rope.scaling.attn_factor": 1.19}
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
        (LLAMA, YARN | LIMIT, {}, yarn(4, 4096), USUAL),
        (QWEN, YARN | LIMIT | HALF, {}, yarn(4, 4096), USUAL / 2),
        (QWEN, YARN, {}, yarn(4, 65536), USUAL),
        (LLAMA, BASE, freqs(divisors(8)), turns(5e5) / divisors(8), 1),
        (LLAMA, BASE, freqs(divisors(32)), turns(5e5) / divisors(32), 1),
        (LLAMA, {}, freqs(np.ones(32)), turns(), 1),
        (PHI, LONGROPE, LISTS, turns() / SHORT, 1.19),
        (PHI, LONGROPE, LISTS, turns() / LONG, 1.19),
        (PHI, {"rope.dimension_count": 48}, {}, turns(turned=48), 1),
        (LLAMA, NOTHING, {}, turns(), 1),
    ],
    ids=[
        "linear", "linear-by-default", "linear-of-old", "none", "yarn", "yarn-attention",
        "yarn-limit", "llama-3.1", "llama-3.2", "ones", "longrope-short", "longrope-long",
        "partial", "nothing",
    ],
)  # fmt: skip
def test_keys_are_turned_as_the_file_says(
    write, tmp_path, config, fields, tensors, expected, scaling
):
    _, file = write(config, fields=fields, tensors=tensors)
    loaded, _ = load_model(file)
    loaded.save_pretrained(tmp_path / "saved")
    for model in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        rope = rope_of(model, 8193 if expected[-1] * 39 < turns()[-1] else 8192)
        np.testing.assert_allclose(rope.frequencies, expected, rtol=3e-6)
        assert rope.scaling == pytest.approx(scaling)


GEMMA = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
GEMMA3 = Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 6})
FULL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (Gemma2Config(**GEMMA, **CAPS), CAPS),
        (
            Gemma3TextConfig(
                **{**GEMMA, "num_hidden_layers": 6},
                rope_parameters={"full_attention": FULL, "sliding_attention": LOCAL},
            ),
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 1e4},
        ),
        (Qwen3Config(**SIZES, head_dim=32), {}),
        (Phi3Config(**SIZES, sliding_window=16), {"attention.sliding_window": 16}),
        (Starcoder2Config(**SIZES, rope_parameters=LOCAL | {"rope_theta": 100.0}), {}),
        (
            StableLmConfig(**SIZES, rope_parameters=LOCAL | {"partial_rotary_factor": 0.5}),
            {"rope.dimension_count": 32},
        ),
        (
            Lfm2Config(
                **SIZES, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
                norm_eps=0.01,
            ),
            {"attention.head_count_kv": [0, 1], "shortconv.l_cache": 3},
        ),
    ],
    ids=["caps", "nested", "width", "window", "base", "part", "convolutions"],
)  # fmt: skip
def test_logits_equal_those_of_the_model_that_was_converted(write, config, fields):
    model, file = write(config, fields=fields)
    loaded, _ = load_model(file)
    ids = torch.randint(3, 600, (1, 40), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(("config", "layers"), [(Gemma2Config, 46), (Gemma3TextConfig, 62)])
def test_no_field_tells_how_the_largest_gemma_scale_queries(write, config, layers):
    for count, expected in ((layers - 1, 32), (layers, 64)):  # of the size of heads, or not
        _, file = write(config(**{**GEMMA, "num_hidden_layers": count}))
        assert load_config(file).query_pre_attn_scalar == expected


BIAS = {"blk.0.attn_q.bias": np.ones(128, np.float32)}


@pytest.mark.parametrize(
    ("config", "fields", "tensors", "message"),
    [
        (LLAMA, {"logit_scale": 0.5}, {}, "llama.logit_scale"),
        (QWEN, {"attention.scale": 0.1}, {}, "qwen2.attention.scale"),
        (LLAMA, {"residual_scale": 2.0, "embedding_scale": 3.0}, {}, "residual_scale, llama.embed"),
        (LLAMA, {"attention.causal": False}, {}, "attention.causal"),
        (LLAMA, {"attn_logit_softcapping": 30.0}, {}, "attn_logit_softcapping"),
        (QWEN, {"final_logit_softcapping": 30.0}, {}, "final_logit_softcapping"),
        (LLAMA, {"expert_count": 8, "expert_used_count": 2}, {}, "llama.expert_count"),
        (QWEN, {"attention.sliding_window": 16}, {}, "attention.sliding_window"),
        (LLAMA, {"attention.sliding_window": 16}, {}, "attention.sliding_window"),
        (GEMMA3, {"attention.sliding_window": 0}, {}, "sliding_window"),
        (Gemma2Config(**GEMMA), {"rope.freq_base_swa": 5e5}, {}, "rope.freq_base_swa"),
        (GEMMA3, {"rope.freq_base_swa": 2e4}, {}, "rope.freq_base_swa"),
        (QWEN, {"rope.dimension_count": 32}, {}, "rope.dimension_count"),
        (QWEN, {"rope.dimension_sections": [16, 8, 8, 0]}, {}, "rope.dimension_sections"),
        (LLAMA, {"rope.scaling.alpha": 2.0}, {}, "rope.scaling.alpha"),
        (LLAMA, YARN | {"rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast"),
        (LLAMA, YARN | {"rope.scaling.yarn_beta_slow": 2.0}, {}, "yarn_beta_slow"),
        (LLAMA, YARN | {"rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor"),
        (LLAMA, YARN | {"rope.scaling.yarn_attn_factor": 1.3}, {}, "yarn_attn_factor"),
        (LLAMA, YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier"),
        (LLAMA, {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, {}, "no RoPE"),
        (LLAMA, {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, {}, "taken over"),
        (LLAMA, HALF, {}, "no RoPE"),
        (LLAMA, LINEAR | HALF, {}, "no RoPE"),
        (LLAMA, BASE | LINEAR, freqs(divisors(8)), "no RoPE"),
        (LLAMA, BASE, freqs(divisors(8, 4096)), "no RoPE"),
        (LLAMA, {}, freqs(divisors(8)), "no RoPE"),  # of another base
        (PHI, {}, {"rope_factors_long.weight": np.ones(32, np.float32)}, "no RoPE"),
        (LLAMA, {}, freqs([math.nan] * 32), "no RoPE"),
        (LLAMA, {}, freqs([0.0] * 32), "no RoPE"),
        (LLAMA, {}, freqs([2.0] * 5), "taken over"),
        (LLAMA, {"rope.freq_base": math.nan}, {}, "no RoPE"),
        (LLAMA, {"rope.freq_base": 0.0}, {}, "no RoPE"),
        (LLAMA, LINEAR | {"rope.scaling.factor": math.nan}, {}, "no RoPE"),
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
    "endless bytes": (0, 2, KIND + field("llama.x", 9, struct.pack("<IQ", 0, 2**40))),
    "endless floats": (0, 2, KIND + field("llama.x", 9, struct.pack("<IQ", 6, 2**63))),
    "endless lists": (0, 2, KIND + field("llama.x", 9, struct.pack("<IQ", 9, 2**40) + bytes(99))),
    "deep lists": (0, 2, KIND + field("llama.x", 9, struct.pack("<IQ", 9, 1) * 9999)),
    "endless fields": (0, 2**60, KIND),
    "endless tensors": (2**60, 1, KIND),
    "a long name": (0, 1, struct.pack("<Q", 2**63) + b"abc"),
    "names": (0, 1, field("general.architecture", 9, struct.pack("<IQ", 8, 1) + text(b"llama"))),
    "no name": (0, 0, b""),
    "half a character": (0, 1, field("general.architecture", 8, text(b"\xff"))),
    "a line end": (0, 1, field("general.architecture", 8, text(b"a\nb" * 99))),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_a_file_of_any_bytes_is_one_line(name, tmp_path):
    tensors, fields, content = BYTES[name]
    file = tmp_path / "hostile.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + content)
    for read in (read_gguf, load_config, load_tokenizer, load_model):
        with pytest.raises((CacheError, ModelError)) as refused:
            read(str(file))
        assert str(file) in str(refused.value)
        assert str(refused.value).isprintable()
        assert len(str(refused.value).removeprefix(str(file))) < 250


def test_more_layers_than_tensors_are_refused(write):
    _, file = write(LLAMA, fields={"block_count": 2**31})
    with pytest.raises(ModelError, match=r"damaged or no GGUF file .*2147483648 layers of \d+ te"):
        load_config(file)
