"""Which tokens a prefilled cache keeps: views to scores, scores to counts, counts to tokens.

Prompts without padding are scored together, padded ones one at a time, so that views hold no
padding. Without an allocator every head keeps the budget; with one, the budget of each prompt is
split by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.allocation import EMPTY_SLOT, Allocator
from kvp.budgets import Budget
from kvp.hf.observe import Observation
from kvp.hf.prefill import Prefill, unpadded
from kvp.ranking import Protection
from kvp.scoring import Scorer, SelfSizing, score_layers
from kvp.selection import Selection, kept_tokens, select


@dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """How caches are to be shrunk."""

    scorer: Scorer
    budget: Budget
    protection: Protection
    allocator: Allocator | None = None
    """None: the same number of tokens in every head."""
    fed_again: int = 0
    """Last tokens of a prompt that scorers see and no cache keeps: they are fed once more."""


def evict(
    model: PreTrainedModel,
    observation: Observation,
    rule: EvictionRule,
    *,
    padding: Sequence[int],
    input_ids: Tensor | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    budgets: Sequence[int] | None = None,
) -> None:
    """Shrink `observation.cache` in place; a cache of which everything stays is left as it is.

    Arguments and errors are those of `kept_slots`; nothing of `rule` is fed again.
    """
    kept = kept_slots(
        model, observation, rule, padding=padding, input_ids=input_ids, tokenizer=tokenizer,
        budgets=budgets,
    )  # fmt: skip
    if kept is None:
        return
    cache = observation.cache
    for (index, layer), indices in zip(cache.stored.items(), kept, strict=True):
        cache.layers[index] = layer.select(indices)


def kept_slots(
    model: PreTrainedModel,
    observation: Observation,
    rule: EvictionRule,
    *,
    padding: Sequence[int],
    input_ids: Tensor | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    budgets: Sequence[int] | None = None,
) -> list[Tensor] | None:
    """Columns of an observed cache that stay; None where all T do.

    Per layer [B, H, S] int64, `EMPTY_SLOT` after a head's last one.

    `padding` are the columns of left padding of each prompt; `input_ids` [B, T] int64 include them
    (None when the prompts were given as embeddings). `budgets` are tokens per KV head of each
    prompt, those of `rule` for its length where they are not given. Raises UsageError when an
    absolute budget is below the protected tokens, or when an allocator returns counts that cannot
    be kept; and as `ScorerInputs.for_needs`.
    """
    scorer = rule.scorer
    seen = observation.cache.get_seq_length()
    lengths = [seen - rule.fed_again - pad for pad in padding]
    if budgets is None:
        budgets = [kept_tokens(rule.budget, length, rule.protection) for length in lengths]
    budgets = [min(budget, length) for budget, length in zip(budgets, lengths, strict=True)]
    if rule.allocator is None and budgets == [seen - pad for pad in padding]:
        return None
    reads_text = scorer.needs.text > 0 or scorer.needs.classifier is not None
    parts = unpadded(
        observation, padding, model, input_ids, tokenizer,
        one_by_one=reads_text, fed_again=rule.fed_again,
    )  # fmt: skip
    kept: list[Tensor] = []  # per prompt [L, H, S], counted with padding
    for batch, part in parts:
        pad = padding[batch.start]
        for tokens in _kept(part, budgets[batch.start], rule):
            kept.append(torch.where(tokens == EMPTY_SLOT, tokens, tokens + pad))
    if all(tokens.shape[-1] == seen and bool((tokens != EMPTY_SLOT).all()) for tokens in kept):
        return None
    layers = range(len(observation.keys))
    return [stacked([tokens[index] for tokens in kept]) for index in layers]


def _kept(prefill: Prefill, budget: int, rule: EvictionRule) -> list[Tensor]:
    """Tokens that stay, [L, H, S], for each prompt of the batch."""
    batch, heads = prefill.keys[0].shape[:2]
    if rule.allocator is None and budget == prefill.tokens:
        every = torch.arange(prefill.tokens, device=prefill.keys[0].device)
        return [every.expand(len(prefill.keys), heads, -1)] * batch
    scores = score_layers(rule.scorer, prefill.views(rule.scorer.needs, budget))
    device = scores[0].device  # layers may lie on several devices
    together = torch.stack([layer.to(device) for layer in scores], dim=1)  # [B, L, H, N]
    if rule.allocator is None:
        return list(select(together, budget, rule.protection))
    sizes = rule.scorer.sizes if isinstance(rule.scorer, SelfSizing) else None
    return [
        Selection(prompt, rule.protection, sizes).tokens(budget, rule.allocator)
        for prompt in together
    ]


def stacked(prompts: Sequence[Tensor]) -> Tensor:
    """Indices [H, S] of each prompt as [B, H, widest], `EMPTY_SLOT` after a head's last one."""
    prompts = [kept[:, : int((kept != EMPTY_SLOT).sum(dim=-1).max())] for kept in prompts]
    width = max(kept.shape[-1] for kept in prompts)
    return torch.stack(
        [
            torch.nn.functional.pad(kept, (0, width - kept.shape[-1]), value=EMPTY_SLOT)
            for kept in prompts
        ]
    )
