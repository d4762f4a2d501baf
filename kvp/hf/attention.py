"""The attention function kvp registers with transformers, under the name `"kvp"`.

With ordinary caches, or none, it is transformers' own sdpa attention. An `EvictingCache` hands over
a `StoredKeys` instead of tensors, and the layer that holds the stored slots decides which of them a
query sees: those whose position is not after the query's own. Importing this module registers the
name and changes nothing else. Models whose logits are capped (Gemma 2) or that add a sink to the
softmax (GPT-OSS) get both, as in their own eager attention. No biases, no paged caches.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvp.errors import ModelError
from kvp.hf.visibility import causal_mask, is_real
from kvp.ops.ragged_attention import cap_logits
from kvp.scoring import ALL_QUERIES

ATTENTION = "kvp"
"""Name of the attention implementation: `model.set_attn_implementation(ATTENTION)`."""

_WORKING_LOGITS = 2**28
"""Logits held at a time where no fused kernel computes them: 1 GiB in float32."""


class QueryRecorder:
    """Keeps the queries of every layer that pass through an `EvictingCache`.

    They are scaled so that q . k / sqrt(D) are the model's logits (`query_scale`). Queries of
    padding are NaN; in a window they come before all others.
    """

    def __init__(self, window: int = ALL_QUERIES) -> None:
        """Keep the last `window` queries of each layer, or every one with `ALL_QUERIES`."""
        self.window = window
        self._queries: dict[int, list[Tensor]] = {}

    def record(self, layer: int, query: Tensor, mask: Tensor | None = None) -> None:
        """Append the queries [B, Q, T, D] (after RoPE) of one forward pass of layer `layer`.

        `mask` is a bool [B, 1, T, S] that shows padding among the T tokens; None without any.
        """
        query = query.detach()
        recorded = self._queries.setdefault(layer, [])
        if mask is not None:  # padding may stand anywhere: queries are cut when it is known
            padding = ~is_real(mask, query.shape[2])
            query = query.masked_fill(padding[:, None, :, None], torch.nan)
        elif self.window != ALL_QUERIES:
            query = query[:, :, -self.window :]
        if self.window != ALL_QUERIES:
            query = torch.cat([*recorded, query], dim=2)
            if mask is not None:
                order = (~query[:, 0, :, 0].isnan()).int().argsort(dim=1, stable=True)
                query = query.gather(2, order[:, None, :, None].expand_as(query))
            query = query[:, :, -self.window :]
            recorded.clear()
        # A copy: the projection that a slice points into may be far larger.
        recorded.append(query.clone(memory_format=torch.contiguous_format))

    @property
    def queries(self) -> tuple[Tensor, ...]:
        """One [B, Q, W, D] tensor per layer, in layer order."""
        every = (held for _, held in sorted(self._queries.items()))
        return tuple(held[0] if len(held) == 1 else torch.cat(held, dim=2) for held in every)

    def forget(self) -> None:
        """Drop all queries but those of a window."""
        if self.window == ALL_QUERIES:
            self._queries = {}

    def take(self, entries: Tensor) -> None:
        """Keep only these entries [R] int64 of the batch, in this order."""
        for layer, held in self._queries.items():
            self._queries[layer] = [queries[entries.to(queries.device)] for queries in held]


class ForeignAttentionError(ModelError):
    """Something other than kvp's attention function touched the cached keys."""


class AttendingLayer(Protocol):
    """A layer of a cache that computes the attention over its own slots."""

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of queries [B, Q, T, D] over the stored slots: [B, T, Q, D].

        `mask` comes from transformers' mask function. `options` are the other arguments that the
        model gives its attention (`position_ids`, `scaling`, `dropout`, `softcap`, `s_aux`).
        """


@dataclass(eq=False)
class StoredKeys:
    """The handle an `EvictingCache` returns to the model in place of key and value tensors.

    Any other attention implementation that touches it stops with a `ModelError`, instead of
    silently attending to slots that hold nothing.
    """

    layer: AttendingLayer
    index: int
    recorder: QueryRecorder | None = None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python and torch.compile look for protocols
            raise AttributeError(name)
        raise ForeignAttentionError(
            f"an EvictingCache needs the attention implementation {ATTENTION!r}: load the model "
            f"with kvp.hf.load_model or call model.set_attn_implementation({ATTENTION!r}) first"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def kvp_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | StoredKeys,
    value: Tensor | StoredKeys,
    attention_mask: Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query [B, Q, T, D] -> ([B, T, Q, D], no weights)."""
    if not isinstance(key, StoredKeys):
        assert isinstance(value, Tensor)
        return plain_attention(module, query, key, value, attention_mask, options), None
    attended = key.layer.attend(module, query, attention_mask, options)
    if key.recorder is not None:
        unit = query_scale(query.shape[-1], options.get("scaling"))
        query = query if unit == 1.0 else query * unit
        key.recorder.record(key.index, query, attention_mask)
    return attended, None


