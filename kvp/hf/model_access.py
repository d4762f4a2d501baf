"""What methods beyond attention need of a model's own modules: queries from states, and RoPE.

Works for decoders whose attention modules project queries with `q_proj` (optionally normalised by
`q_norm`) or a fused `qkv_proj`, and rotate halves: Qwen2, Qwen3, Llama, Mistral, Phi-3.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.errors import ModelError
from kvp.hf.loading import geometry_of
from kvp.rope import Rope


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of every layer, in order; ModelError when they cannot be told."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        projects = hasattr(module, "q_proj") or hasattr(module, "qkv_proj")
        if isinstance(layer, int) and projects and hasattr(module, "o_proj"):
            found[layer] = module
    layers = geometry_of(model.config).layers
    if sorted(found) != list(range(layers)):
        raise ModelError(
            f"{type(model).__name__} has no attention module with q_proj or qkv_proj in each of "
            f"its {layers} layers: use a method that reads no hidden states and no value norms"
        )
    return [found[layer] for layer in range(layers)]


def query_projection(model: PreTrainedModel, layer: int) -> Callable[[Tensor], Tensor]:
    """The map from states that enter a layer's attention to its queries before RoPE.

    The returned function takes [B, S, W] floats and gives [B, Q, S, D] float32; it computes in the
    model's dtype, bias and norm included, as the model does.
    """
    geometry = geometry_of(model.config)
    return partial(
        _queries, attention_modules(model)[layer], geometry.query_heads, geometry.head_dim
    )


@torch.no_grad()
def _queries(attention: nn.Module, heads: int, width: int, hidden: Tensor) -> Tensor:
    projection = getattr(attention, "q_proj", None) or attention.qkv_proj
    assert isinstance(projection, nn.Module)
    weight = next(projection.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    projected: Tensor = projection(hidden.to(device=weight.device, dtype=dtype))
    projected = projected[..., : heads * width]  # a fused projection goes on with keys and values
    queries = projected.view(*projected.shape[:2], heads, width)
    norm = getattr(attention, "q_norm", None)
    if norm is not None and norm.weight.shape[-1] == width:
        queries = norm(queries)
    elif norm is not None:
        queries = norm(projected).view(queries.shape)
    return queries.float().transpose(1, 2)


@torch.no_grad()
def rope_of(model: PreTrainedModel, tokens: int) -> Rope:
    """The rotary embedding as the model applies it to a prompt of `tokens` tokens.

    Frequencies that depend on the length (LongRoPE, dynamic NTK) are those at that length. Raises
    ModelError for a model without rotary embedding and for one that does not rotate halves.
    """
    rotary = _rotary(model)
    if rotary is None:
        raise ModelError(
            f"{type(model).__name__} has no rotary embedding: use a method that moves no queries"
        )
    weight = next(model.parameters())
    last = torch.tensor([[0, max(tokens - 1, 0)]], device=weight.device)
    with rope_kept(model):
        cosine, sine = rotary(weight.new_zeros(1, dtype=torch.float32), last)
        assert isinstance(rotary.inv_freq, Tensor)
        rope = Rope(
            frequencies=rotary.inv_freq.detach().float().clone(),
            scaling=float(getattr(rotary, "attention_scaling", 1.0)),
        )
    _check_halves(model, rope, cosine, sine)
    return rope


def known_frequencies(model: PreTrainedModel, tokens: int) -> list[float] | None:
    """Frequencies of `rope_of`; None for a model whose keys nobody here can turn."""
    try:
        return rope_of(model, tokens).frequencies.tolist()
    except ModelError:
        return None


@contextmanager
def rope_kept(model: PreTrainedModel) -> Iterator[None]:
    """Give the rotary embedding back what a forward pass inside the block changes in it.

    Frequencies that depend on the length stay, in transformers, at those of the longest input.
    """
    rotary = _rotary(model)
    names = ("inv_freq", "max_seq_len_cached", "attention_scaling")
    before = {name: getattr(rotary, name) for name in names if hasattr(rotary, name)}
    before = {n: v.clone() if isinstance(v, Tensor) else v for n, v in before.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(rotary, name, value)


def _rotary(model: PreTrainedModel) -> nn.Module | None:
    found = (m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor))
    return next(found, None)


def _check_halves(model: PreTrainedModel, rope: Rope, cosine: Tensor, sine: Tensor) -> None:
    """Compare with the rotation of the model's own source file, where that is a function."""
    source = inspect.getmodule(type(attention_modules(model)[0]))
    apply = getattr(source, "apply_rotary_pos_emb", None)
    if apply is None:
        return
    width = geometry_of(model.config).head_dim
    probe = torch.linspace(-1, 1, 2 * width, device=cosine.device).view(1, 1, 2, width)
    rotated, _ = apply(probe, probe, cosine.float(), sine.float())
    half = rope.frequencies.shape[0]
    own = rope.rotate(probe, cosine[..., :half].float(), sine[..., :half].float())
    if not torch.allclose(rotated, own, atol=1e-4):
        raise ModelError(
            f"{type(model).__name__} pairs the channels of its rotary embedding otherwise than "
            "Llama: use a method that moves no queries"
        )
