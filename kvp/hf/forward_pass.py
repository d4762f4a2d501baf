"""A forward pass inside an `evicting` block: its arguments, and the eviction that follows it.

A pass reads a prompt, a piece of a prompt or a further turn if it feeds several tokens, or if a
`generate` call has not reached the end of its prompt. Eviction follows each such pass. All other
passes write an answer, whose cache is shrunk after every `every` tokens, or never. The ids, mask
and positions of a call tell which tokens are new (`EvictingCache.mark_tokens`, `check_begins`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache import EvictingCache
from kvp.hf.calls import Call
from kvp.hf.hidden_states import HiddenRecorder
from kvp.hf.model_checks import check_mode
from kvp.hf.model_config import rope_switch
from kvp.hf.prefill import Prefill, recorded_hidden
from kvp.hf.shrink import EvictionRule, check_repeatable, shrink, shrink_again
from kvp.hf.visibility import RIGHT_PADDED, continue_positions, count_left_padding
from kvp.protection import budget_tokens
from kvp.scoring import needs_of


@dataclass(kw_only=True)
class ForwardPass:
    """What the eviction after a forward pass needs to know about the pass."""

    input_ids: Tensor
    """[B, T]."""
    cache: EvictingCache
    real: Tensor
    """[B, N + T] bool: columns seen and fed that are no padding."""
    is_prompt: bool
    padding: list[int] | None = None
    """Columns of left padding of each entry, where the cache was empty before."""
    hidden: HiddenRecorder | None = None

    @property
    def seen(self) -> int:
        """Columns that the cache had seen before, N."""
        return self.real.shape[1] - self.input_ids.shape[1]


def prepare_pass(
    model: PreTrainedModel, call: Call, kwargs: dict[str, Any], parameters: Collection[str]
) -> ForwardPass:
    """Change the arguments of a forward pass, in place, so that it uses an evicting cache.

    `parameters` are those of the model's `forward`. UsageError for arguments `evicting` refuses.
    """
    input_ids = kwargs["input_ids"]
    batch, tokens = batch_shape(input_ids)
    if _option(model, kwargs, "output_attentions"):
        raise UsageError(
            "inside evicting(...) no attention weights exist: pass output_attentions=False"
        )
    cache = _cache_of_pass(model, call, kwargs, tokens)
    if not tokens:
        raise UsageError("evicting needs a prompt of at least one token, this one is empty")
    if tokens > 1 or model.training:
        check_mode(model)
    cache.check_batch(batch)
    seen = cache.get_seq_length()
    real = cache.mark_tokens(kwargs.get("attention_mask"), batch, tokens).to(input_ids.device)
    _set_mask_and_positions(kwargs, parameters, real, seen)
    kwargs |= {"past_key_values": cache, "use_cache": True}
    if seen and real.shape[1] == call.prompt_end and not bool(real[:, -1].all()):
        raise UsageError(RIGHT_PADDED)
    if call.prompt_end and call.cache is None:
        call.cache = cache
    is_prompt = tokens > 1 or not seen or (call.cache is cache and seen < call.prompt_end)
    return ForwardPass(input_ids=input_ids, cache=cache, real=real, is_prompt=is_prompt)


def batch_shape(input_ids: Tensor) -> tuple[int, int]:
    """Entries B and tokens T of ids [B, T]; UsageError for anything else."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        given = (
            tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise UsageError(f"a prompt is a tensor [rows, tokens], not {given}: pass ids[None]")
    return input_ids.shape[0], input_ids.shape[1]


def count_prompt_end(model: PreTrainedModel, arguments: dict[str, Any]) -> int:
    """Tokens that the cache of a `generate` call has seen when its prompt has been read.

    Raises UsageError where transformers would cut other tokens off the prompt than those seen.
    """
    names = ("inputs", "input_ids", "attention_mask", "past_key_values")
    inputs, ids, mask, cache = (arguments.get(name) for name in names)
    prompt = inputs if ids is None else ids
    if prompt is None:  # transformers begins with a token of its own
        return 1
    batch, tokens = batch_shape(prompt)
    if not isinstance(cache, Cache) or not cache.get_seq_length():
        EvictingCache().mark_tokens(mask, batch, tokens)
        return tokens
    cache = EvictingCache.adopt(cache, model.config)
    end = int(cache.get_seq_length()) + tokens
    if mask is not None and mask.shape[-1] == end:
        return end  # the new tokens alone
    cache.check_begins(prompt, mask)
    return tokens


