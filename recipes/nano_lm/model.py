"""The shape of the nano model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB_SIZE = 8192
MAX_LENGTH = 2048
LAYERS = 5
WIDTH = 256
HEADS = 8
GROUPS = 4
"""KV heads."""
HEAD_SIZE = 32
THETA = 500_000.0
"""Rotary base."""
OFFSETS = (1, 2, 3, 4, 5, 6)
"""How far back the heads of the first layer look at first."""
CHANNELS = 5
"""Rotary frequencies, the fastest ones, that hold an offset."""
SLOW = 7
"""Number of the first rotary frequency that is slow enough to match tokens at any distance."""
SHARPNESS = 6.0
"""Amplitude of a query's and a key's bias in those channels."""


def nano_config() -> Qwen2Config:
    """Qwen2 with 5 layers of width 256, 8 query and 4 KV heads of 32, tied embeddings.

    The rotary base is Llama 3's: most of a head's channels hardly turn within the context, so that
    what is matched at one distance is matched at others.
    """
    return Qwen2Config(  # type: ignore[call-arg]  # head_dim is read, though not declared
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=640,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


@torch.no_grad()
def new_model() -> Qwen2ForCausalLM:
    """A model that begins with induction: what would take it the first part of the training.

    Layers begin as the identity (their output matrices are zero) but for two: in the first layer,
    each of the first heads looks a fixed number of tokens back, by biases alone, and writes down
    what it saw in channels of its own; heads of the second layer look for tokens before which the
    first layer saw the present token, and copy them.
    """
    model = Qwen2ForCausalLM(nano_config())
    layers: Any = model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first, second = layers[0].self_attn, layers[1].self_attn
    _look_back(first.q_proj.bias, first.k_proj.bias)
    written = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q.view(WIDTH, -1, HEAD_SIZE)
    for head in range(len(OFFSETS)):
        columns = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        first.o_proj.weight[:, columns] = 0.2 * written[:, head]
    slow = ((torch.arange(HEAD_SIZE) % (HEAD_SIZE // 2)) >= SLOW).unsqueeze(1)
    seen = first.v_proj.weight[:HEAD_SIZE] * slow  # what head 0 reads of the token before
    shared = HEADS // GROUPS
    for group in range(GROUPS // 2):
        rows = slice(group * HEAD_SIZE, (group + 1) * HEAD_SIZE)
        copied = written[
            :, len(OFFSETS) + group
        ]  # channels where no head of the first layer writes
        second.k_proj.weight[rows] = 3.0 * written[:, 0].T * slow
        second.v_proj.weight[rows] = copied.T
        for head in range(group * shared, (group + 1) * shared):
            columns = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
            second.q_proj.weight[columns] = 4.0 * seen + 0.02 * torch.randn_like(seen)
            second.o_proj.weight[:, columns] = copied
    return model


def _look_back(query_bias: Tensor, key_bias: Tensor) -> None:
    """Sets the biases of a layer's attention so that its first heads look `OFFSETS` tokens back.

    A constant key, and a constant query turned so that the two agree at the head's offset.
    """
    rates = THETA ** (-2 * torch.arange(CHANNELS) / HEAD_SIZE)
    keys = key_bias.view(GROUPS, 2, HEAD_SIZE // 2)
    keys[:, 0, :CHANNELS] = SHARPNESS
    queries = query_bias.view(HEADS, 2, HEAD_SIZE // 2)
    for head, offset in enumerate(OFFSETS):
        queries[head, 0, :CHANNELS] = SHARPNESS * torch.cos(offset * rates)
        queries[head, 1, :CHANNELS] = -SHARPNESS * torch.sin(offset * rates)
