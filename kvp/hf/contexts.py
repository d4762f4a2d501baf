"""Compressed contexts of transformers models: made from an evicted cache, and gone on from.

A context goes on as a `DynamicCache` of k tokens, in any code of transformers, with kvp or without:
what a token after it meets are keys at their true distances (`kvp.contexts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvp.artifacts.manifest import recorded_name
from kvp.budgets import Budget, parse_budget
from kvp.contexts import (
    MULTIPLE,
    Context,
    can_turn,
    is_norm,
    kept_rows,
    make_context,
    norms_digest,
    read_context,
    rope_facts,
    rotate_keys,
)
from kvp.errors import ModelError, UsageError
from kvp.hf.cache import EvictingCache
from kvp.hf.cache_layers import EMPTY
from kvp.hf.eviction import prefill_and_evict
from kvp.hf.model_access import layer_devices, made_by, on_meta, rope_of, tokenizer_digest
from kvp.hf.model_config import FULL, attention_window, context_limit, geometry_of, layer_kinds
from kvp.hf.prefill import unwrap_model
from kvp.messages import Text, check_text, render_chat
from kvp.ranking import Protection, protection_of
from kvp.scoring import Scorer


def context_ids(text: Text, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of a text as it is, or of messages as a template writes them before the next one.

    Errors as `kvp.messages.check_text` and `render_chat`.
    """
    if not isinstance(text, str):
        return list(tokenizer(render_chat(text, tokenizer), add_special_tokens=False).input_ids)
    check_text(text)
    return list(tokenizer(text).input_ids)


def check_length(tokens: int, limit: int | None) -> None:
    """Raise UsageError for a context that is too short to be named, or leaves no position."""
    if tokens < MULTIPLE:
        raise UsageError(f"a context of {tokens} tokens: at least {MULTIPLE} are compressed")
    if limit is not None and tokens >= limit:
        raise UsageError(f"a context of {tokens} tokens leaves no room in the model's {limit}")


def compress(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    scorer: Scorer,
    budget: int | str | Budget = "12.5%",
    *,
    protection: Protection | str | None = None,
) -> Context:
    """Read `text` once and keep `budget` tokens per KV head, every head its own.

    `text` is a document, or the opening messages of a conversation. The number of kept tokens is
    `budget` rounded up to a multiple of `MULTIPLE`; `protection` is of 4 first and 16 last tokens
    unless another one is given. Nothing is evicted from a context that is no longer. Raises
    UsageError and ModelError as `prefill_and_evict`, UsageError for a context that is shorter than
    `MULTIPLE`, ModelError for a model whose contexts engines cannot go on from, and CacheError as
    `context_of`.
    """
    inner, protection = unwrap_model(model), protection_of(protection)
    check_model(inner)
    ids, asked = context_ids(text, tokenizer), parse_budget(budget)
    check_length(len(ids), context_limit(inner.config))
    kept = kept_rows(asked, len(ids), least=protection.tokens)
    feed = torch.tensor([ids], device=model.device)
    cache = prefill_and_evict(model, feed, scorer, kept, protection, tokenizer=tokenizer)
    policy = getattr(scorer, "label", scorer.name)
    return context_of(cache, model, tokenizer, ids, policy=policy, budget=str(asked))


def context_of(
    cache: EvictingCache,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    *,
    policy: str,
    budget: str,
) -> Context:
    """The context that `cache`, made by `model` from `token_ids`, holds for engines.

    Raises UsageError where the cache has another number of tokens, several rows, or heads with
    unequal numbers of tokens (allocators); CacheError where keys or values are not finite or not
    in the model's dtype (autocast); ModelError as `check_model` and for soft prompts.
    """
    inner = unwrap_model(model)
    check_model(inner)
    seen = cache.get_seq_length()
    if seen != len(token_ids):
        raise UsageError(f"this cache has seen {seen} tokens, not the {len(token_ids)} given")
    rope = rope_of(inner, seen)
    keys, values = [], []
    for layer in cache.stored.values():
        if layer.batch != 1 or bool((layer.positions == EMPTY).any()):
            raise UsageError(
                "engines hold as many tokens in every head: compress one context at a time, "
                "without an allocator"
            )
        of_keys, of_values = (part[0].transpose(0, 1) for part in layer.slots)  # [k, H, D]
        keys.append(rotate_keys(of_keys, rope, of_keys.shape[0] - seen).cpu().contiguous())
        values.append(of_values.cpu().contiguous())
    kept = {len(part) for part in keys}
    if len(kept) != 1:
        raise UsageError(
            "engines hold as many tokens in every layer: compress without an allocator"
        )
    vocabulary, facts_of_rope = _vocabulary_and_rope(inner)
    return make_context(
        keys, values, torch.tensor(list(token_ids), dtype=torch.int64),
        model=_identity(inner), geometry=geometry_of(inner.config).to_dict(),
        vocabulary=vocabulary, rope=facts_of_rope,
        tokenizer=tokenizer_digest(tokenizer),
        policy=recorded_name(policy), budget=budget, tokens=seen, kept=kept.pop(),
    )  # fmt: skip


def load_context(context: Context | str | Path, model: PreTrainedModel) -> DynamicCache:
    """A transformers cache of the context's k tokens, which `model` goes on from at position k.

    `model.generate(placeholders + question, past_key_values=cache)` feeds the question alone. Each
    call makes a cache of its own. Raises CacheError for a damaged file, and for a context that
    another model, another dtype or other adapters made.
    """
    inner = unwrap_model(model)
    check_model(inner)
    if not isinstance(context, Context):
        context = read_context(Path(context))
    context.facts.check(_identity(inner), geometry_of(inner.config), *_vocabulary_and_rope(inner))
    cache = DynamicCache(config=inner.config)
    devices = layer_devices(inner)
    for layer, parts in enumerate(zip(context.keys, context.values, strict=True)):
        own = (part.to(devices[layer], copy=True) for part in parts)
        keys, values = (part.transpose(0, 1)[None].contiguous() for part in own)  # [1, H, k, D]
        cache.update(keys, values, layer)
    return cache


def check_model(model: PreTrainedModel) -> None:
    """Raise ModelError, in one line, for a model whose contexts no engine goes on from."""
    config = model.config.get_text_config(decoder=True)
    kind = f"model type {model.config.model_type!r}"
    if on_meta(model):
        raise ModelError("weights are offloaded (accelerate): load the whole model for contexts")
    if set(layer_kinds(model.config)) != {FULL} or attention_window(config) is not None:
        raise ModelError(f"{kind} has layers that do not see every token: no context file for it")
    if not can_turn(config):
        raise ModelError(
            f"{kind} has keys that RoPE does not turn by one position each in every layer: there "
            "is no context file for it"
        )


def _vocabulary_and_rope(model: PreTrainedModel) -> tuple[int, dict[str, object]]:
    text = model.config.get_text_config(decoder=True)
    return int(text.vocab_size), rope_facts(text.rope_parameters)


def _identity(model: PreTrainedModel) -> dict[str, object]:
    """What keys and values depend on beside geometry and RoPE."""
    norms = {name: weight for name, weight in model.state_dict().items() if is_norm(name)}
    return {**made_by(model), "norms": norms_digest(norms)}