def _set_mask_and_positions(
    kwargs: dict[str, Any], parameters: Collection[str], real: Tensor, seen: int
) -> None:
    """Set mask and positions of a pass from `real`; UsageError where the call gives others."""
    positions = continue_positions(None, real)[:, seen:]  # [B, T]
    position_ids = kwargs.get("position_ids")
    if isinstance(position_ids, Tensor) and position_ids.ndim == positions.ndim:
        same = position_ids.shape[-1] == positions.shape[-1]
        if not same or bool(((position_ids.to(real.device) != positions) & real[:, seen:]).any()):
            raise UsageError(
                f"position_ids are not those of the tokens that come after the {seen} seen: "
                "leave position_ids and prefill_chunk_size out"
            )
    padded = not bool(real.all())
    if "attention_mask" in parameters:
        kwargs["attention_mask"] = real.long() if padded else None
    if padded and "position_ids" in parameters and position_ids is None:
        kwargs["position_ids"] = positions


def _cache_of_pass(
    model: PreTrainedModel, call: Call, kwargs: dict[str, Any], tokens: int
) -> EvictingCache:
    """The cache of a forward pass over `tokens` tokens; a new one if the call has none."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        switch, latest = rope_switch(model.config), call.cache
        cached = 0 if switch is None or latest is None else latest.get_seq_length()
        if cached and tokens in (1, cached + 1):  # before 5.20 transformers then feeds one token
            raise UsageError(
                f"this model changes its RoPE after {switch} tokens and drops the cache when "
                "an answer crosses that: shorten prompt and answer, or use a longer prompt"
            )
    if not _option(model, kwargs, "use_cache"):
        raise UsageError("evicting needs a cache: call the model with use_cache=True")
    config = model.config
    return EvictingCache.of(config) if cache is None else EvictingCache.adopt(cache, config)


def _option(model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> object:
    """The value that a call gives, else that of the model's configuration."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, name, None) if kwargs.get(name) is None else kwargs[name]


@dataclass(frozen=True, kw_only=True)
class Evictor:
    """Shrinks the cache of each pass of a model by one rule: after prompts, and in answers."""

    model: PreTrainedModel
    rule: EvictionRule
    tokenizer: PreTrainedTokenizerBase | None
    every: int | None = None
    """Tokens of an answer after which its cache is shrunk again; None: never."""

    def begin(self, this_pass: ForwardPass) -> None:
        """Before a pass: set up the recording of what the scorer reads of it."""
        cache, needs, seen = this_pass.cache, needs_of(self.rule.scorer), this_pass.seen
        if not seen:
            padding = this_pass.padding = count_left_padding(this_pass.real)
            cache.recorder = None
            if after := recorded_hidden([needs]):
                this_pass.hidden = HiddenRecorder(after, padding=padding, every=needs.every_state)
        elif this_pass.is_prompt:
            check_repeatable(self.rule)
        elif self.every is not None and cache.prompt_tokens is None:  # made outside of a block
            cache.end_prompt()
        cache.begun_at = seen
        if not this_pass.is_prompt and self.every is None:
            return
        if not needs.queries:
            cache.recorder = None
        elif cache.recorder is None:
            cache.recorder = QueryRecorder(needs.queries)
        else:  # those of another block go on
            cache.recorder.window = needs.queries

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, this_pass: ForwardPass) -> None:
        """After a pass: shrink its cache, if that is due."""
        cache, rule, read = this_pass.cache, self.rule, this_pass.real.shape[1]
        cache.begun_at = None
        cache.add_ids(this_pass.input_ids, this_pass.real)
        if this_pass.is_prompt:
            cache.end_prompt()
        elif self.every is None or read < cache.shrunk_at + self.every:
            return
        counts = cache.prompt_tokens or ()
        budgets = [budget_tokens(rule.budget, tokens, rule.protection) for tokens in counts]
        if this_pass.padding is not None:
            whole = Prefill.of(cache, this_pass.hidden)
            whole = whole.with_inputs(self.model, this_pass.input_ids, self.tokenizer)
            shrink(whole, rule, padding=this_pass.padding, budgets=budgets)
        else:
            shrink_again(cache, rule, budgets, [0] * cache.batch if this_pass.is_prompt else counts)
            cache.shrunk_at = read
        if self.every is None:
            cache.recorder = None
        elif cache.recorder is not None:  # single tokens will be followed by more
            cache.recorder.forget()
