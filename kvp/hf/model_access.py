"""The model itself: whether kvp can evict from it, and its own modules.

The file for a new family. Works for decoders whose attention modules project queries with `q_proj`
(optionally normalised by `q_norm`) or a fused `qkv_proj`, and rotate halves: Qwen2, Qwen3, Llama,
Mistral, Phi-3. Models that kvp would evict from wrongly are refused in one line, before any work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvp.errors import ModelError, UsageError, first_line
from kvp.hf.attention import ForeignAttentionError, QueryRecorder, kvp_attention_set, query_unit
from kvp.hf.cache import EvictingCache
from kvp.hf.model_config import check_config, evicted_layers, geometry_of, layer_kinds
from kvp.rope import Rope

_CHANGED_BY_LENGTH = ("inv_freq", "max_seq_len_cached", "attention_scaling")
"""How the attributes of a rotary embedding end that a long input changes."""
_OUTSIDE = ("is_prompt_learning", "alora_invocation_tokens", "XLORA", "POLY", "SHADOW")
"""Settings and kinds of adapters of PEFT that compute outside of a model's modules."""
_ROTATES_QUERIES: WeakSet[PreTrainedModel] = WeakSet()
"""Models whose queries have been compared with their projected and rotated states."""


def unwrap_model(model: nn.Module) -> PreTrainedModel:
    """The model itself, or the one that torch.compile or PEFT holds.

    Raises ModelError for other wrappers, and for adapters outside of the model, as soft prompts.
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
def states_watched(
    model: PreTrainedModel, receive: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call `receive(layer, states)` with the states [B, T, W] that enter each layer's attention.

    Only for forward passes of this thread inside the block. ModelError as `attention_modules`.
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
    weight = next(projection.parameters())
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    projected: Tensor = projection(hidden.to(device=weight.device, dtype=dtype))  # [B, S, width]
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
    unit = query_unit(width, getattr(attention, "scaling", None))
    return unit * queries.float().transpose(1, 2)  # [B, Q, S, D]


@torch.no_grad()
def rope_of(model: PreTrainedModel, tokens: int) -> Rope:
    """The rotary embedding as the model applies it to a prompt of `tokens` tokens.

    Frequencies that depend on the length (LongRoPE, dynamic NTK) are those at that length. Raises
    ModelError for a model without rotary embedding, for one that does not rotate halves, and for
    one whose attention does more to its queries than project, normalise and rotate them.
    """
    rotary = rotary_of(model)
    if rotary is None:
        raise ModelError(
            f"{type(model).__name__} has no rotary embedding: use a method that moves no queries"
        )
    attention_modules(model)  # refuse before the model runs
    last = torch.tensor([[0, max(tokens - 1, 0)]], device=next(model.parameters()).device)
    with rope_kept(model):
        rotary.cosine_and_sine(last)
        rope = rotary.read_rope()
    if model not in _ROTATES_QUERIES:
        _check_queries(model, rotary)
        _ROTATES_QUERIES.add(model)
    return rope


def known_frequencies(model: PreTrainedModel, tokens: int) -> list[float] | None:
    """Frequencies of `rope_of`; None for a model whose rotation kvp does not know."""
    try:
        return rope_of(model, tokens).frequencies.tolist()
    except ModelError:
        return None


@contextmanager
def rope_kept(model: PreTrainedModel) -> Iterator[None]:
    """Give the rotary embedding back what a forward pass inside the block changes in it.

    Frequencies that depend on the length stay, in transformers, at those of the longest input.
    """
    embedding = rotary_of(model)
    rotary = nn.Module() if embedding is None else embedding.module
    names = (*vars(rotary), *dict(rotary.named_buffers()))
    before = {name: getattr(rotary, name) for name in names if name.endswith(_CHANGED_BY_LENGTH)}
    # The tensors themselves go back: a copy made in inference mode could never change again.
    values = {name: old.clone() for name, old in before.items() if isinstance(old, Tensor)}
    try:
        yield
    finally:
        for name, old in before.items():
            if isinstance(old, Tensor) and not torch.equal(old, values[name]):
                old.copy_(values[name])
            setattr(rotary, name, old)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The module that makes cosine and sine for the layers that tokens are evicted from."""

    module: nn.Module
    kind: str | None
    """Kind of those layers, where it has frequencies for each kind (Gemma 3); else None."""

    def read_rope(self) -> Rope:
        """Frequencies [R / 2] and the factor on cosine and sine as they are now."""
        prefix = "" if self.kind is None else f"{self.kind}_"
        frequencies: Tensor = getattr(self.module, f"{prefix}inv_freq")
        scaling = float(getattr(self.module, f"{prefix}attention_scaling", 1.0))
        return Rope(frequencies=frequencies.detach().float().clone(), scaling=scaling)

    def cosine_and_sine(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both for positions [B, T]; ModelError where the module makes something else (Llama 4)."""
        like = torch.zeros(1, device=positions.device)
        made = self.module(like, positions, *([] if self.kind is None else [self.kind]))
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ModelError(
                f"{type(self.module).__name__} makes no cosine and sine: use a method that moves "
                "no queries"
            )
        return made


def rotary_of(model: PreTrainedModel) -> Rotary | None:
    """The rotary embedding of the layers that tokens are evicted from; None without one."""
    kind = layer_kinds(model.config)[evicted_layers(model.config)[0]]
    for module in model.modules():
        if isinstance(getattr(module, f"{kind}_inv_freq", None), Tensor):
            return Rotary(module=module, kind=kind)
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            return Rotary(module=module, kind=None)
    return None


def _check_queries(model: PreTrainedModel, rotary: Rotary) -> None:
    """Raise ModelError where projected and rotated states are not the queries that attention used:
    in layers without RoPE (SmolLM3), and if queries are normalised after it (Hunyuan).
    """
    states: dict[int, Tensor] = {}
    cache = EvictingCache.of(model.config)
    recorder = cache.recorder = QueryRecorder()
    ids = torch.arange(8, device=next(model.parameters()).device)[None] % 2
    with kvp_attention_set(model), rope_kept(model), states_watched(model, states.__setitem__):
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
        cosine, sine = rotary.cosine_and_sine(torch.arange(8, device=ids.device)[None])
        rope = rotary.read_rope()
    half = rope.frequencies.shape[0]
    for layer, used in enumerate(recorder.queries):
        projected = query_projection(model, layer)(states[layer])  # [1, Q, 8, D]
        rotated = rope.rotate(projected, cosine[..., :half].float(), sine[..., :half].float())
        if float((rotated - used.float()).norm()) > 0.05 * float(used.float().norm()):
            raise ModelError(
                f"the queries of layer {evicted_layers(model.config)[layer]} of this "
                f"{type(model).__name__} are not its states "
                "projected, normalised and rotated: use a method that moves no queries"
            )


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


_NOISE = 0.1
"""Relative difference of logits that is no rounding, in any dtype."""
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()
"""Models that have run once with an evicting cache."""


def check_mode(model: PreTrainedModel) -> None:
    """Raise UsageError in a training mode that drops the cache or numbers, as it is now, and
    ModelError where weights are elsewhere until a module runs (accelerate's offloading).
    """
    if any(weight.is_meta for weight in model.parameters()):
        raise ModelError("weights of this model are offloaded (accelerate): load the whole model")
    for module in model.modules():
        own = vars(module)
        acts = own.get("attention_dropout") or (isinstance(module, nn.Dropout) and module.p)
        if module.training and (acts or getattr(module, "gradient_checkpointing", False)):
            raise UsageError(
                "this model is in training mode, with dropout or gradient checkpointing, which "
                "keeps no cache: call model.eval() first"
            )


def check_model(model: PreTrainedModel) -> None:
    """Raise ModelError unless kvp's attention can replace the model's own, else as `check_mode`.

    The first time, the model runs over one token with an evicting cache: whether its attention
    passes positions and leaves the cache's handle alone shows in no attribute.
    """
    check_mode(model)
    check_config(model.config)
    name = type(model).__name__
    # Caps of logits and sinks are all that kvp's attention adds to sdpa.
    capped = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    sunk = any(hasattr(module, "sinks") for module in model.modules())
    known = model._supports_sdpa or capped is not None or sunk
    if not hasattr(model, "generate"):
        raise ModelError(f"{name} writes no text: load it by AutoModelForCausalLM or load_model")
    if not (known and model._can_set_attn_implementation()):
        raise ModelError(f"{name} does not let kvp replace its attention: choose another model")
    if model in _CHECKED:
        return
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    cache = EvictingCache.of(model.config)
    with torch.no_grad(), kvp_attention_set(model), rope_kept(model):
        try:
            # Not through __call__: hooks of the caller, and compiled code, stay out of this.
            model.forward(input_ids=token, past_key_values=cache, use_cache=True)
        except ForeignAttentionError as error:  # although kvp's attention is set
            raise ModelError(
                f"kvp cannot evict from {name}: its layers work on the cached keys themselves"
            ) from error
        except Exception as error:  # whatever the code of an unknown model raises
            raise ModelError(f"kvp cannot evict from {name}: {first_line(error)}") from error
        _check_stored(model.config, cache)
        _check_continues(model)
    _CHECKED.add(model)


def _check_stored(config: PreTrainedConfig, cache: EvictingCache) -> None:
    """Raise ModelError unless every layer to evict from holds one token of the heads expected."""
    geometry = geometry_of(config)
    expected = (1, geometry.kv_heads, 1, geometry.head_dim)
    layers = cache.stored
    shapes = {tuple(x.shape) for layer in layers.values() for x in (layer.keys, layer.values)}
    if tuple(layers) != tuple(geometry.model_layers) or shapes != {expected}:
        sizes = " and ".join(f"{heads} x {width}" for _, heads, _, width in sorted(shapes))
        raise ModelError(
            f"model type {config.model_type!r} caches keys and values of {sizes} numbers per "
            f"token, where kvp expects {geometry.kv_heads} x {geometry.head_dim} for both: choose "
            "another model"
        )


def _check_continues(model: PreTrainedModel) -> None:
    """Raise ModelError where recurrent layers lose their state when several tokens are fed at once.

    Some classes of transformers go on from a state by single tokens alone (Jamba), and kvp feeds
    the rest of a prompt in one piece. Measured on the model without eviction.
    """
    if not {"linear_attention", "conv"} & set(layer_kinds(model.config)):
        return
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    ids = torch.arange(8, device=embedding.device)[None] % embedding.shape[0]
    cache = EvictingCache.of(model.config)
    whole = model.forward(input_ids=ids, use_cache=False).logits[:, 5:].float()
    model.forward(input_ids=ids[:, :5], past_key_values=cache, use_cache=True)
    positions = torch.arange(5, 8, device=ids.device)[None]
    parts = model.forward(
        input_ids=ids[:, 5:], position_ids=positions, past_key_values=cache, use_cache=True
    ).logits.float()
    if float((parts - whole).norm()) > _NOISE * float(whole.norm()):
        raise ModelError(
            f"{type(model).__name__} does not continue its recurrent layers when several tokens "
            "are fed at once, in this version of transformers: choose another model"
        )


def check_weights(model: PreTrainedModel, name: str, *, missing: Collection[str]) -> None:
    """Raise ModelError naming a weight that is missing (transformers draws it) or not finite."""
    if missing:
        raise ModelError(
            f"--model {name}: {len(missing)} weights are missing from its files, among them "
            f"{min(missing)}: download or save the model again"
        )
    for key, weight in model.named_parameters():
        if not weight.is_floating_point():
            continue
        # A sum keeps NaN and infinity, and holds no mask of the weight's size.
        if not bool(weight.detach().sum(dtype=torch.float32).isfinite()):
            raise ModelError(
                f"--model {name}: weight {key} holds NaN or infinity: download or save the model "
                "again"
            )
