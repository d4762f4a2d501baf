"""Shrink a model's cache once, after prefill: the way every method here is meant to be applied.

`evicting` wraps an unmodified `model.generate`; the cache shrinks right after the prefill, so that
the first new token still comes from full attention (as in the KVP paper). `prefill_and_evict`
returns the shrunk cache instead: whatever is fed next already feels the eviction. New tokens are
appended and never evicted. Left out: eviction during decoding, uneven budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvp.budgets import Budget, parse_budget
from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.loading import check_model
from kvp.hf.observe import observe, recent_queries
from kvp.ranking import Protection, keep_tokens
from kvp.scoring import Scorer, View


def prefill_and_evict(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: Scorer,
    budget: int | str | Budget,
    protection: Protection | None = None,
) -> EvictingCache:
    """Prefill `input_ids` [B, N] int64 (no padding) and keep `budget` tokens per KV head.

    Pass everything but the tokens to be fed afterwards: `input_ids[:, :-1]` of a prompt. A budget
    of N or more keeps the cache as it is and runs no scoring. `protection` defaults to the first 4
    and the last 16 tokens. Raises UsageError when the budget is below the protected tokens, or when
    the scorer needs the future; ModelError for models kvp cannot evict from.
    """
    check_model(model)
    _refuse_future(scorer)
    protection = Protection() if protection is None else protection
    batch, tokens = input_ids.shape
    kept = kept_tokens(_parsed(budget), tokens, protection)
    queries = scorer.needs.queries if kept < tokens else 0
    seen = observe(model, input_ids, queries=queries, last_logits=True)
    _shrink(seen.cache, seen.queries, scorer, [kept] * batch, [0] * batch, protection)
    return seen.cache


def evicting(
    model: PreTrainedModel,
    scorer: Scorer,
    budget: int | str | Budget,
    protection: Protection | None = None,
) -> AbstractContextManager[None]:
    """Make `model.generate` shrink its cache to `budget` tokens per KV head after every prefill.

    Use as `with evicting(...):`, once. Inside, `generate` may be called several times, with
    left-padded batches, sampling or beams; each row keeps its own tokens, a fraction such as
    `"12.5%"` is taken of the row's own length. A call that continues a shrunk cache
    (`past_key_values=`) appends to it and evicts nothing more. On exit the model is as before.

    Raises UsageError for a budget below the protected tokens, a scorer that needs the future, a
    second `evicting` around the same model, chunked prefill, `use_cache=False` and caches of
    another kind; ModelError for models kvp cannot evict from.
    """
    check_model(model)
    _refuse_future(scorer)
    protection = Protection() if protection is None else protection
    budget = _parsed(budget)
    if budget.count is not None:
        kept_tokens(budget, budget.count + protection.tokens, protection)
    return _Evicting(model, scorer, budget, protection)


def kept_tokens(budget: Budget, tokens: int, protection: Protection) -> int:
    """Tokens per KV head that stay of `tokens`; UsageError when protected ones do not fit."""
    kept = min(budget.tokens(tokens), tokens)
    if kept < min(tokens, protection.tokens):
        raise UsageError(
            f"budget {budget} keeps {kept} tokens, fewer than the {protection.tokens} protected "
            "ones: raise the budget or turn protection off"
        )
    return kept


def _parsed(budget: int | str | Budget) -> Budget:
    return budget if isinstance(budget, Budget) else parse_budget(budget)


def _refuse_future(scorer: Scorer) -> None:
    if scorer.needs.future:
        raise UsageError(f"method {scorer.name} needs the future: it only runs on observed traces")


def _shrink(
    cache: EvictingCache,
    queries: Sequence[Tensor],
    scorer: Scorer,
    kept: Sequence[int],
    padding: Sequence[int],
    protection: Protection,
) -> None:
    """Evict in place: row b, left-padded by padding[b], keeps its best kept[b] tokens."""
    seen = cache.get_seq_length()
    if all(keep == seen - pad for keep, pad in zip(kept, padding, strict=True)):
        return
    rows = len(kept)
    uniform = not any(padding)
    groups = [slice(0, rows)] if uniform else [slice(row, row + 1) for row in range(rows)]
    for index, layer in enumerate(cache.layers):
        heads = layer.keys.shape[1]
        indices = torch.full((rows, heads, max(kept)), -1, device=layer.keys.device)
        for group in groups:
            keep, pad = kept[group.start], padding[group.start]
            if keep == seen - pad:
                chosen = torch.arange(keep, device=layer.keys.device)
            else:
                recent = recent_queries(queries, index, scorer.needs, seen - pad)
                view = View(
                    layer=index,
                    keys=layer.keys[group, :, pad:],
                    values=layer.values[group, :, pad:],
                    positions=layer.positions[group, 0, pad:],
                    budget=keep,
                    queries=None if recent is None else recent[group],
                )
                chosen = keep_tokens(_scores(scorer, view), keep, protection)
            indices[group, :, :keep] = chosen + pad
        cache.layers[index] = layer.select(indices)


def _scores(scorer: Scorer, view: View) -> Tensor:
    scores = scorer.score(view)
    if scores.shape != view.keys.shape[:3] or bool(scores.isnan().any()):
        raise UsageError(
            f"method {scorer.name} returned scores {tuple(scores.shape)} in layer {view.layer}, "
            f"expected {tuple(view.keys.shape[:3])} without NaN"
        )
    return scores


class _Evicting(AbstractContextManager[None]):
    """Swaps in an `EvictingCache` before a prefill and shrinks it afterwards, by module hooks."""

    def __init__(
        self,
        model: PreTrainedModel,
        scorer: Scorer,
        budget: Budget,
        protection: Protection,
    ) -> None:
        self._model = model
        self._scorer = scorer
        self._budget = budget
        self._protection = protection
        self._used = False
        self._undo = ExitStack()
        self._prefilling: EvictingCache | None = None
        self._prompt_tokens = 0

    def __enter__(self) -> None:
        hooks = self._model._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), _Evicting) for hook in hooks):
            raise UsageError("this model is already inside an evicting(...) block: leave it first")
        if self._used:
            raise UsageError("an evicting(...) block cannot be entered twice: call evicting again")
        self._used = True
        with ExitStack() as undo:
            undo.enter_context(kvp_attention_set(self._model))
            before = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
            undo.callback(before.remove)
            after = self._model.register_forward_hook(self._after, with_kwargs=True)
            undo.callback(after.remove)
            self._undo = undo.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._prefilling is not None:
            self._prefilling.recorder = None
        self._undo.close()

    def _before(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = kwargs.get("past_key_values")
        if cache is None or kwargs.get("use_cache") is False:
            raise UsageError(
                "evicting needs model.generate with use_cache=True (Phi-3 models also drop their "
                "cache when an answer crosses the length where their RoPE changes: shorten it)"
            )
        if type(cache) not in (DynamicCache, EvictingCache):
            raise UsageError(f"evicting cannot shrink a {type(cache).__name__}: pass no cache")
        inputs = kwargs.get("input_ids")
        tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[1]
        if cache.get_seq_length() == 0:
            cache = cache if isinstance(cache, EvictingCache) else EvictingCache()
            needed = self._scorer.needs.queries
            cache.recorder = QueryRecorder(needed) if needed else None
            self._prefilling = cache
            return args, {**kwargs, "past_key_values": cache}
        if not isinstance(cache, EvictingCache):
            raise UsageError(
                "past_key_values was filled outside of evicting(...): pass the whole prompt"
            )
        if tokens > 1 and cache.get_seq_length() == self._prompt_tokens:
            raise UsageError(
                "the prompt arrives in pieces, but eviction follows the first one: generate with "
                "prefill_chunk_size=None and without an assistant model"
            )
        return args, kwargs

    def _after(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        cache = self._prefilling
        if cache is None or kwargs["past_key_values"] is not cache:
            return
        self._prefilling = None
        recorder, cache.recorder = cache.recorder, None
        self._prompt_tokens = cache.get_seq_length()
        padding = _left_padding(kwargs.get("attention_mask"), cache)
        kept = [
            kept_tokens(self._budget, self._prompt_tokens - pad, self._protection)
            for pad in padding
        ]
        queries = recorder.queries if recorder is not None else ()
        _shrink(cache, queries, self._scorer, kept, padding, self._protection)


def _left_padding(mask: Tensor | None, cache: EvictingCache) -> list[int]:
    """Padding columns of every row; UsageError unless padding is on the left."""
    if mask is None:
        return [0] * cache.layers[0].keys.shape[0]
    real = mask.bool()
    if real.ndim != 2 or not bool(real[:, -1].all()) or bool((~real[:, 1:] & real[:, :-1]).any()):
        raise UsageError("evicting needs left padding: tokenizer.padding_side = 'left'")
    return (~real).sum(dim=1).tolist()
