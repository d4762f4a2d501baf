"""The modules of a model: its attention, and what projects queries and values.

Works for decoders whose attention modules project queries with `q_proj` (optionally normalised by
`q_norm`, or gated) or a fused `qkv_proj` (docs/models.md has the families).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.errors import ModelError
from kvp.hf.attention import query_scale
from kvp.hf.model_config import evicted_layers, geometry_of

_OUTSIDE = ("is_prompt_learning", "alora_invocation_tokens", "XLORA", "POLY", "SHADOW")
"""Settings and kinds of adapters of PEFT that compute outside of a model's modules."""


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """The model itself, or the one that torch.compile or PEFT holds.

    Raises ModelError for other wrappers, and for adapters outside of the model (soft prompts).
    """
    inner: Any = getattr(model, "_orig_mod", model)  # torch.compile
    if hasattr(inner, "get_base_model"):  # PEFT
        adapter = getattr(inner, "active_peft_config", None)
        kind = str(getattr(getattr(adapter, "peft_type", None), "value", ""))
        own = any(getattr(adapter, name, None) for name in _OUTSIDE) or kind in _OUTSIDE
        if own and not getattr(inner, "_adapters_disabled", False):
            raise ModelError(
                f"this model's adapter ({kind}) is no part of its modules: leave it out "
                "(disable_adapter)"
            )
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is no transformers model: pass the one that it wraps to kvp"
        )
    return inner


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Attention module of every layer that tokens are evicted from, in order; else ModelError."""
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        projects = hasattr(module, "q_proj") or hasattr(module, "qkv_proj")
        if isinstance(layer, int) and projects and hasattr(module, "o_proj"):
            modules[layer] = module
    layers = evicted_layers(model.config)
    if not modules.keys() >= set(layers):
        raise ModelError(
            f"{type(model).__name__} has no attention module with q_proj or qkv_proj in each of "
            f"its {len(layers)} layers: use a method that reads no hidden states and no value norms"
        )
    return [modules[layer] for layer in layers]


@contextmanager
def watch_states(model: PreTrainedModel, receive: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `receive(layer, states)` with the states [B, T, W] that enter each layer's attention.

    Only forward passes of this thread count. Raises ModelError where layers are not found.
    """
    thread = get_ident()
    with ExitStack() as undo:
        for layer, attention in enumerate(attention_modules(model)):

            def watch(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any] | None = None,  # None in a thread that saw the hook removed
                layer: int = layer,
            ) -> None:
                if get_ident() == thread and kwargs is not None:
                    receive(layer, args[0] if args else kwargs["hidden_states"])

            undo.callback(attention.register_forward_pre_hook(watch, with_kwargs=True).remove)
        yield


def query_projection(model: PreTrainedModel, layer: int) -> Callable[[Tensor], Tensor]:
    """The map from states that enter a layer's attention to its queries before RoPE.

    The returned function takes [B, S, W] floats and gives [B, Q, S, D] float32; it computes in the
    model's dtype, bias and norm included, as the model does, and scales as `QueryRecorder` does.
    """
    size, attention = geometry_of(model.config), attention_modules(model)[layer]
    return partial(_queries, attention, size.query_heads, size.head_dim)


@torch.no_grad()
def _queries(attention: nn.Module, heads: int, width: int, hidden: Tensor) -> Tensor:
    projection = getattr(attention, "q_proj", None) or attention.qkv_proj
    assert isinstance(projection, nn.Module)
    projected: Tensor = projection(hidden.to(**_tensor_options(projection)))  # [B, S, width]
    if hasattr(attention, "q_proj") and projected.shape[-1] == 2 * heads * width:
        # Each head's query is followed by its output gate (Qwen3-Next).
        paired = projected.view(*projected.shape[:2], heads, 2 * width)
        projected = paired[..., :width].flatten(-2)
    projected = projected[..., : heads * width]  # a fused projection goes on with keys and values
    queries = projected.view(*projected.shape[:2], heads, width)  # [B, S, Q, D]
    norm = getattr(attention, "q_norm", None)
    if norm is not None and norm.weight.shape[-1] == width:
        queries = norm(queries)
    elif norm is not None:
        queries = norm(projected).view(queries.shape)
    unit = query_scale(width, getattr(attention, "scaling", None))
    return unit * queries.float().transpose(1, 2)  # [B, Q, S, D]


def _tensor_options(projection: nn.Module) -> dict[str, Any]:
    """Device and dtype of what a projection takes; a quantised one takes the default dtype."""
    weight = next(projection.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    return {"device": weight.device, "dtype": dtype}


@torch.no_grad()
def known_output_gram(model: PreTrainedModel) -> Tensor | None:
    """Gram matrices M of the output projection: [L, H, D, D] float32 on the CPU.

    sqrt(v^T M v) is the norm of value v behind the projection, as a root mean square over the
    query heads that share the KV head. None where the model's attention modules are not found.
    """
    try:
        modules = attention_modules(model)
    except ModelError:
        return None
    size = geometry_of(model.config)
    grams = (projection_gram(layer, size.kv_heads, size.group, size.head_dim) for layer in modules)
    return torch.stack([gram.mean(dim=1) for gram in grams]).cpu()


@torch.no_grad()
def projection_gram(attention: nn.Module, heads: int, group: int, width: int) -> Tensor:
    """Gram matrix of each query head's slice of `o_proj`: [H, G, D, D] float32.

    Quantised or adapted projections are applied to unit vectors, so the result is as they act.
    """
    projection = attention.o_proj
    assert isinstance(projection, nn.Module)
    size = heads * group * width
    if type(projection) is nn.Linear:
        columns = projection.weight.T  # [H * G * D, W]
    else:
        units = torch.eye(size, **_tensor_options(projection))
        columns = projection(units) - projection(torch.zeros_like(units[:1]))  # without the bias
    slices = columns.float().reshape(heads, group, width, -1)
    return torch.einsum("hgdw,hgew->hgde", slices, slices)


@torch.no_grad()
def projected_norms(attention: nn.Module, values: Tensor, group: int) -> Tensor:
    """Norms ||W_o v|| of values [B, H, N, D] behind each query head's slice: [B, H, G, N] float32.

    They come from the slice's Gram matrix, so no projected vector of the model's width is held.
    """
    _, heads, _, width = values.shape
    gram = projection_gram(attention, heads, group, width)
    folded = torch.einsum("bhnd,hgde->bhgne", values.float(), gram)
    return (folded * values.float()[:, :, None]).sum(dim=-1).clamp_min(0).sqrt()
