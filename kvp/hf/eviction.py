"""Shrink a model's cache once, after prefill: the way every method here is meant to be applied.

`evicting` wraps an unmodified `model.generate`; the cache shrinks right after the prefill, so that
the first new token still comes from full attention (as in the KVP paper). `prefill_and_evict`
returns the shrunk cache instead: whatever is fed next already feels the eviction. New tokens are
appended and never evicted. Left out: eviction during decoding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.allocation import Allocator
from kvp.budgets import Budget, parse_budget
from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.evict import EvictionRule, evict, kept_tokens
from kvp.hf.hidden import HiddenRecorder
from kvp.hf.loading import check_model
from kvp.hf.observe import Observation
from kvp.hf.prefill import prefill, recorded_hidden
from kvp.ranking import Protection
from kvp.scoring import Needs, Scorer


def prefill_and_evict(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: Scorer,
    budget: int | str | Budget,
    protection: Protection | None = None,
    *,
    allocator: Allocator | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> EvictingCache:
    """Prefill `input_ids` [B, N] int64 (no padding) and keep `budget` tokens per KV head.

    Pass everything but the tokens to be fed afterwards: `input_ids[:, :-1]` of a prompt. A budget
    of N or more keeps the cache as it is; without an allocator, nothing is scored then.
    `protection` defaults to the first 4 and the last 16 tokens. An `allocator` splits the budget
    over layers and KV heads instead of giving each head the same; `tokenizer` is for methods that
    repeat or read the prompt. Raises
    UsageError when the budget is below the protected tokens, when the scorer needs the future or a
    tokenizer it was not given, and for counts of an allocator that cannot be kept; ModelError for
    models kvp cannot evict from.
    """
    check_model(model)
    rule = _rule(scorer, budget, protection, allocator)
    _refuse_future(scorer)
    batch, tokens = input_ids.shape
    kept = kept_tokens(rule.budget, tokens, rule.protection)
    needs = scorer.needs if allocator is not None or kept < tokens else Needs()
    seen = prefill(model, input_ids, needs, tokenizer=tokenizer).observation
    assert seen is not None
    evict(model, seen, rule, padding=[0] * batch, input_ids=input_ids, tokenizer=tokenizer)
    return seen.cache


def evicting(
    model: PreTrainedModel,
    scorer: Scorer,
    budget: int | str | Budget,
    protection: Protection | None = None,
    *,
    allocator: Allocator | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> AbstractContextManager[None]:
    """Make `model.generate` shrink its cache to `budget` tokens per KV head after every prefill.

    Use as `with evicting(...):`, once. Inside, `generate` may be called several times, with
    left-padded batches, sampling or beams; each row keeps its own tokens, a fraction such as
    `"12.5%"` is taken of the row's own length. A call that continues a shrunk cache
    (`past_key_values=`) appends to it and evicts nothing more. On exit the model is as before.

    An `allocator` splits a row's budget over layers and KV heads instead of giving each head the
    same; `tokenizer` is for methods that repeat or read the prompt.

    Raises UsageError for a budget below the protected tokens, a scorer that needs the future or a
    tokenizer it was not given, counts of an allocator that cannot be kept, a second `evicting`
    around the same model, chunked prefill, `use_cache=False` and caches of another kind; ModelError
    for models kvp cannot evict from.
    """
    check_model(model)
    rule = _rule(scorer, budget, protection, allocator)
    _refuse_future(scorer)
    if rule.budget.count is not None:
        kept_tokens(rule.budget, rule.budget.count + rule.protection.tokens, rule.protection)
    return _Evicting(model, rule, tokenizer)


def _rule(
    scorer: Scorer,
    budget: int | str | Budget,
    protection: Protection | None,
    allocator: Allocator | None,
) -> EvictionRule:
    if not hasattr(scorer, "score"):
        raise UsageError(f"{scorer!r} is no scorer: pass make_scorer(...) or load_policy(...)")
    if allocator is not None and not hasattr(allocator, "allocate"):
        raise UsageError(f"{allocator!r} is no allocator: pass make_allocator(...)")
    return EvictionRule(
        scorer=scorer,
        budget=budget if isinstance(budget, Budget) else parse_budget(budget),
        protection=Protection() if protection is None else protection,
        allocator=allocator,
    )


def _refuse_future(scorer: Scorer) -> None:
    if scorer.needs.future:
        raise UsageError(f"method {scorer.name} needs the future: it only runs on observed traces")


class _Evicting(AbstractContextManager[None]):
    """Swaps in an `EvictingCache` before a prefill and shrinks it afterwards, by module hooks."""

    def __init__(
        self,
        model: PreTrainedModel,
        rule: EvictionRule,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._model = model
        self._rule = rule
        self._tokenizer = tokenizer
        self._used = False
        self._undo = ExitStack()
        self._prefilling: EvictingCache | None = None
        self._padding: list[int] = []
        self._hidden: HiddenRecorder | None = None
        self._recording = ExitStack()  # open while a prefill's hidden states are recorded
        self._shrinking = False
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
        self._recording.close()
        self._undo.close()

    def _before(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._shrinking:  # a scorer's own pass over the prompt
            return args, kwargs
        cache = kwargs.get("past_key_values")
        if cache is None or kwargs.get("use_cache") is False:
            raise UsageError(
                "evicting needs model.generate with use_cache=True (Phi-3 models also drop their "
                "cache when an answer crosses the length where their RoPE changes: shorten it)"
            )
        if type(cache) not in (DynamicCache, EvictingCache):
            raise UsageError(f"evicting cannot shrink a {type(cache).__name__}: pass no cache")
        inputs = kwargs.get("input_ids")
        rows, tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
        if cache.get_seq_length() == 0:
            cache = cache if isinstance(cache, EvictingCache) else EvictingCache()
            self._record(cache, _left_padding(kwargs.get("attention_mask"), rows))
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

    def _record(self, cache: EvictingCache, padding: list[int]) -> None:
        """Watch the prefill of `cache` for what the scorer needs."""
        needs = self._rule.scorer.needs
        cache.recorder = QueryRecorder(needs.queries) if needs.queries else None
        after = recorded_hidden([needs])
        self._hidden = HiddenRecorder(after, padding=padding) if after else None
        self._recording.close()
        if self._hidden is not None:
            self._recording.enter_context(self._hidden.recording(self._model))
        self._prefilling, self._padding = cache, padding

    def _after(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401 - a ModelOutput or a tuple, logits first
    ) -> None:
        cache = self._prefilling
        if cache is None or kwargs["past_key_values"] is not cache:
            return
        self._prefilling = None
        recorder, cache.recorder = cache.recorder, None
        self._recording.close()
        self._prompt_tokens = cache.get_seq_length()
        seen = Observation(
            keys=tuple(layer.keys for layer in cache.layers),
            values=tuple(layer.values for layer in cache.layers),
            queries=() if recorder is None else recorder.queries,
            logits=output[0],
            cache=cache,
            hidden=None if self._hidden is None else self._hidden.record,
        )
        self._shrinking = True
        try:
            evict(
                self._model, seen, self._rule, padding=self._padding,
                input_ids=kwargs.get("input_ids"), tokenizer=self._tokenizer,
            )  # fmt: skip
        finally:
            self._shrinking = False


def _left_padding(mask: Tensor | None, rows: int) -> list[int]:
    """Padding columns of each of `rows` rows; UsageError unless padding is on the left."""
    if mask is None:
        return [0] * rows
    real = mask.bool()
    if real.ndim != 2 or not bool(real[:, -1].all()) or bool((~real[:, 1:] & real[:, :-1]).any()):
        raise UsageError("evicting needs left padding: tokenizer.padding_side = 'left'")
    return (~real).sum(dim=1).tolist()
