"""Small models as GGUF files, for transformers and for llama.cpp."""

import json

import gguf
import pytest
import torch

ADD = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}


def fields_of(config):
    """Fields of the architecture, by name without it."""
    width = getattr(config, "head_dim", None)
    told = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if width:
        told |= {"attention.key_length": width, "attention.value_length": width}
    return told


def as_converted(config, name, tensor):
    """A weight as llama.cpp's converter changes it."""
    if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
        halves = tensor.view(-1, 2, config.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def write(path, model, tokenizer_json=None, *, fields=None, tensors=None):
    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_name(path.stem)
    for field, value in (fields_of(config) | (fields or {})).items():
        getattr(writer, f"add_{ADD[type(value)]}")(f"{family}.{field}", value)
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
        writer.add_pad_token_id(0)
    (arch,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:  # it is the embedding
            called = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(called, as_converted(config, name, tensor).float().numpy())
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def uninitialised_memory_is_nan():
    """Memory that no operator has written to reads as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def write_gguf():
    """Write a model and its byte-level tokenizer, if any, as llama.cpp's converter does:
    `write_gguf(path, model, tokenizer_json, fields={...}, tensors={...})`.

    `fields` of the architecture and `tensors` are written beside the usual ones, or in their place.
    """
    return write
