"""The hooks behind `evicting`: an `EvictingCache` before a prefill, eviction after it.

What a call needs between its two hooks belongs to the call, by thread: several threads may generate
inside one block. Hooks are hidden from torch.compile.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from threading import get_ident, local
from types import TracebackType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, kvp_attention_set
from kvp.hf.cache import EvictingCache
from kvp.hf.evict import EvictionRule, evict
from kvp.hf.hidden import HiddenRecorder
from kvp.hf.limits import rope_switch
from kvp.hf.observe import Observation
from kvp.hf.prefill import recorded_hidden
from kvp.hf.wrappers import refuse_inside_block

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(kw_only=True)
class _Call:
    """A prefill between its two hooks."""

    cache: EvictingCache
    padding: list[int]
    hidden: HiddenRecorder | None
    recording: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        self.cache.recorder = None
        self.recording.close()


class _Thread(local):
    """State of one thread inside a block."""

    evicting = False
    """True while scorers run: their own passes over the prompt are left alone."""
    latest: ReferenceType[EvictingCache] | None = None
    """The cache of the latest forward pass."""


class EvictingBlock(AbstractContextManager[None]):
    """Swaps in an `EvictingCache` before a prefill and shrinks it afterwards, by module hooks."""

    def __init__(
        self,
        model: PreTrainedModel,
        rule: EvictionRule,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        """Prepare the block; `__enter__` changes the model."""
        self._model = model
        self._rule = rule
        self._tokenizer = tokenizer
        self._names = list(inspect.signature(model.forward).parameters)
        self._used = False
        self._undo = ExitStack()
        self._thread = _Thread()
        self._calls: dict[int, _Call] = {}  # by thread

    def __enter__(self) -> None:
        refuse_inside_block(self._model)
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
        self._undo.close()
        failed = self._calls.pop(get_ident(), None)  # a prefill that failed
        if failed is not None:
            failed.close()
        if self._calls and error is None:
            raise UsageError(
                "a generate call of another thread was still in its prefill when the evicting(...) "
                "block ended: wait for the threads before leaving the block"
            )

    @property
    def evicting_here(self) -> bool:
        """True while this thread's scorers run."""
        return self._thread.evicting

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:
        if self._thread.evicting:
            return args, kwargs
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
            raise UsageError(
                "inside evicting(...) no attention weights exist: pass output_attentions=False"
            )
        inputs = kwargs.get("input_ids")
        batch, tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
        cache = self._evicting_cache(kwargs, tokens)
        if cache.get_seq_length() == 0:
            self._record(cache, _left_padding(kwargs.get("attention_mask"), batch))
        elif tokens > 1 and cache.get_seq_length() == cache.prompt_tokens:
            raise UsageError(
                "the prompt arrives in pieces, but eviction follows the first one: generate with "
                "prefill_chunk_size=None and without an assistant model"
            )
        self._thread.latest = ref(cache)
        return (), {**kwargs, "past_key_values": cache}

    def _evicting_cache(self, kwargs: dict[str, Any], tokens: int) -> EvictingCache:
        """The cache of a forward pass over `tokens` tokens, made anew where it may be."""
        cache = kwargs.get("past_key_values")
        if cache is None:
            latest = None if self._thread.latest is None else self._thread.latest()
            switch = rope_switch(self._model.config)
            if switch is not None and latest is not None and latest.get_seq_length() == tokens - 1:
                raise UsageError(
                    f"this model changes its RoPE after {switch} tokens and drops the cache when "
                    "an answer crosses that: shorten prompt and answer, or use a longer prompt"
                )
            if kwargs.get("use_cache") is not True:
                raise UsageError("evicting needs a cache: call model.generate with use_cache=True")
            return EvictingCache.of(self._model.config)
        if kwargs.get("use_cache") is False:
            raise UsageError("evicting needs a cache: call model.generate with use_cache=True")
        if isinstance(cache, EvictingCache):
            return cache
        kind = type(cache).__name__
        if getattr(cache, "offloading", False):
            kind = f"{kind} with offloading"
        if type(cache) is not DynamicCache or kind != "DynamicCache":
            raise UsageError(f"evicting cannot shrink a {kind}: pass no cache")
        if cache.get_seq_length() > 0:
            raise UsageError(
                "past_key_values was filled outside of evicting(...): pass the whole prompt"
            )
        return EvictingCache.adopt(cache, self._model.config)

    def _record(self, cache: EvictingCache, padding: list[int]) -> None:
        """Watch the prefill of `cache` for what the scorer needs."""
        needs = self._rule.scorer.needs
        after = recorded_hidden([needs])
        call = _Call(
            cache=cache,
            padding=padding,
            hidden=HiddenRecorder(after, padding=padding) if after else None,
        )
        failed = self._calls.pop(get_ident(), None)
        if failed is not None:
            failed.close()
        cache.recorder = QueryRecorder(needs.queries) if needs.queries else None
        if call.hidden is not None:
            call.recording.enter_context(call.hidden.recording(self._model))
        self._calls[get_ident()] = call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,  # noqa: ANN401 - a ModelOutput or a tuple, logits first
    ) -> None:
        if self._thread.evicting or get_ident() not in self._calls:
            return
        call = self._calls.pop(get_ident())
        cache, recorder = call.cache, call.cache.recorder
        call.close()
        cache.prompt_tokens = cache.get_seq_length()
        seen = Observation(
            keys=tuple(layer.keys for layer in cache.stored.values()),
            values=tuple(layer.values for layer in cache.stored.values()),
            queries=() if recorder is None else recorder.queries,
            logits=output[0],
            cache=cache,
            hidden=None if call.hidden is None else call.hidden.record,
            others=cache.others,
        )
        self._thread.evicting = True
        try:
            evict(
                self._model, seen, self._rule, padding=call.padding,
                input_ids=kwargs.get("input_ids"), tokenizer=self._tokenizer,
            )  # fmt: skip
        finally:
            self._thread.evicting = False


def _left_padding(mask: Tensor | None, batch: int) -> list[int]:
    """Padding columns of each of `batch` prompts; UsageError unless padding is on the left."""
    if mask is None:
        return [0] * batch
    real = mask.bool()
    if real.ndim != 2 or not bool(real[:, -1].all()) or bool((~real[:, 1:] & real[:, :-1]).any()):
        raise UsageError("evicting needs left padding: tokenizer.padding_side = 'left'")
    return (~real).sum(dim=1).tolist()
