"""Compress the KV cache of a model after its prefill; every method is applied this way.

`evicting` wraps an unmodified `model.generate`; the cache is compressed right after the prefill, so
the first new token still comes from full attention (as in the KVP paper). On request it also
compresses while the model answers, and between the pieces of a long prompt. `prefill_and_evict`
returns the compressed cache: the tokens that are fed next attend to the kept tokens only, also the
last token of a prompt, which the method has seen before. New tokens are appended to it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.allocation import Allocator
from kvp.budgets import Budget, parse_budget
from kvp.errors import UsageError
from kvp.hf.block import EvictingBlock
from kvp.hf.cache import EvictingCache
from kvp.hf.checks import check_model
from kvp.hf.evict import EvictionRule, kept_slots
from kvp.hf.evict_again import check_repeatable
from kvp.hf.identity import warn_of_another_model
from kvp.hf.prefill import prefill
from kvp.hf.scorer_inputs import check_inputs
from kvp.hf.wrappers import refuse_inside_block, unwrapped
from kvp.plugins import instance_of
from kvp.ranking import Protection
from kvp.scoring import Needs, Scorer
from kvp.selection import kept_tokens


def prefill_and_evict(
    model: PreTrainedModel,
    input_ids: Tensor,
    scorer: Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | None = None,
    *,
    allocator: Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    fed_again: int = 0,
) -> EvictingCache:
    """Prefill `input_ids` [B, T] int64 (no padding) and keep `budget` tokens per KV head.

    The cache has seen the first N = T - `fed_again` tokens; feed the rest afterwards. With a whole
    prompt pass `fed_again=1`, so that the method sees the query of its last token; leave out what
    the method is not to see, such as a question. A budget of N or more keeps all N tokens; without
    an allocator nothing is scored then. A percentage keeps at least the protected tokens.
    `protection` defaults to the first 4 and the last 16 of the N tokens. Of a class of scorers or
    allocators, an object with its defaults is made. An `allocator` splits the
    budget over layers and KV heads instead of giving each head the same; `tokenizer` is for methods
    that repeat or read the prompt.

    Raises UsageError when an absolute budget is below the protected tokens, when the scorer needs
    the future or a tokenizer it was not given, for counts of an allocator that cannot be kept, and
    where `fed_again` leaves no token, and inside an `evicting` block of the same model; ModelError
    for models kvp cannot evict from, or that lack what the scorer reads. Warns when a learned
    policy was trained on another model.
    """
    model = unwrapped(model)
    refuse_inside_block(model)
    rule = replace(_rule(scorer, budget, protection, allocator), fed_again=fed_again)
    check_model(model)
    check_inputs(model, [rule.scorer])
    warn_of_another_model(model, rule.scorer)
    batch, tokens = input_ids.shape
    if not 0 <= fed_again < tokens:
        raise UsageError(f"fed_again must be 0 to {tokens - 1} of {tokens} tokens, got {fed_again}")
    cached = tokens - fed_again
    kept = kept_tokens(rule.budget, cached, rule.protection)
    needs = rule.scorer.needs if rule.allocator is not None or kept < cached else Needs()
    seen = prefill(model, input_ids, needs, tokenizer=tokenizer, fed_again=fed_again).observation
    assert seen is not None
    slots = kept_slots(
        model, seen, rule, padding=[0] * batch, input_ids=input_ids, tokenizer=tokenizer
    )
    if slots is None:
        return seen.cache
    return EvictingCache.select(
        [keys[:, :, :cached] for keys in seen.keys],
        [values[:, :, :cached] for values in seen.values],
        slots,
        seen=cached,
        others=seen.others_kept,
    )


def evicting(
    model: PreTrainedModel,
    scorer: Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | None = None,
    *,
    allocator: Allocator | type[Allocator] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    every: int | None = None,
    prefill_chunk: int | None = None,
) -> AbstractContextManager[None]:
    """Make `model.generate` compress its cache to `budget` tokens per KV head after every prefill.

    Use as `with evicting(...):`, once. Inside, `generate` may be called several times, with
    left-padded batches, sampling or beams. Tokens are selected separately for each prompt of a
    batch; a percentage such as `"12.5%"` is of that prompt's length and keeps at least the
    protected tokens. A call that continues a compressed cache (`past_key_values=`) compresses it to
    the budget again, once the new turn has been read; a percentage is of all tokens seen by then.
    An empty `DynamicCache` that is passed becomes the `EvictingCache` itself. On exit the model is
    as before.

    `every`: compress again after so many tokens of the answer, so that no head of a uniform budget
    ever holds more than budget + every tokens; None never does. `prefill_chunk`: read prompts in
    pieces of so many tokens (at least 3), with eviction after each, so that no head holds more than
    budget + prefill_chunk tokens; transformers' `prefill_chunk_size` does the same, with
    percentages of what has been read so far. Then, and in further turns, scorers see the tokens
    that are still stored; a forward pass returns logits of the last piece alone.

    `model` may be wrapped by torch.compile or PEFT: the model inside is the one that is changed.
    The block holds for that model in every thread; each `generate` call has its own state. Wait for
    the threads before leaving the block: a call that has not begun its prefill by then runs with
    the full cache.

    Inside, a model that was loaded with `eager` attention computes eagerly, and any other one
    (sdpa, flash_attention_2, flex_attention) with torch's `scaled_dot_product_attention`, which
    chooses a flash kernel by itself where it can: numbers are those of sdpa.

    An `allocator` splits the budget of a prompt over layers and KV heads instead of giving each
    head the same; of a class of scorers or allocators, an object with its defaults is made.
    `tokenizer` is for methods that repeat or read the prompt.

    Raises UsageError for an absolute budget below the protected tokens, a scorer that needs the
    future or a tokenizer it was not given, counts of an allocator that cannot be kept, a second
    `evicting` around the same model, `use_cache=False`, attention weights (`output_attentions`),
    caches of another kind (static, offloaded, quantised), assisted decoding, continuous batching
    (`generate_batch`), methods that read a whole prompt at once where a cache is compressed again,
    and on exit while a prefill runs in another thread; ModelError for models kvp cannot evict from,
    or that lack what the scorer reads. Warns when a learned policy was trained on another model.
    """
    model = unwrapped(model)
    refuse_inside_block(model)
    rule = _rule(scorer, budget, protection, allocator)
    _check_repeats(rule, every, prefill_chunk)
    check_model(model)
    check_inputs(model, [rule.scorer])
    warn_of_another_model(model, rule.scorer)
    return EvictingBlock(model, rule, tokenizer, every=every, prefill_chunk=prefill_chunk)


def _check_repeats(rule: EvictionRule, every: int | None, prefill_chunk: int | None) -> None:
    if every is not None:
        if every < 1:
            raise UsageError(f"every must be at least 1 token, got {every}")
        check_repeatable(rule)
    if prefill_chunk is not None and prefill_chunk < 3:
        raise UsageError(f"prefill_chunk must be at least 3 tokens, got {prefill_chunk}")


def _made(thing: Any, kind: str) -> Any:  # noqa: ANN401 - a class or an object of it
    """An object, with its defaults where the class was given."""
    return instance_of(thing, f"{kind} {getattr(thing, '__name__', kind)}")


def _rule(
    scorer: Scorer | type[Scorer],
    budget: int | str | Budget,
    protection: Protection | None,
    allocator: Allocator | type[Allocator] | None,
) -> EvictionRule:
    ranks = _made(scorer, "scorer")
    splits = None if allocator is None else _made(allocator, "allocator")
    if not hasattr(ranks, "score"):
        raise UsageError(f"{scorer!r} is no scorer: pass make_scorer(...) or load_policy(...)")
    if splits is not None and not hasattr(splits, "allocate"):
        raise UsageError(f"{allocator!r} is no allocator: pass make_allocator(...)")
    if ranks.needs.future:
        raise UsageError(f"method {ranks.name} needs the future: it only runs on observed traces")
    rule = EvictionRule(
        scorer=ranks,
        budget=budget if isinstance(budget, Budget) else parse_budget(budget),
        protection=Protection() if protection is None else protection,
        allocator=splits,
    )
    if rule.budget.count is not None:  # refuse before any prefill
        kept_tokens(rule.budget, rule.budget.count + rule.protection.tokens, rule.protection)
    return rule
