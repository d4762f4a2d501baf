"""Families of models, each as a small random one, do what docs/models.md says of them."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache

from kvp import prefill_and_evict
from kvp.errors import ModelError, UsageError
from kvp.hf import EvictingCache, geometry_of, run_and_record
from kvp.hf.attention import use_kvp_attention
from kvp.hf.model_access import attention_modules
from kvp.hf.model_checks import check_model
from kvp.hf.model_config import attention_window, layer_kinds
from kvp.hf.rotary import rope_of
from kvp.protection import UNPROTECTED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
WIDE = {"head_dim": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
CHUNKED = {
    "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"] * 2,
    "no_rope_layers": [1, 0] * 2,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
SHARED = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 16, "num_key_value_heads": 4, "first_k_dense_replace": 4,
}  # fmt: skip

FAMILIES = {
    "Llama": ("Llama", {}),
    "Qwen 2, Qwen 2.5": ("Qwen2", {}),
    "Qwen 3": ("Qwen3", WIDE),
    "Qwen 3 MoE": ("Qwen3Moe", {**WIDE, **EXPERTS}),
    "Mistral from 0.2, Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "Gemma": ("Gemma", WIDE),
    "OLMo 2": ("Olmo2", {}),
    "Phi-3 and 4 without a window": ("Phi3", {}),
    "GLM-4": ("Glm4", WIDE),
    "Granite": ("Granite", {"attention_multiplier": 0.1}),
    "Cohere": ("Cohere", {"logit_scale": 1.0}),
    "SmolLM 3": ("SmolLM3", {}),
    "GPT-NeoX": ("GPTNeoX", {"num_key_value_heads": 4}),
    "StarCoder (GPTBigCode)": ("GPTBigCode", {"n_inner": 48, "num_key_value_heads": 1}),
    "Persimmon": ("Persimmon", {"num_key_value_heads": 4}),
    "Gemma 2": ("Gemma2", {**WIDE, **SLIDING, "attn_logit_softcapping": 5.0}),
    "Gemma 3": ("Gemma3", {**WIDE, **SLIDING, "query_pre_attn_scalar": 10}),
    "Gemma 4": ("Gemma4", {
        **SLIDING, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
    }),
    "GPT-OSS": ("GptOss", {**WIDE, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen 3-Next": ("Qwen3Next", {
        **WIDE, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16,
    }),
    "Qwen 3.5": ("Qwen3_5", {**WIDE, **LINEAR}),
    "Llama 4": ("Llama4", {
        **WIDE, **CHUNKED, "intermediate_size_mlp": 48, "num_local_experts": 2, "floor_scale": 16,
    }),
    "OLMo 3": ("Olmo3", SLIDING),
    "Cohere 2": ("Cohere2", {**SLIDING, "logit_scale": 1.0}),
    "EXAONE 4": ("Exaone4", SLIDING),
    "Qwen 2 with windows": ("Qwen2", {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2,
    }),
    "LFM 2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "Granite 4 hybrid": ("GraniteMoeHybrid", {
        **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2,
        "num_experts_per_tok": 1, "shared_intermediate_size": 16,
    }),
    "Bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "Nemotron-H": ("NemotronH", {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "full_attention"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "head_dim": 8, "time_step_min": 1e-9,  # single tokens disregard it in transformers
    }),
    "Mistral 0.1": ("Mistral", {"sliding_window": 64}),
    "StarCoder 2": ("Starcoder2", {"sliding_window": 64}),
    "Phi-3-mini-4k": ("Phi3", {"sliding_window": 64}),
    "Gemma 3n": ("Gemma3n", {
        **SHARED, "head_dim": 8, "sliding_window": 8, "vocab_size_per_layer_input": 64,
        "laurel_rank": 4, "num_hidden_layers": 5, "activation_sparsity_pattern": None,
        "layer_types": [*("sliding_attention", "full_attention") * 2, "full_attention"],
    }),
    "Gemma 4 E2B, E4B": ("Gemma4", {
        **SHARED, **SLIDING, "head_dim": 8, "vocab_size_per_layer_input": 64,
    }),
    "DeepSeek V2": ("DeepseekV2", LATENT),
    "DeepSeek V3": ("DeepseekV3", LATENT),
    "MiMo V2 Flash": ("MiMoV2Flash", {
        **WIDE, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    }),
    "Jamba": ("Jamba", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
        "mamba_expand": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    }),
    "Falcon-H1": ("FalconH1", {**MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 32}),
    "Mamba": ("Mamba", {}),
    "Falcon": ("Falcon", {}),
    "BLOOM": ("Bloom", {}),
}  # fmt: skip
"""Family -> name of its transformers classes and what its config has besides `SIZES`."""

CACHED, FED = 32, 12


def build_family(family):
    """A frozen model of a family with the same random weights every time, sinks included."""
    name, settings = FAMILIES[family]
    config_class = getattr(transformers, f"{name}TextConfig", None)
    config_class = config_class or getattr(transformers, f"{name}Config")
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**{**SIZES, **settings}))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            parameter.data.normal_(std=2.0)
    return model.requires_grad_(False).train(False)


def parse(text):
    """Each family of the rows in `text`, and the rest of its row."""
    rows = [line.split(" | ", 1) for line in text.splitlines() if line.startswith("| ")]
    return [(family, rest) for families, rest in rows for family in families[2:].split("; ")]


def read_page():
    """Family -> its row for the installed transformers: docs/models.md has other ones for old."""
    text, old = re.split("<!-- before transformers 5.23.*", PAGE.read_text(encoding="utf-8"))
    if Version(transformers.__version__) < Version("5.23"):
        text += old
    return dict(parse(text))


def draw_tokens(geometry, *, ragged):
    """Tokens that stay, drawn for every layer and head."""
    generator = torch.Generator().manual_seed(3)
    return [
        [
            sorted(torch.randperm(CACHED, generator=generator)[:size].tolist())
            for head in range(geometry.kv_heads)
            for size in [5 + 3 * ((head + layer) % 3) if ragged else 7]
        ]
        for layer in range(geometry.layers)
    ]


@torch.no_grad()
def feed_in_pieces(model, cache, ids, pieces):
    """Logits of ids [1, T] that follow `CACHED` tokens, fed piece by piece."""
    logits, start = [], CACHED
    for size in pieces:
        positions = torch.arange(start, start + size)[None]
        fed = ids[:, start - CACHED : start - CACHED + size]
        output = model(input_ids=fed, position_ids=positions, past_key_values=cache, use_cache=True)
        logits.append(output.logits)
        start += size
    return torch.cat(logits, dim=1)


def drop_errors(model, ids, masked_logits):
    """Largest difference to masking, of equal and of different numbers of tokens per head.

    NaN where dropping itself changes nothing that a test could see.
    """
    geometry = geometry_of(model.config)
    errors = []
    with use_kvp_attention(model):
        seen = run_and_record(model, ids[:, :CACHED])
        for ragged in (False, True):
            kept = draw_tokens(geometry, ragged=ragged)
            width = max(len(head) for heads in kept for head in heads)
            indices = [
                torch.tensor([[head + [-1] * (width - len(head)) for head in heads]])
                for heads in kept
            ]
            cache = EvictingCache.gather(
                seen.keys, seen.values, indices, seen=CACHED, untouched=seen.untouched
            )
            found = feed_in_pieces(model, cache, ids[:, CACHED:], (5, *[1] * (FED - 5)))
            expected = masked_logits(model, ids, CACHED, kept, geometry.model_layers)[:, CACHED:]
            with torch.no_grad():
                full = model(input_ids=ids, use_cache=False).logits[:, CACHED:]
            observed = float((found - expected).abs().max())
            moved = float((full - expected).abs().max())
            errors.append(observed if moved > 100 * observed else float("nan"))
    return errors


def write_row(status, moves_queries="", note=""):
    """The cells behind the families in a row of the table."""
    return f"{' | '.join((status, moves_queries, note))} |"


def examine_family(family, masked_logits):
    """The row of a family, which is refused, or in which dropping a token equals masking it."""
    model = build_family(family)
    ids = torch.randint(1, 64, (1, CACHED + FED), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model(ids, use_cache=False)  # a config that transformers cannot run is no refusal of kvp
    try:
        check_model(model)
    except ModelError as error:
        what = re.sub(r"model type '\w+'|\w+ForCausalLM", "it", str(error), count=1)
        what = re.sub(": (kvp|choose) .*", "", what)
        return write_row("refused", note=what.replace("|", "/"))
    errors = drop_errors(model, ids, masked_logits)
    assert all(error <= 1e-4 for error in errors), (
        f"{family}: dropping differs from masking by {errors}"
    )
    kinds, geometry = layer_kinds(model.config), geometry_of(model.config)
    left = sorted({kind for i, kind in enumerate(kinds) if i not in geometry.model_layers})
    window = attention_window(model.config)
    note = f"left alone: {', '.join(left)}" if left else ""
    if window is not None:
        note = "one window for all layers: prompt and answer must be shorter"
    status = "partly" if window is not None else "supported"
    return write_row(status, queries_of(model), note)


def queries_of(model):
    """Whether methods that move queries in position, or read hidden states, work."""
    try:
        rope_of(model, CACHED)
    except ModelError:
        try:
            attention_modules(model)
        except ModelError:
            return "no hidden states"
        return "no"
    return "yes"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_the_table_says(family, masked_logits):
    """Dropping equals masking, or the family is refused; docs/models.md says the same."""
    line = examine_family(family, masked_logits)
    assert read_page().get(family) == line, f"docs/models.md needs: | {family} | {line}"


def test_the_table_lists_every_family_once():
    text = PAGE.read_text(encoding="utf-8")
    families, _ = zip(*parse(text[text.index("<!-- begin") : text.index("<!-- end")]), strict=True)
    assert sorted(families) == sorted(["families", *FAMILIES])


SUPPORTED = [name for name, line in read_page().items() if line.startswith(("supported", "partly"))]
QUICK = ("Llama", "Llama 4", "Gemma 3")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SUPPORTED],
)
@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_serving_options_work_together(family, prompt, by_content, combined):
    """`every`, forks, files and padding; questions of one length where other layers are.

    In transformers, windows and recurrent states take padding inside a conversation for tokens, and
    Llama 4's temperature, of every `floor_scale` tokens, all padding.
    """
    model = build_family(family)
    for module in model.modules():
        if hasattr(module, "floor_scale"):
            module.floor_scale = 8192
    kinds = layer_kinds(model.config)
    alike = geometry_of(model.config).layers == len(kinds)
    prompts = [prompt(size, seed=size)[0] for size in (30, 24)]
    questions = [prompt(size, seed=size)[0] for size in ((14, 9, 11, 10) if alike else (14,) * 4)]
    # Single tokens and pieces of linear attention differ by up to 3e-4 in transformers.
    atol = 1e-3 if "linear_attention" in kinds else 1e-4
    combined(model, by_content(20), prompts, [questions], atol)


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen 3-Next", "Llama 4"])
def test_the_last_token_fed_again_finds_other_layers_as_before_it(family, prompt, fixed):
    """A window that has moved on, or a recurrent state, cannot be rolled back; it is kept."""
    model, ids = build_family(family), prompt(CACHED + FED)
    model.set_attn_implementation("kvp")
    fed, scorer = ids[:, : CACHED + 1], fixed(CACHED + 1, layers=4)
    prefill_and_evict(model, fed, scorer, 9, UNPROTECTED)
    assert scorer.layers == [1, 3]  # as methods see them
    cache = prefill_and_evict(model, fed, scorer, CACHED, UNPROTECTED, fed_again=1)
    logits = feed_in_pieces(model, cache, ids[:, CACHED:], (FED,))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, CACHED:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


RECORDED = ("Granite", "Llama", "OLMo 2", "Phi-3 and 4 without a window", "Qwen 3")


@pytest.mark.parametrize("family", RECORDED)
def test_recorded_tensors_are_what_attention_used(family, prompt):
    """q . k / sqrt(D) are the logits, also where a model scales by another number (Granite)."""
    model, ids = build_family(family), prompt(18, batch=2)
    model.set_attn_implementation("eager")
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        attentions = model(ids, past_key_values=stock, output_attentions=True).attentions
    seen = run_and_record(model, ids)
    causal = torch.ones(18, 18).tril().bool()
    for layer, expected in enumerate(attentions):
        keys, values = seen.keys[layer], seen.values[layer]
        torch.testing.assert_close(keys, stock.layers[layer].keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(values, stock.layers[layer].values, atol=1e-5, rtol=0)
        wide = keys.repeat_interleave(2, dim=1)
        logits = seen.queries[layer] @ wide.mT * keys.shape[-1] ** -0.5
        found = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_cache_of_another_layout_is_refused(prompt):
    """An `EvictingCache()` without a config would evict from windows, too."""
    model = build_family("Gemma 3")
    model.set_attn_implementation("kvp")
    with pytest.raises(UsageError, match=r"EvictingCache\.of\(model\.config\)"):
        model(prompt(8), past_key_values=EvictingCache(), use_cache=True)
