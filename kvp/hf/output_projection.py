"""How far a head's values move the residual stream: what the output projection makes of them.

Attention times the norm of a value says nothing across heads: a head may have large values and a
small output projection. Behind the projection the two meet, and there the norms of all heads share
a unit.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.errors import ModelError
from kvp.hf.loading import geometry_of
from kvp.hf.model_access import attention_modules


@torch.no_grad()
def output_gram(model: PreTrainedModel) -> Tensor:
    """Gram matrices M of the output projection: [L, H, D, D] float32 on the CPU.

    sqrt(v^T M v) is the norm of value v behind the projection, as a root mean square over the
    query heads that share the KV head. Raises ModelError for a model whose attention modules cannot
    be told.
    """
    geometry = geometry_of(model.config)
    grams = []
    for attention in attention_modules(model):
        columns = _columns(attention, geometry.query_heads * geometry.head_dim)
        shape = (geometry.kv_heads, geometry.group, geometry.head_dim, -1)
        slices = columns.view(shape)
        grams.append(torch.einsum("hgdw,hgew->hde", slices, slices) / geometry.group)
    return torch.stack(grams).cpu()


def known_output_gram(model: PreTrainedModel) -> Tensor | None:
    """`output_gram`, or None where the model's attention modules cannot be told."""
    try:
        return output_gram(model)
    except ModelError:
        return None


def _columns(attention: nn.Module, width: int) -> Tensor:
    """What the projection makes of each unit vector, [width, W] float32; quantised ones too."""
    projection = attention.o_proj
    assert isinstance(projection, nn.Module)
    weight = next(projection.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    zero = torch.zeros(1, width, device=weight.device, dtype=dtype)
    units = torch.eye(width, device=weight.device, dtype=dtype)
    moved: Tensor = projection(units) - projection(zero)
    return moved.float()
