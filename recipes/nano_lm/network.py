"""A fast forward pass of Qwen2 for training on a CPU, over the parameters of a transformers model.

Matrices are multiplied in bfloat16, everything that is added up over layers stays in float32.
Compared with the model's own pass under autocast it casts each weight once, joins matrices that
read the same input, and takes positions per sequence. A test compares it with the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
from attention import attend
from model import GROUPS, HEAD_SIZE, HEADS, THETA, WIDTH
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM


def hidden_states(model: Qwen2ForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Last hidden states, normed: ids, positions int64 [sequences, length] -> bfloat16 [.., width].

    Every token sees itself and all tokens before it in its sequence, whatever the `positions`.
    """
    epsilon = model.config.rms_norm_eps
    cos, sin = rotations(positions)
    count, length = ids.shape
    x = model.model.embed_tokens(ids)
    layers: Any = model.model.layers
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        h = F.rms_norm(x, (WIDTH,), layer.input_layernorm.weight, epsilon).bfloat16()
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        joined = F.linear(
            h,
            torch.cat([part.weight for part in parts]).bfloat16(),
            torch.cat([part.bias for part in parts]).bfloat16(),
        ).view(count, length, HEADS + 2 * GROUPS, HEAD_SIZE)
        turned = rotate(joined[:, :, : HEADS + GROUPS], cos, sin).transpose(1, 2)
        query, key = turned[:, :HEADS], turned[:, HEADS:]
        value = joined[:, :, HEADS + GROUPS :].transpose(1, 2)
        mixed = attend(query, key, value)
        mixed = mixed.transpose(1, 2).reshape(count, length, HEADS * HEAD_SIZE)
        x = x + F.linear(mixed, attention.o_proj.weight.bfloat16())
        h = F.rms_norm(x, (WIDTH,), layer.post_attention_layernorm.weight, epsilon).bfloat16()
        both = F.linear(h, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).bfloat16())
        gate, up = both.chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, mlp.down_proj.weight.bfloat16())
    return F.rms_norm(x, (WIDTH,), model.model.norm.weight, epsilon).bfloat16()


def rotations(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, bfloat16 [sequences, length, 1, HEAD_SIZE / 2]."""
    rates = THETA ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE)
    angles = positions[:, :, None, None].float() * rates
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding: bfloat16 [sequences, length, heads, size] -> the same."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
