"""Small models as GGUF files, for transformers' reader and for llama.cpp."""

import json

import gguf
import pytest

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write(path, model, tokenizer_json=None):
    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma2":
        writer.add_sliding_window(config.sliding_window)
    if tokenizer_json is None:
        writer.add_vocab_size(config.vocab_size)
        writer.add_tokenizer_model("none")
    else:
        vocabulary = json.loads(tokenizer_json.read_text())["model"]
        tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
        writer.add_eos_token_id(config.eos_token_id)
    for name, tensor in model.state_dict().items():
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            halves = tensor.view(-1, 2, config.head_dim // 2, config.hidden_size)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if family == "gemma2" and name == "lm_head.weight":
            continue  # it is the embedding
        if family == "gemma2":
            name = name.replace("post_attention_layernorm", "post_attention_norm")
        for theirs, ours in PARTS.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def write_gguf():
    """Write a Llama, Qwen2 or Gemma-2 and its byte-level tokenizer, if any, as llama.cpp's
    converter does: `write_gguf(path, model, tokenizer_json)`."""
    return write
