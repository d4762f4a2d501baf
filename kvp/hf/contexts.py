"""Compressed contexts of transformers models: made from an evicted cache, loaded as a cache.

A context is loaded as a `DynamicCache` of k tokens, for any code of transformers, with kvp or
without: a token after it sees the keys at their true distances (`kvp.contexts`). One whose heads
keep different numbers of tokens becomes an `EvictingCache`, for models with kvp's attention.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.allocation import Allocator, check_allocator
from kvp.budgets import Budget, parse_budget
from kvp.contexts import BLOCK, Context, pack_context, plan_context, read_context
from kvp.errors import ModelError, UsageError
from kvp.hf.cache import EvictingCache
from kvp.hf.cache_layers import RaggedLayer
from kvp.hf.eviction import prefill_and_evict
from kvp.hf.model_access import attention_modules, unwrap_model
from kvp.hf.model_checks import check_mode
from kvp.hf.model_config import FULL_ATTENTION, context_limit, geometry_of, layer_kinds
from kvp.hf.model_identity import describe_model, tokenizer_digest
from kvp.hf.rotary import rope_of
from kvp.hf.visibility import EMPTY
from kvp.messages import Text, check_text, render_chat
from kvp.model_fingerprint import can_turn, is_norm, norms_digest, rope_facts
from kvp.protection import Protection, protection_of
from kvp.scoring import Scorer, check_scorer


def context_ids(text: Text, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of a text as it is, or of messages as a template writes them before the next one.

    UsageError for what is no text or no messages, ModelError for an unusable template.
    """
    if not isinstance(text, str):
        return list(tokenizer(render_chat(text, tokenizer), add_special_tokens=False).input_ids)
    check_text(text)
    return list(tokenizer(text).input_ids)


def check_length(tokens: int, limit: int | None) -> None:
    """Raise UsageError for a context that is too short to be named, or leaves no position."""
    if tokens < BLOCK:
        raise UsageError(f"a context of {tokens} tokens: at least {BLOCK} are compressed")
    if limit is not None and tokens >= limit:
        raise UsageError(f"a context of {tokens} tokens leaves no room in the model's {limit}")


def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    scorer: str | Scorer | type[Scorer],
    budget: int | str | Budget = "12.5%",
    *,
    protection: Protection | str | None = None,
    allocator: str | Allocator | type[Allocator] | None = None,
) -> Context:
    """Read `text` once and keep `budget` tokens per KV head, every head its own.

    `text` is a document, or the opening messages of a conversation. The number of kept tokens is
    `budget` rounded up to a multiple of `BLOCK`; a context that has no more keeps them all.
    `protection` keeps the first 4 and last 16 tokens unless another one is given. An `allocator`
    splits the kept tokens over layers and heads, also in multiples of `BLOCK`. Raises UsageError
    where `prefill_and_evict` does and for a context shorter than `BLOCK`, ModelError for a model
    whose contexts engines cannot go on from, ContextError where keys or values are not finite.
    """
    inner, protection = unwrap_model(model), protection_of(protection)
    check_context_model(inner)
    scorer = check_scorer(scorer, repr(scorer))
    allocator = None if allocator is None else check_allocator(allocator, repr(allocator))
    ids, asked = context_ids(text, tokenizer), parse_budget(budget)
    check_length(len(ids), context_limit(inner.config))
    plan, facts = plan_context(scorer, asked, len(ids), protection, allocator)
    feed = torch.tensor([ids], device=model.device)
    cache = prefill_and_evict(
        model, feed, scorer, plan.budget, protection, allocator=plan.allocator, tokenizer=tokenizer
    )
    return context_of(cache, model, tokenizer, ids, **facts)


def context_of(
    cache: EvictingCache, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int], **facts: Any,  # noqa: ANN401
) -> Context:  # fmt: skip
    """The context that `cache`, made by `model` from `token_ids`, holds for engines.

    `facts` are `policy`, `budget` and, where they are known, the others of `plan_context`. Raises
    UsageError where the cache has another number of tokens, several entries, or heads whose
    different numbers of tokens are not multiples of `BLOCK`; ContextError where keys or values
    are not finite; ModelError for soft prompts and models that engines cannot go on from.
    """
    inner = unwrap_model(model)
    check_context_model(inner)
    seen = cache.get_seq_length()
    if seen != len(token_ids):
        raise UsageError(f"this cache has seen {seen} tokens, not the {len(token_ids)} given")
    layers = [*cache.stored.values()]
    if any(layer.batch != 1 for layer in layers):
        raise UsageError("a context is of one row: compress one at a time")
    row = [[part[0] for part in (*layer.slots, layer.positions < EMPTY)] for layer in layers]
    ids = torch.tensor(list(token_ids), dtype=torch.int64)
    ours = {**_facts_of(inner), "tokenizer": tokenizer_digest(tokenizer)}
    return pack_context(row, ids, rope_of(inner, seen), **ours, **facts)


def load_context(context: Context | str | Path, model: PreTrainedModel) -> Cache:
    """A `DynamicCache` of the context's k tokens, which `model` goes on from at position k.

    It is an `EvictingCache` where heads keep different numbers of tokens. A call makes its own.
    `model.generate(placeholders + question, past_key_values=cache)` feeds the question alone if
    all placeholders are there, which nothing checks. Raises ContextError for a damaged file, and
    for a context that another model, another dtype or other adapters made.
    """
    inner = unwrap_model(model)
    check_context_model(inner)
    if not isinstance(context, Context):
        context = read_context(Path(context))
    context.facts.check(_facts_of(inner))
    devices = [next(module.parameters()).device for module in attention_modules(inner)]
    if context.facts.counts is not None:
        return _uneven_cache(context, devices)
    cache = DynamicCache(config=inner.config)
    for layer, parts in enumerate(zip(context.keys, context.values, strict=True)):
        copies = (part.to(devices[layer], copy=True) for part in parts)
        keys, values = (part.transpose(0, 1)[None].contiguous() for part in copies)  # [1, H, k, D]
        cache.update(keys, values, layer)
    return cache


def _uneven_cache(context: Context, devices: Sequence[torch.device]) -> EvictingCache:
    layers, seen = [], context.facts.kept
    for layer, counts in enumerate(context.facts.counts or ()):
        positions = [torch.arange(count) * seen // count for count in counts]
        tensors = {"keys": context.keys[layer], "values": context.values[layer]}
        tensors["positions"] = torch.cat(positions).int()  # in order; true ones are not known
        tensors["lengths"] = torch.tensor([[*counts]])
        copies = {name: part.to(devices[layer], copy=True) for name, part in tensors.items()}
        layers.append(RaggedLayer.of_kept(copies, seen))
    return EvictingCache(layers)


def check_context_model(model: PreTrainedModel) -> None:
    """Raise ModelError, in one line, for a model whose contexts no engine goes on from."""
    config = model.config.get_text_config(decoder=True)
    kind = f"model type {model.config.model_type!r}"
    check_mode(model)
    if set(layer_kinds(model.config)) != {FULL_ATTENTION}:
        raise ModelError(f"{kind} has layers that do not see every token: no context file for it")
    if not can_turn(config):
        raise ModelError(f"{kind} has keys RoPE does not turn by one position: no context file")


def _facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """What `ContextFacts` say of a model."""
    config = model.config.get_text_config(decoder=True)
    norms = {name: weight for name, weight in model.state_dict().items() if is_norm(name)}
    return {
        "model": {**describe_model(model), "norms": norms_digest(norms)},
        "geometry": geometry_of(model.config).to_dict(),
        "vocabulary": int(config.vocab_size),
        "rope": rope_facts(config.rope_parameters),
    }