AttentionInterface.register(ATTENTION, kvp_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def query_scale(width: int, scaling: float | None) -> float:
    """Factor on recorded queries [..., width] that makes q . k / sqrt(width) the model's logits.

    1 for most models; Gemma, Granite and others scale their logits by a number of their own.
    """
    unit = 1.0 if scaling is None else float(scaling) * math.sqrt(width)
    return 1.0 if math.isclose(unit, 1.0, rel_tol=1e-6) else unit


def _is_fused(options: Mapping[str, Any]) -> bool:
    """Whether torch's kernels compute the products: they neither cap logits nor add a sink."""
    return options.get("softcap") is None and options.get("s_aux") is None


def plain_attention(
    module: nn.Module,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Attention over keys and values [B, H, S, D] as transformers computes it: [B, T, Q, D].

    `mask` is a bool [B, 1, T, S]. None means causal attention of S tokens; one query alone sees
    all of them. `options` are those of `AttendingLayer.attend`.
    """
    if _is_fused(options):
        attended, _ = sdpa_attention_forward(module, query, keys, values, mask, **options)
        return attended
    tokens = query.shape[2]
    if mask is None and tokens > 1:
        mask = causal_mask(tokens, query.device)
    return _eager_attention(query, keys, values, mask, options)


def grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Attention with one mask per KV head, without copying keys once per query head.

    The G query heads of a group become G * T queries of one KV head. Shapes: query [B, Q, T, D],
    keys and values [B, H, S, D], visible [B, H or 1, T or 1, S] bool (None: all) -> [B, T, Q, D].
    A query that sees no slot gets zeros. `options` are those of `AttendingLayer.attend`.
    """
    if not _is_fused(options):
        return _eager_attention(query, keys, values, visible, options)
    batch, query_heads, tokens, head_dim = query.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    group = query_heads // kv_heads
    packed = query.reshape(batch, kv_heads, group * tokens, head_dim)  # [B, H, G * T, D]
    mask = None
    if visible is not None:
        mask = visible.unsqueeze(2).expand(batch, kv_heads, group, tokens, slots)
        mask = mask.reshape(batch, kv_heads, group * tokens, slots)  # [B, H, G * T, S]
    attended = nn.functional.scaled_dot_product_attention(
        packed, keys, values, attn_mask=mask, dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )  # fmt: skip
    return attended.reshape(batch, query_heads, tokens, -1).transpose(1, 2).contiguous()


def _eager_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None, options: Mapping[str, Any]
) -> Tensor:
    """Logits and sums in the dtype of `query`, softmax in float32: [B, T, Q, D].

    Keys and values [B, H, S, D], visible [B, H or 1, T or 1, S] bool (None: all). `softcap` bounds
    logits x to softcap * tanh(x / softcap); `s_aux` [Q] floats are the logits of an extra slot per
    query head, whose value is zero. A query that sees no slot gets zeros.
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    if visible is not None and visible.shape[1] > 1:
        visible = visible.repeat_interleave(group, dim=1)
    scaling, dropout = options.get("scaling"), options.get("dropout", 0.0)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = options.get("s_aux")
    block = max(1, _WORKING_LOGITS // max(1, query.shape[0] * query.shape[1] * keys.shape[2]))
    parts = []
    for start in range(0, query.shape[2], block):
        part = slice(start, start + block)
        logits = query[:, :, part] @ keys.transpose(2, 3) * scaling
        logits = cap_logits(logits, options.get("softcap"))
        shown = visible if visible is None or visible.shape[2] == 1 else visible[:, :, part]
        if shown is not None:
            logits = logits.masked_fill(~shown, torch.finfo(logits.dtype).min)
        if sinks is not None:
            sink = sinks.to(logits).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        weights = weights[..., : keys.shape[2]]  # without the sink
        if shown is not None:
            weights = weights.masked_fill(~shown, 0.0)
        parts.append(nn.functional.dropout(weights, p=dropout, training=dropout > 0) @ values)
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


Undo = Callable[[], object]


def share_change(
    change: Callable[[PreTrainedModel], Undo | None],
) -> Callable[[PreTrainedModel], AbstractContextManager[None]]:
    """The first open block applies `change`; when the last one closes, it is undone."""
    lock = Lock()
    users: MutableMapping[PreTrainedModel, tuple[int, Undo | None]] = WeakKeyDictionary()

    @contextmanager
    def change_model(model: PreTrainedModel) -> Iterator[None]:
        with lock:
            count, undo = users.get(model) or (0, change(model))
            users[model] = count + 1, undo
        try:
            yield
        finally:
            with lock:
                count, undo = users.pop(model)
                if count > 1:
                    users[model] = count - 1, undo
                elif undo is not None:
                    undo()

    return change_model


@share_change
def use_kvp_attention(model: PreTrainedModel) -> Undo | None:
    """Set kvp's attention on `model`; the former one returns after the last open block."""
    before = model.config._attn_implementation
    if before == ATTENTION:
        return None
    model.set_attn_implementation(ATTENTION)
    return partial(model.set_attn_implementation, before)
