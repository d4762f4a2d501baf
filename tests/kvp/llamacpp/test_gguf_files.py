"""GGUF files read by transformers, far into a text, against llama.cpp."""

from contextlib import ExitStack, closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from kvp import load_model
from kvp.scoring import Needs

llama_cpp = pytest.importorskip("llama_cpp", reason="the extra llama-cpp is not installed")
from llama_cpp._internals import LlamaBatch, LlamaContext  # noqa: E402

from kvp.llamacpp.decoder import Decoder  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

SIZES = {
    "vocab_size": 600, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 65536,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.08,
}  # fmt: skip
IDS = torch.randint(3, 600, (33,), generator=torch.Generator().manual_seed(5)).tolist()
YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 8192,
}  # fmt: skip
FAST = np.clip((8192 * 5e5 ** -(np.arange(0, 64, 2) / 64) / (2 * np.pi) - 1) / 3, 0, 1)
LLAMA3 = {"rope_freqs.weight": (1 / (FAST + (1 - FAST) / 8)).astype(np.float32)}


def decode(context, tokens, position, sequence):
    with closing(LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1, verbose=False)) as batch:
        batch.set_batch(tokens, n_past=position, logits_all=False)
        for place in range(len(tokens)):
            batch.batch.seq_id[place][0] = sequence
        context.decode(batch)


def in_llama_cpp(llama, place):
    """Logits of a token that sees 16 tokens from 0 on and 16 others from `place` on."""
    params = type(llama.context_params).from_buffer_copy(llama.context_params)
    params.n_ctx, params.n_seq_max, params.kv_unified = 64, 2, True
    model = SimpleNamespace(model=llama.model, _exit_stack=ExitStack())
    with closing(LlamaContext(model=model, params=params, verbose=False)) as context:
        decode(context, IDS[16:32], place, 1)
        decode(context, IDS[:16], 0, 0)
        llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(context.ctx), 0, 1, -1, -1)
        decode(context, IDS[32:], place + 16, 1)
        return np.ctypeslib.as_array(context.get_logits_ith(-1), (llama.n_vocab(),)).copy()


@torch.no_grad()
def in_transformers(model, place):
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    mask[16:32, :16] = False
    places = torch.tensor([[*range(16), *range(place, place + 17)]])
    return model(torch.tensor([IDS]), position_ids=places, attention_mask=mask[None, None]).logits[
        0, -1
    ]


def distance(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


@pytest.mark.parametrize(
    ("config", "fields", "tensors"),
    [
        (LlamaConfig, {}, {}),
        (LlamaConfig, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
        (LlamaConfig, YARN, {}),
        (LlamaConfig, {"rope.freq_base": 5e5}, LLAMA3),
        (Qwen2Config, {**YARN, "rope.scaling.attn_factor": 0.8}, {}),
    ],
    ids=["plain", "linear", "yarn", "llama-3", "yarn-attention"],
)
def test_logits_far_into_a_text_and_keys_are_those_of_llama_cpp(
    config, fields, tensors, model_folder, write_gguf, tmp_path
):
    torch.manual_seed(3)
    small, file = AutoModelForCausalLM.from_config(config(**SIZES)), tmp_path / "small.gguf"
    write_gguf(file, small, model_folder / "tokenizer.json", fields=fields, tensors=tensors)
    model, _ = load_model(str(file))
    settings = {"flash_attn": False, "type_k": 0, "type_v": 0, "n_threads": 1, "verbose": False}
    with closing(llama_cpp.Llama(str(file), n_ctx=64, **settings)) as llama:
        for place in (2000, 8000, 32000):
            # Angles are float32: the further, the less exact.
            expected = in_llama_cpp(llama, place)
            assert distance(in_transformers(model, place), expected) < place * 1e-7
            if fields or tensors:
                assert distance(in_transformers(small, place), expected) > 1e-2
        llama.eval(IDS)
        decoder = Decoder.of(llama)
        views = decoder.views(decoder.read(), Needs(), 9, IDS, np.tile(range(33), (2, 1, 1)), 33)
        with torch.no_grad():
            cache = model(torch.tensor([IDS]), use_cache=True).past_key_values
        for view, layer in zip(views, cache.layers, strict=True):
            assert distance(view.keys, layer.keys) < 1e-4
