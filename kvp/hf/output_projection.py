"""Norms of values behind the output projection: how far a head's values move the residual stream.

Attention times the norm of a value cannot be compared across heads: a head may have large values
and a small output projection. Behind the projection the norms of all heads share a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.errors import ModelError
from kvp.hf.model_access import attention_modules
from kvp.hf.model_geometry import geometry_of


@torch.no_grad()
def output_gram(model: PreTrainedModel) -> Tensor:
    """Gram matrices M of the output projection: [L, H, D, D] float32 on the CPU.

    sqrt(v^T M v) is the norm of value v behind the projection, as a root mean square over the
    query heads that share the KV head. Raises ModelError for a model whose attention modules are
    not found.
    """
    geometry = geometry_of(model.config)
    grams = [
        projection_gram(attention, geometry.kv_heads, geometry.group, geometry.head_dim).mean(dim=1)
        for attention in attention_modules(model)
    ]
    return torch.stack(grams).cpu()


def known_output_gram(model: PreTrainedModel) -> Tensor | None:
    """`output_gram`, or None where the model's attention modules are not found."""
    try:
        return output_gram(model)
    except ModelError:
        return None


@torch.no_grad()
def projection_gram(attention: nn.Module, heads: int, group: int, width: int) -> Tensor:
    """Gram matrix of each query head's slice of `o_proj`: [H, G, D, D] float32.

    Quantised or adapted projections are read as they act, through what they make of unit vectors.
    """
    projection = attention.o_proj
    assert isinstance(projection, nn.Module)
    size = heads * group * width
    if type(projection) is nn.Linear:
        columns = projection.weight.T  # [H * G * D, W]
    else:
        weight = next(projection.parameters())
        dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
        zero = torch.zeros(1, size, device=weight.device, dtype=dtype)
        units = torch.eye(size, device=weight.device, dtype=dtype)
        columns = projection(units) - projection(zero)  # without the bias
    slices = columns.float().reshape(heads, group, width, -1)
    return torch.einsum("hgdw,hgew->hgde", slices, slices)


@torch.no_grad()
def projected_norms(attention: nn.Module, values: Tensor, group: int) -> Tensor:
    """Norms ||W_o v|| of values [B, H, N, D] behind each query head's slice: [B, H, G, N] float32.

    Through the Gram matrix of the slice, so that no projected vector of the model's width is held.
    """
    _, heads, _, width = values.shape
    gram = projection_gram(attention, heads, group, width)
    folded = torch.einsum("bhnd,hgde->bhgne", values.float(), gram)
    return (folded * values.float()[:, :, None]).sum(dim=-1).clamp_min(0).sqrt()
