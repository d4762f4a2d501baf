"""Compress the KV cache of a model after its prefill; every method is applied this way.

`evicting` wraps an unmodified `model.generate`: the first new token still comes from full
attention, as in the KVP paper. Tokens that are fed to the cache of `prefill_and_evict` see the kept
tokens only, also the last one of a prompt, which the method has seen before.

Inside a block every forward pass of the model gets an `EvictingCache` and is followed by eviction.
Passes of `generate` up to the end of its prompt, and others of several tokens, are a prompt, a
piece of one or a further turn, and eviction follows them; all others are an answer, and eviction
follows every `every` of its tokens, or never. Which tokens are new is told by the ids, mask and
positions of a call together (`EvictingCache.mark_tokens`, `check_begins`). `kvp.hf.calls` decides
which calls go to a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.budgets import Budget, parse_budget
from kvp.errors import UsageError
from kvp.geometry import check_geometry
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache import EvictingCache, PromptState
from kvp.hf.calls import OPEN, Call, calling, install_dispatch, refuse_inside_block
from kvp.hf.hidden_states import HiddenRecorder
from kvp.hf.kept import Kept
from kvp.hf.model_access import unwrap_model
from kvp.hf.model_checks import check_mode, check_model
from kvp.hf.model_config import geometry_of, rope_switch
from kvp.hf.model_identity import warn_of_another_model
from kvp.hf.prefill import Prefill, prefill, recorded_hidden
from kvp.hf.scorer_inputs import check_inputs, reads_text
from kvp.hf.shrink import EvictionRule, check_repeatable, shrink, shrink_again
from kvp.hf.visibility import RIGHT_PADDED, count_left_padding, count_on
from kvp.plugins import instance_of
from kvp.ranking import Allocator, Protection, budget_tokens, kept_tokens, protection_of
from kvp.scoring import Needs, Scorer, check_allocator, check_scorer


def prefill_and_evict(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | str | None = None,
    *,
    allocator: str | Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    fed_again: int = 0,
) -> EvictingCache:
    """Prefill `input_ids` [B, T] int64 (no padding) and keep `budget` tokens per KV head.

    The cache has seen the first N = T - `fed_again` tokens; feed the rest afterwards. With a whole
    prompt pass `fed_again=1`, so that the method sees the query of its last token; leave out what
    it is not to see, such as a question. A budget of N or more keeps all N tokens. All else is as
    for `evicting`; `kvp.hf.kept.Kept(cache)` says what stayed.

    Raises as `evicting` does; UsageError also where `fed_again` leaves no token, and inside an
    `evicting` block of the same model.
    """
    model, rule = _prepare_rule(model, scorer, budget, protection, allocator, tokenizer)
    batch, tokens = _shape(input_ids)
    if not 0 <= fed_again < tokens:
        raise UsageError(f"fed_again must be 0 to {tokens - 1} of {tokens} tokens, got {fed_again}")
    cached = tokens - fed_again
    kept = kept_tokens(rule.budget, cached, rule.protection)
    needs = rule.scorer.needs if rule.allocator is not None or kept < cached else Needs()
    seen = prefill(model, input_ids, needs, tokenizer=tokenizer, fed_again=fed_again)
    shrink(
        model, seen, rule, padding=[0] * batch, input_ids=input_ids, tokenizer=tokenizer,
        budgets=[kept] * batch,
    )  # fmt: skip
    seen.cache.ids = input_ids[:, :cached]
    return seen.cache


def evicting(
    model: PreTrainedModel,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | str | None = None,
    *,
    allocator: str | Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    every: int | None = None,
) -> AbstractContextManager[Kept]:
    """Make calls of `model` compress their caches to `budget` tokens per KV head after the prompt.

    Use as `with evicting(...) as kept:`, once; `kept` says and draws what the latest call's cache
    holds and saves (`kvp.hf.kept.Kept`). Calls may be several, `generate` and plain ones, with
    left-padded batches, sampling or beams, in pieces (`prefill_chunk_size`), and go on from a
    compressed cache (`past_key_values=`), which is compressed again. A block holds for the context
    that entered it, and for threads that run in a copy of that (`contextvars.copy_context().run`);
    other calls of the model are refused while it is open. docs/serving.md has all rules.

    A percentage such as `"12.5%"` is of the tokens read so far, and keeps the protected tokens at
    least: the first 4 and the last 16, none with `protection="off"`. An `allocator` splits a
    prompt's budget over layers and heads. `tokenizer` is for methods that repeat or read the
    prompt. A scorer or allocator that is given as a class is made with its defaults. `kvp.evicting`
    takes names, too: `scorer` may be "snapkv(kernel=31)+ada", as --methods has it, or "nano" or
    "runs/policy", as `load_policy` has it. `every`: compress again after so many tokens of the
    answer, so that no head of a uniform budget holds more than budget + every.

    Raises UsageError for budgets below the protected tokens, scorers that need the future or a
    tokenizer, counts that cannot be kept, a second block of the same model, prompts that do not go
    on from what their cache has seen, masks and positions that do not fit it, `use_cache=False`,
    `output_attentions`, other caches (static, offloaded, quantised), assisted decoding, continuous
    batching, `inputs_embeds`, and methods that read a whole prompt where a cache is compressed
    again; ModelError for models kvp cannot evict from, or that lack what the scorer reads, and for
    adapters outside of a model's modules, such as soft prompts. Warns of a policy trained on
    another model.
    """
    model, rule = _prepare_rule(model, scorer, budget, protection, allocator, tokenizer)
    if every is not None:
        if every < 1:
            raise UsageError(f"every must be at least 1 token, got {every}")
        check_repeatable(rule)
    return EvictingBlock(model, rule, tokenizer, every=every)


def _prepare_rule(
    model: PreTrainedModel, scorer: str | Scorer | type[Scorer], budget: int | str | Budget,
    protection: Protection | str | None, allocator: str | Allocator | type[Allocator] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, EvictionRule]:  # fmt: skip
    """The model inside its wrappers, and the rule, when both fit together; warns as `evicting`."""
    model = unwrap_model(model)
    refuse_inside_block(model)
    made = instance_of(scorer, f"scorer {getattr(scorer, '__name__', 'scorer')}")
    made_scorer = check_scorer(made, repr(scorer), "; pass make_scorer(...) or load_policy(...)")
    made_allocator: Any = instance_of(
        allocator, f"allocator {getattr(allocator, '__name__', 'allocator')}"
    )
    if allocator is not None:
        check_allocator(made_allocator, repr(allocator), "; pass make_allocator(...)")
    needs, method = made_scorer.needs, f"method {made_scorer.name}"
    if needs.future:
        raise UsageError(f"{method} needs the future: it only runs on observed traces")
    if tokenizer is None and reads_text(needs):
        raise UsageError(
            f"{method} reads or repeats the prompt's text: pass tokenizer=, the second "
            "thing that load_model returns"
        )
    rule = EvictionRule(
        scorer=made_scorer, allocator=made_allocator,
        budget=parse_budget(budget), protection=protection_of(protection),
    )  # fmt: skip
    with calling(model):  # left alone, also where another thread is in a block
        check_model(model)
        check_inputs(model, [made_scorer])
    check_geometry(made_scorer, geometry_of(model.config), made_allocator)
    warn_of_another_model(model, made_scorer)
    return model, rule


@dataclass(kw_only=True)
class _Pass:
    """What the eviction after a forward pass has to know of it."""

    fed: Tensor
    """Ids [B, T]."""
    cache: EvictingCache
    real: Tensor
    """[B, N + T] bool: columns seen and fed that are no padding."""
    is_prompt: bool
    padding: list[int] | None = None
    """Columns of left padding of each entry, where the cache was empty before."""
    hidden: HiddenRecorder | None = None


@dataclass(eq=False)
class EvictingBlock(AbstractContextManager[Kept]):
    """Gives passes of the model an `EvictingCache` and shrinks it after prompts, and in answers."""

    model: PreTrainedModel
    rule: EvictionRule
    tokenizer: PreTrainedTokenizerBase | None
    every: int | None = None
    _open: ExitStack | None = field(init=False, default=None)

    def __enter__(self) -> Kept:
        refuse_inside_block(self.model)
        if self._open is not None:
            raise UsageError("an evicting(...) block cannot be entered twice: call evicting again")
        self._names = list(inspect.signature(self.model.forward).parameters)
        kept = Kept(budget=self.rule.budget)
        self._kept = ref(kept)  # so that a cache which nobody asks about is freed as ever
        self._open = ExitStack()
        self._open.enter_context(install_dispatch(self.model))
        call = self._open.enter_context(calling(self.model, self))
        OPEN.append(call)
        self._open.callback(OPEN.remove, call)
        return kept

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._open is not None
        self._open.close()

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def forward(self, run: Callable[..., Any], call: Call, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """A pass of the model, `run`, with an evicting cache and an eviction after it."""
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        if kwargs.get("inputs_embeds") is not None:
            raise UsageError("inside evicting(...) pass input_ids, not inputs_embeds")
        fed = kwargs.get("input_ids")
        step = None if fed is None else self._begin(call, kwargs, fed)
        with install_dispatch(self.model), calling(self.model):  # a method's passes are left alone
            if step is None:
                return run(**kwargs)  # which says what is missing
            try:
                with step.hidden.recording(self.model) if step.hidden else nullcontext():
                    output = run(**kwargs)
                self._end(step)
            except BaseException:
                step.cache.recorder = None
                raise
        return output

    def generate(self, run: Callable[..., Any], _: Call, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """`generate(...)`, after which `kept` tells of the answer's cache alone."""
        given = {**dict(zip(("inputs",), args, strict=False)), **kwargs}
        stop = self._prompt_end(given)
        with install_dispatch(self.model), calling(self.model, self, stop=stop):
            return run(*args, **kwargs)

    def _prompt_end(self, given: dict[str, Any]) -> int:
        """Tokens that the cache of a `generate` call has seen when its prompt has been read.

        Raises UsageError where transformers would cut others off the prompt than those seen.
        """
        names = ("inputs", "input_ids", "attention_mask", "past_key_values")
        inputs, ids, mask, cache = (given.get(name) for name in names)
        fed = inputs if ids is None else ids
        if fed is None:  # transformers begins with a token of its own
            return 1
        rows, tokens = _shape(fed)
        if not isinstance(cache, Cache) or not cache.get_seq_length():
            EvictingCache().mark_tokens(mask, rows, tokens)
            return tokens
        cache = self._adopt_cache(cache)
        stop = int(cache.get_seq_length()) + tokens
        if mask is not None and mask.shape[-1] == stop:
            return stop  # the new tokens alone
        cache.check_begins(fed, mask)
        return tokens

    def init_continuous_batching(self, *_: object, **__: object) -> NoReturn:
        """Raise UsageError: its paged cache shares blocks between requests."""
        raise UsageError(
            "evicting cannot shrink the paged cache of continuous batching (generate_batch): call "
            "model.generate"
        )

    def _get_candidate_generator(self, *_: object, **__: object) -> NoReturn:
        """Raise UsageError, before a draft is made: rejected tokens would be taken back."""
        raise UsageError(
            "inside evicting(...) no cache can be rolled back: leave assistant_model, "
            "assistant_early_exit and prompt_lookup_num_tokens out"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, call: Call, kwargs: dict[str, Any], fed: Tensor) -> _Pass:
        """Turn `kwargs` into those of a pass over `fed`."""
        model, (rows, tokens) = self.model, _shape(fed)
        if self._option(kwargs, "output_attentions"):
            raise UsageError(
                "inside evicting(...) no attention weights exist: pass output_attentions=False"
            )
        cache = self._cache_of_pass(call, kwargs, tokens)
        if not tokens:
            raise UsageError("evicting needs a prompt of at least one token, this one is empty")
        if tokens > 1 or model.training:
            check_mode(model)
        cache.check_rows(rows)
        seen = cache.get_seq_length()
        real = cache.mark_tokens(kwargs.get("attention_mask"), rows, tokens).to(fed.device)
        self._set_mask_and_positions(kwargs, real, seen)
        kwargs |= {"past_key_values": cache, "use_cache": True}
        if seen and real.shape[1] == call.stop and not bool(real[:, -1].all()):
            raise UsageError(RIGHT_PADDED)
        if call.stop and call.cache is None:
            call.cache = cache
        if (kept := self._kept()) is not None and (call.cache is cache or not call.stop):
            kept.cache = cache
        is_prompt = tokens > 1 or not seen or (call.cache is cache and seen < call.stop)
        step = _Pass(fed=fed, cache=cache, real=real, is_prompt=is_prompt)
        self._record_needs(step, seen)
        cache.begun_at = seen
        return step

    def _record_needs(self, step: _Pass, seen: int) -> None:
        """Record what the scorer reads from a pass after `seen` tokens."""
        cache, needs = step.cache, self.rule.scorer.needs
        if not seen:
            step.padding, cache.recorder = count_left_padding(step.real), None
            if after := recorded_hidden([needs]):
                step.hidden = HiddenRecorder(after, padding=step.padding, every=needs.every_state)
        elif step.is_prompt:
            check_repeatable(self.rule)
        elif self.every is None:
            return
        elif cache.prompt_state is None:  # made outside of a block
            cache.prompt_state = _prompt_state(cache)
        if not needs.queries:
            cache.recorder = None
        elif cache.recorder is None:
            cache.recorder = QueryRecorder(needs.queries)
        else:  # those of another block go on
            cache.recorder.window = needs.queries

    def _set_mask_and_positions(self, kwargs: dict[str, Any], real: Tensor, seen: int) -> None:
        """Give a pass its mask and positions, by one rule for all that call the model.

        `real` is as of `_Pass`. Raises UsageError where the positions given are others.
        """
        positions = count_on(None, real)[:, seen:]  # [B, T]
        given = kwargs.get("position_ids")
        if isinstance(given, Tensor) and given.ndim == positions.ndim:
            same = given.shape[-1] == positions.shape[-1]
            if not same or bool(((given.to(positions.device) != positions) & real[:, seen:]).any()):
                raise UsageError(
                    f"position_ids are not those of the tokens that come after the {seen} seen: "
                    "leave position_ids and prefill_chunk_size out"
                )
        padded = not bool(real.all())
        if "attention_mask" in self._names:
            kwargs["attention_mask"] = real.long() if padded else None
        if padded and "position_ids" in self._names and given is None:
            kwargs["position_ids"] = positions

    def _cache_of_pass(self, call: Call, kwargs: dict[str, Any], tokens: int) -> EvictingCache:
        """The cache of a forward pass over `tokens` tokens, made anew where it may be."""
        config, cache = self.model.config, kwargs.get("past_key_values")
        if cache is None:
            switch, latest = rope_switch(config), call.cache
            known = 0 if switch is None or latest is None else latest.get_seq_length()
            if known and tokens in (1, known + 1):  # before 5.20 transformers then feeds one token
                raise UsageError(
                    f"this model changes its RoPE after {switch} tokens and drops the cache when "
                    "an answer crosses that: shorten prompt and answer, or use a longer prompt"
                )
        if not self._option(kwargs, "use_cache"):
            raise UsageError("evicting needs a cache: call the model with use_cache=True")
        return EvictingCache.of(config) if cache is None else self._adopt_cache(cache)

    def _option(self, kwargs: dict[str, Any], name: str) -> Any:  # noqa: ANN401
        """What a call says, or else the model's configuration."""
        config = self.model.config.get_text_config(decoder=True)
        return getattr(config, name, None) if kwargs.get(name) is None else kwargs[name]

    def _adopt_cache(self, cache: Any) -> EvictingCache:  # noqa: ANN401
        """`cache` itself, made an evicting one where it is empty; UsageError for a context's."""
        if isinstance(cache, EvictingCache) and (cache.ids is not None or not cache.evicted):
            return cache
        offloading = " with offloading" if getattr(cache, "offloading", False) else ""
        if type(cache) not in (DynamicCache, EvictingCache) or offloading:
            raise UsageError(
                f"evicting cannot shrink a {type(cache).__name__}{offloading}: pass neither "
                "past_key_values nor cache_implementation"
            )
        if cache.get_seq_length() > 0:
            raise UsageError(
                "past_key_values was filled outside of evicting(...): pass the whole prompt"
            )
        return EvictingCache.adopt(cache, self.model.config)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, step: _Pass) -> None:
        """Shrink the cache of a pass that has been made, where that is due."""
        cache, rule, read = step.cache, self.rule, step.real.shape[1]
        cache.begun_at, state = None, cache.prompt_state
        cache.add_ids(step.fed, step.real)
        if step.is_prompt:
            state = cache.prompt_state = _prompt_state(cache)
        elif self.every is None or state is None or read < state.shrunk_at + self.every:
            return
        counts = state.prompt_tokens
        budgets = [budget_tokens(rule.budget, tokens, rule.protection) for tokens in counts]
        if step.padding is not None:
            shrink(
                self.model, Prefill.of(cache, step.hidden), rule,
                padding=step.padding, budgets=budgets, input_ids=step.fed,
                tokenizer=self.tokenizer,
            )  # fmt: skip
        else:
            shrink_again(cache, rule, budgets, [0] * cache.batch if step.is_prompt else counts)
            cache.prompt_state = replace(state, shrunk_at=cache.get_seq_length())
        if self.every is None:
            cache.recorder = None
        elif cache.recorder is not None:  # single tokens will be followed by more
            cache.recorder.forget()


def _shape(fed: Tensor) -> tuple[int, int]:
    if fed.ndim != 2:
        raise UsageError(f"a prompt is [rows, tokens], not {tuple(fed.shape)}: pass ids[None]")
    return fed.shape[0], fed.shape[1]


def _prompt_state(cache: EvictingCache) -> PromptState:
    return PromptState(prompt_tokens=tuple(cache.lengths), shrunk_at=cache.get_seq_length())
