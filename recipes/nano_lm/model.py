"""The shape of the nano model."""

from __future__ import annotations

from transformers import Qwen2Config

VOCAB_SIZE = 4096
MAX_LENGTH = 2048


def nano_config() -> Qwen2Config:
    """Qwen2 with 4 layers of width 128, 4 query and 2 KV heads of 32, tied embeddings."""
    return Qwen2Config(  # type: ignore[call-arg]  # head_dim is read, though not declared
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
