"""Compress the KV cache of a model after its prefill; every method is applied this way.

`evicting` wraps an unmodified `model.generate`; the cache is compressed right after the prefill, so
the first new token still comes from full attention (as in the KVP paper). On request it also
compresses while the model answers, and between the pieces of a long prompt. `prefill_and_evict`
returns the compressed cache: the tokens that are fed next attend to the kept tokens only, also the
last token of a prompt, which the method has seen before. New tokens are appended to it.

Behind `evicting` are two module hooks, hidden from torch.compile: an `EvictingCache` before a
forward pass, eviction after it. Tokens that come several at a time are a prompt, a piece of one or
a further turn, and eviction follows them; single ones are an answer, and eviction follows every so
many of them, or never. What a call needs between its two hooks belongs to the call, by thread:
several threads may generate inside one block.

A block holds for the thread or asyncio task that entered it, and for the threads, tasks and calls
of a ThreadPoolExecutor that are started inside it; other calls are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache as computed_once
from functools import partial, wraps
from threading import Thread, get_ident, local
from threading import enumerate as living_threads
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.budgets import MOST, Budget, parse_budget
from kvp.errors import UsageError
from kvp.hf.attention import ATTENTIONS, QueryRecorder, Undo, kvp_attention_set, share_change
from kvp.hf.cache import EvictingCache, Turn
from kvp.hf.evict import EvictionRule, check_repeatable, evict, evict_again
from kvp.hf.kept import Kept
from kvp.hf.model_access import check_mode, check_model, warn_of_another_model
from kvp.hf.model_config import rope_switch
from kvp.hf.prefill import (
    Prefill,
    block_here,
    prefill,
    recorded_hidden,
    refuse_inside_block,
    unwrap_model,
)
from kvp.hf.scorer_inputs import HiddenRecorder, check_inputs, reads_text
from kvp.plugins import instance_of
from kvp.ranking import Allocator, Protection, budget_tokens, kept_tokens
from kvp.scoring import Needs, Scorer


def prefill_and_evict(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | None = None,
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
    inner = unwrap_model(model)
    model, rule = _prepare_rule(inner, scorer, budget, protection, allocator, tokenizer)
    batch, tokens = input_ids.shape
    if not 0 <= fed_again < tokens:
        raise UsageError(f"fed_again must be 0 to {tokens - 1} of {tokens} tokens, got {fed_again}")
    cached = tokens - fed_again
    kept = kept_tokens(rule.budget, cached, rule.protection)
    needs = rule.scorer.needs if rule.allocator is not None or kept < cached else Needs()
    seen = prefill(model, input_ids, needs, tokenizer=tokenizer, fed_again=fed_again)
    evict(
        model, seen, rule, padding=[0] * batch, input_ids=input_ids, tokenizer=tokenizer,
        budgets=[kept] * batch,
    )  # fmt: skip
    return seen.cache


def evicting(
    model: PreTrainedModel,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | None = None,
    *,
    allocator: str | Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    every: int | None = None,
) -> AbstractContextManager[Kept]:
    """Make `model.generate` compress its cache to `budget` tokens per KV head after every prefill.

    Use as `with evicting(...) as kept:`, once; `kept` says and draws what the latest call's cache
    holds and saves (`kvp.hf.kept.Kept`). Calls may be several, in threads that are started inside
    (wait for them there), with left-padded batches, sampling or beams; each prompt's tokens are
    chosen for itself. Other calls of the model are left alone. A percentage such as `"12.5%"` is of
    the prompt, and keeps the protected tokens at least (`protection`: the first 4 and the last 16).
    An `allocator` splits a prompt's budget over layers and heads. `tokenizer` is for methods that
    repeat or read the prompt. Of a class of scorers or allocators an object with its defaults is
    made. `kvp.evicting` takes names, too: `scorer` may be "snapkv(kernel=31)+ada", as --methods has
    it, or "nano" or "runs/policy", as `load_policy` has it. On exit the model is as before.

    A call that goes on from a compressed cache (`past_key_values=`) compresses it again once the
    new turn has been read; a percentage is of all tokens seen by then. `every`: compress again
    after so many tokens of the answer, so that no head of a uniform budget holds more than
    budget + every. With transformers' own `prefill_chunk_size` prompts are read in pieces, with
    eviction after each; scorers then see what is still stored, and a percentage is of what was read
    so far.

    Models inside torch.compile or PEFT are found. Those loaded with `eager` attention compute
    eagerly inside, all others by torch's `scaled_dot_product_attention`.

    Raises UsageError for budgets below the protected tokens, scorers that need the future or a
    tokenizer, counts that cannot be kept, a second block of the same model, `use_cache=False`,
    `output_attentions`, other caches (static, offloaded, quantised), assisted decoding, continuous
    batching, and methods that read a whole prompt where a cache is compressed again; ModelError for
    models kvp cannot evict from, or that lack what the scorer reads. Warns of a policy trained on
    another model.
    """
    model, rule = _prepare_rule(model, scorer, budget, protection, allocator, tokenizer)
    if every is not None:
        if every < 1:
            raise UsageError(f"every must be at least 1 token, got {every}")
        check_repeatable(rule)
    return EvictingBlock(model, rule, tokenizer, every=every)


def _prepare_rule(
    model: PreTrainedModel,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | None,
    allocator: str | Allocator | type[Allocator] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[PreTrainedModel, EvictionRule]:
    """The model inside its wrappers, and the rule, when both fit together; warns as `evicting`."""
    model = unwrap_model(model, called=True)
    refuse_inside_block(model)
    ranks: Any = instance_of(scorer, f"scorer {getattr(scorer, '__name__', 'scorer')}")
    splits: Any = instance_of(allocator, f"allocator {getattr(allocator, '__name__', 'allocator')}")
    if not hasattr(ranks, "score"):
        raise UsageError(f"{scorer!r} is no scorer: pass make_scorer(...) or load_policy(...)")
    if splits is not None and not hasattr(splits, "allocate"):
        raise UsageError(f"{allocator!r} is no allocator: pass make_allocator(...)")
    if not isinstance(protection, Protection | None):
        raise UsageError(f"protection={protection!r} is no Protection(sinks=..., recents=...)")
    if ranks.needs.future:
        raise UsageError(f"method {ranks.name} needs the future: it only runs on observed traces")
    if tokenizer is None and reads_text(ranks.needs):
        raise UsageError(
            f"method {ranks.name} reads or repeats the prompt's text: pass tokenizer=, the second "
            "thing that load_model returns"
        )
    rule = EvictionRule(
        scorer=ranks,
        budget=parse_budget(budget),
        protection=Protection() if protection is None else protection,
        allocator=splits,
    )
    kept_tokens(rule.budget, MOST, rule.protection)  # refuses before any prefill
    check_model(model)
    check_inputs(model, [ranks])
    warn_of_another_model(model, ranks)
    return model, rule


@dataclass(kw_only=True)
class _Call:
    """A forward pass over several tokens, between its two hooks."""

    cache: EvictingCache
    padding: list[int] | None
    """Columns of left padding of each entry, where the cache was empty before."""
    hidden: HiddenRecorder | None = None
    recording: ExitStack = field(default_factory=ExitStack)


class _Thread(local):
    """State of one thread inside a block."""

    evicting = False
    """True while scorers run: their own passes over the prompt are left alone."""
    generating = False
    answer: EvictingCache | None = None
    """While generating, the cache of the first forward pass; a negative prompt has another."""


_ENTERED: ContextVar[frozenset[object]] = ContextVar("entered", default=frozenset())
"""Marks of the blocks that this thread or task, or the one that started it, is inside."""


def _run_inside(marks: frozenset[object], function: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    _ENTERED.set(marks)
    return function(*args, **kwargs)


@computed_once
def _hand_on_blocks() -> None:
    """From now on, threads and calls of executors are inside the blocks of who starts them.

    As asyncio's tasks are by themselves, and threads from Python 3.14 on if so configured.
    """
    start, submit = Thread.start, ThreadPoolExecutor.submit

    @wraps(start)
    def start_inside(thread: Thread) -> None:
        if marks := _ENTERED.get():
            thread.run = partial(_run_inside, marks, thread.run)  # type: ignore[method-assign]
        start(thread)

    @wraps(submit)  # type: ignore[arg-type]
    def submit_inside(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        # Also without a block: the pool's thread may have been started inside one.
        return submit(pool, _run_inside, _ENTERED.get(), function, *args, **kwargs)

    Thread.start = start_inside  # type: ignore[assignment,method-assign]
    ThreadPoolExecutor.submit = submit_inside  # type: ignore[method-assign]


_INSTEAD = ("generate", "init_continuous_batching")
"""Methods of a model, and of its block, which is called instead where it holds."""


@share_change
def _replace_methods(model: PreTrainedModel) -> Undo:
    own = vars(model)
    before = {name: own[name] for name in _INSTEAD if name in own}
    for name in _INSTEAD:
        method = getattr(model, name)

        @wraps(method)
        def call(*args: Any, method: Any = method, name: str = name, **kwargs: Any) -> Any:  # noqa: ANN401
            block = block_here(model)
            called = method if block is None else partial(getattr(block, name), method)
            return called(*args, **kwargs)

        vars(call)["__self__"] = model  # as of a method: `unwrap_model` looks for it
        own[name] = call

    def undo() -> None:
        for name in _INSTEAD:
            del own[name]
        own.update(before)

    return undo


@dataclass(eq=False)
class EvictingBlock(AbstractContextManager[Kept]):
    """Swaps in an `EvictingCache` before a prefill and shrinks it afterwards, by module hooks."""

    model: PreTrainedModel
    rule: EvictionRule
    tokenizer: PreTrainedTokenizerBase | None
    every: int | None = None
    _used: bool = field(init=False, default=False)
    _mark: object = field(init=False, default_factory=object)
    _undo: ExitStack = field(init=False, default_factory=ExitStack)
    _thread: _Thread = field(init=False, default_factory=_Thread)
    _calls: dict[int, _Call] = field(init=False, default_factory=dict)  # by thread

    def __post_init__(self) -> None:
        self._names = list(inspect.signature(self.model.forward).parameters)

    def __enter__(self) -> Kept:
        refuse_inside_block(self.model)
        if self._used:
            raise UsageError("an evicting(...) block cannot be entered twice: call evicting again")
        self._used = True
        with ExitStack() as undo:
            model = self.model
            undo.enter_context(kvp_attention_set(model))
            undo.enter_context(_replace_methods(model))
            undo.callback(model.register_forward_pre_hook(self._open_pass, with_kwargs=True).remove)
            undo.callback(model.register_forward_hook(self._close_pass, with_kwargs=True).remove)
            self._undo = undo.pop_all()
        _hand_on_blocks()
        _ENTERED.set(_ENTERED.get() | {self._mark})
        kept = Kept(budget=self.rule.budget)
        self._kept = ref(kept)  # so that a cache which nobody asks about is freed as ever
        return kept

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._undo.close()
        _ENTERED.set(_ENTERED.get() - {self._mark})
        self._drop_failed()
        running = {thread.ident for thread in living_threads()}
        if error is None and any(thread in running for thread in self._calls):
            raise UsageError(
                "a generate call of another thread was still in its prefill when the evicting(...) "
                "block ended: wait for the threads before leaving the block"
            )

    def _drop_failed(self) -> None:
        """Forget a prefill of this thread that failed."""
        failed = self._calls.pop(get_ident(), None)
        if failed is not None:
            failed.cache.recorder = None
            failed.recording.close()

    @property
    def holds_here(self) -> bool:
        """True in the thread or task that entered the block, and in what it started inside.

        False while the thread's scorers run.
        """
        return self._mark in _ENTERED.get() and not self._thread.evicting

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _open_pass(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        passed, kwargs = (args, kwargs), {**dict(zip(self._names, args, strict=False)), **kwargs}
        config = self.model.config
        eager = config._attn_implementation == ATTENTIONS["eager"]  # for all threads
        weights = kwargs.get("output_attentions", getattr(config, "output_attentions", False))
        if weights and (eager or self.holds_here):
            raise UsageError(
                "inside evicting(...) no attention weights exist, in other threads neither: pass "
                "output_attentions=False"
            )
        if not self.holds_here:
            return passed
        self._drop_failed()
        inputs = kwargs.get("input_ids")
        batch, tokens = (kwargs["inputs_embeds"] if inputs is None else inputs).shape[:2]
        if not tokens:
            raise UsageError("evicting needs a prompt of at least one token, this one is empty")
        if tokens > 1 or self.model.training:
            check_mode(self.model)
        cache = self._evicting_cache(kwargs, tokens)
        kwargs = {**kwargs, "past_key_values": cache}
        cache.check_rows(batch)
        if cache.get_seq_length() == 0:
            self._record(cache, _left_padding(kwargs.get("attention_mask"), batch))
        elif tokens > 1:
            self._record(cache, None)
        elif self.every is not None:
            self._watch_queries(cache)
            cache.turn = cache.turn or _turn(cache)  # forked, loaded or made outside of a block
        state = self._thread
        if state.generating and state.answer is None:
            state.answer = cache
        if (kept := self._kept()) is not None and state.answer in (None, cache):
            kept.cache = cache
        cache.begun_at = cache.get_seq_length()
        return (), kwargs

    def generate(self, generate: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """`generate(...)`, of which `kept` tells the answer's cache alone."""
        state = self._thread
        if state.generating:
            return generate(*args, **kwargs)
        state.generating = True
        try:
            output = generate(*args, **kwargs)
            if state.answer is not None and self._is_due(state.answer):
                raise UsageError(
                    "the evicting(...) block ended during a generate call of another thread, whose "
                    "cache grew on: wait for the threads before leaving the block"
                )
            return output
        finally:
            state.generating, state.answer = False, None
            self._drop_failed()

    def init_continuous_batching(self, *_: object, **__: object) -> NoReturn:
        """Raise UsageError: its paged cache shares blocks between requests."""
        raise UsageError(
            "evicting cannot shrink the paged cache of continuous batching (generate_batch): call "
            "model.generate"
        )

    def _evicting_cache(self, kwargs: dict[str, Any], tokens: int) -> EvictingCache:
        """The cache of a forward pass over `tokens` tokens, made anew where it may be."""
        if kwargs.get("cache") is not None:  # paged, of requests begun before the block
            self.init_continuous_batching()
        cache, use = kwargs.get("past_key_values"), kwargs.get("use_cache")
        if cache is None:
            switch, latest = rope_switch(self.model.config), self._thread.answer
            known = 0 if switch is None or latest is None else latest.get_seq_length()
            if known and tokens in (1, known + 1):  # before 5.20 transformers then feeds one token
                raise UsageError(
                    f"this model changes its RoPE after {switch} tokens and drops the cache when "
                    "an answer crosses that: shorten prompt and answer, or use a longer prompt"
                )
        if use is False or (cache is None and use is not True):
            raise UsageError("evicting needs a cache: call model.generate with use_cache=True")
        if cache is None:
            return EvictingCache.of(self.model.config)
        if isinstance(cache, EvictingCache):
            return cache
        offloading = " with offloading" if getattr(cache, "offloading", False) else ""
        if type(cache) is not DynamicCache or offloading:
            raise UsageError(
                f"evicting cannot shrink a {type(cache).__name__}{offloading}: pass neither "
                "past_key_values nor cache_implementation"
            )
        if cache.get_seq_length() > 0:
            raise UsageError(
                "past_key_values was filled outside of evicting(...): pass the whole prompt"
            )
        return EvictingCache.adopt(cache, self.model.config)

    def _record(self, cache: EvictingCache, padding: list[int] | None) -> None:
        """Watch what is read into `cache` for what the scorer needs."""
        needs = self.rule.scorer.needs
        call = _Call(cache=cache, padding=padding)
        if padding is None:
            check_repeatable(self.rule)
        else:
            cache.recorder = None
            if after := recorded_hidden([needs]):
                call.hidden = HiddenRecorder(after, padding=padding, every=needs.every_state)
                call.recording.enter_context(call.hidden.recording(self.model))
        self._watch_queries(cache)
        self._calls[get_ident()] = call

    def _watch_queries(self, cache: EvictingCache) -> None:
        """Record the queries that the scorer reads; those of another block go on."""
        wanted = self.rule.scorer.needs.queries
        if not wanted:
            cache.recorder = None
        elif cache.recorder is None:
            cache.recorder = QueryRecorder(wanted)
        else:
            cache.recorder.window = wanted

    def _budgets(self, lengths: Sequence[int]) -> list[int]:
        """Budgets of prompts of `lengths` tokens; those of short ones too: answers may be long."""
        budget, protection = self.rule.budget, self.rule.protection
        return [budget_tokens(budget, length, protection) for length in lengths]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _close_pass(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        if not self.holds_here:
            return
        call = self._calls.pop(get_ident(), None)
        cache = kwargs["past_key_values"]
        cache.begun_at = None
        if call is None and not self._is_due(cache):
            return
        self._thread.evicting = True
        try:
            if call is None:
                turn = replace(cache.turn, shrunk_at=cache.get_seq_length())
                evict_again(cache, self.rule, self._budgets(turn.prompts), turn.prompts)
                cache.turn = turn
            else:
                self._after_prompt(call, kwargs.get("input_ids"))
            if self.every is None:
                cache.recorder = None
            elif cache.recorder is not None:  # single tokens will be followed by more
                cache.recorder.forget()
        except BaseException:
            cache.recorder = None
            raise
        finally:
            self._thread.evicting = False

    def _is_due(self, cache: EvictingCache) -> bool:
        """Whether a cache to which single tokens are added is to be shrunk now."""
        if self.every is None or cache.turn is None:
            return False
        return bool(cache.get_seq_length() - cache.turn.shrunk_at >= self.every)

    def _after_prompt(self, call: _Call, input_ids: Tensor | None) -> None:
        call.recording.close()
        cache, rule = call.cache, self.rule
        cache.turn = _turn(cache)
        budgets = self._budgets(cache.lengths)
        if call.padding is None:
            evict_again(cache, rule, budgets, [0] * len(budgets))
        else:
            seen = Prefill(
                keys=tuple(layer.keys for layer in cache.stored.values()),
                values=tuple(layer.values for layer in cache.stored.values()),
                layers=tuple(cache.stored),
                cache=cache,
                queries=() if cache.recorder is None else cache.recorder.queries,
                hidden=None if call.hidden is None else call.hidden.record,
                others=cache.others,
            )
            evict(
                self.model, seen, rule, padding=call.padding, input_ids=input_ids,
                tokenizer=self.tokenizer, budgets=budgets,
            )  # fmt: skip


def _turn(cache: EvictingCache) -> Turn:
    """A prompt that was just read, or taken for one."""
    return Turn(prompts=tuple(cache.lengths), shrunk_at=cache.get_seq_length())


def _left_padding(mask: Tensor | None, batch: int) -> list[int]:
    """Padding columns of each of `batch` prompts; UsageError unless padding is on the left."""
    if mask is None:
        return [0] * batch
    real = mask.bool()
    if real.ndim == 2 and not bool(real.any(dim=1).all()):
        raise UsageError(
            f"a prompt has none of its tokens among the first {real.shape[1]}: sort prompts by "
            "length, or read them in longer pieces"
        )
    if real.ndim != 2 or not bool(real[:, -1].all()) or bool((~real[:, 1:] & real[:, :-1]).any()):
        raise UsageError("evicting needs left padding: tokenizer.padding_side = 'left'")
    return (~real).sum(dim=1).tolist()
