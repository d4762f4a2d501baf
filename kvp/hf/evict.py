"""Which tokens a prefilled cache keeps: views to scores, scores to counts, counts to tokens.

Rows without padding are scored together, padded ones one at a time, so that views hold no padding.
Without an allocator every head keeps the budget; with one, each row's budget is split by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.allocation import (
    EMPTY_SLOT,
    Allocator,
    Request,
    allocated_counts,
    allocated_tokens,
    protected_scores,
)
from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.hf.cache import EvictingCache
from kvp.hf.hidden import HiddenRecord
from kvp.hf.observe import recent_queries
from kvp.hf.scorer_inputs import LayerInputs, ScorerInputs, needs_scorer_inputs
from kvp.ranking import Protection, keep_tokens
from kvp.scoring import Scorer, SelfSizing, View, score_layers


@dataclass(frozen=True, kw_only=True)
class EvictionRule:
    """How caches are to be shrunk."""

    scorer: Scorer
    budget: Budget
    protection: Protection
    allocator: Allocator | None = None
    """None: the same number of tokens in every head."""


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """A cache that holds every token of a batch of prompts, and what was recorded meanwhile."""

    model: PreTrainedModel
    cache: EvictingCache
    token_ids: Tensor | None
    """[B, N] int64, padding included; None when the prompts were given as embeddings."""
    padding: Sequence[int]
    """Padding columns of each row, on the left."""
    queries: Sequence[Tensor]
    """Per layer [B, Q, at least the window the scorer reads, D]; empty when it reads none."""
    hidden: HiddenRecord | None = None
    """Statistics of the hidden states, for scorers that read them."""
    tokenizer: PreTrainedTokenizerBase | None = None

    def scorer_inputs(self, rows: slice) -> ScorerInputs:
        """Extras for scorers, of neighbouring rows with equally many padding columns."""
        pad = self.padding[rows.start]
        return ScorerInputs(
            self.model,
            None if self.token_ids is None else self.token_ids[rows, pad:],
            [layer.keys[rows, :, pad:] for layer in self.cache.layers],
            [layer.values[rows, :, pad:] for layer in self.cache.layers],
            hidden=None if self.hidden is None else self.hidden.rows(rows),
            tokenizer=self.tokenizer,
        )


def evict(prefill: Prefill, rule: EvictionRule) -> None:
    """Evict in place; a cache of which everything stays is left as it is.

    Raises UsageError when the budget is below the protected tokens, or when an allocator returns
    counts that cannot be kept; and as `ScorerInputs.for_needs`.
    """
    cache = prefill.cache
    seen = cache.get_seq_length()
    lengths = [seen - pad for pad in prefill.padding]
    budgets = [kept_tokens(rule.budget, length, rule.protection) for length in lengths]
    if rule.allocator is None and all(b == n for b, n in zip(budgets, lengths, strict=True)):
        return
    chosen: list[Tensor] = []  # per row [L, H, S]
    for rows in _groups(prefill.padding, one_by_one=_reads_text(rule.scorer)):
        kept = _kept(prefill, rows, budgets[rows.start], rule)
        pad = prefill.padding[rows.start]
        chosen += [torch.where(row == EMPTY_SLOT, row, row + pad) for row in kept]
    if all(row.shape[-1] == seen and bool((row != EMPTY_SLOT).all()) for row in chosen):
        return
    for index, layer in enumerate(cache.layers):
        cache.layers[index] = layer.select(_side_by_side([row[index] for row in chosen]))


def kept_tokens(budget: Budget, tokens: int, protection: Protection) -> int:
    """Tokens per KV head that stay of `tokens`; UsageError when protected ones do not fit."""
    kept = min(budget.tokens(tokens), tokens)
    if kept < min(tokens, protection.tokens):
        raise UsageError(
            f"budget {budget} keeps {kept} tokens, fewer than the {protection.tokens} protected "
            "ones: raise the budget or turn protection off"
        )
    return kept


def _reads_text(scorer: Scorer) -> bool:
    return scorer.needs.text > 0 or scorer.needs.classifier is not None


def _groups(padding: Sequence[int], *, one_by_one: bool) -> list[slice]:
    """Rows that are scored together."""
    if not any(padding) and not one_by_one:
        return [slice(0, len(padding))]
    return [slice(row, row + 1) for row in range(len(padding))]


def _kept(prefill: Prefill, rows: slice, budget: int, rule: EvictionRule) -> list[Tensor]:
    """Tokens that stay, counted without padding: [L, H, S] int64 for each of the rows."""
    layers = prefill.cache.layers
    tokens = prefill.cache.get_seq_length() - prefill.padding[rows.start]
    if rule.allocator is None and budget == tokens:
        whole = torch.arange(tokens, device=layers[0].keys.device)
        every = whole.expand(len(layers), layers[0].keys.shape[1], -1)
        return [every] * (rows.stop - rows.start)
    scores = score_layers(rule.scorer, _views(prefill, rows, budget, rule.scorer))
    device = scores[0].device
    if rule.allocator is None:
        best = [keep_tokens(layer, budget, rule.protection).to(device) for layer in scores]
        return list(torch.stack(best, dim=1))
    together = torch.stack([layer.to(device) for layer in scores], dim=1)
    return [_allocated(row, budget, rule, rule.allocator) for row in together]


def _allocated(scores: Tensor, budget: int, rule: EvictionRule, allocator: Allocator) -> Tensor:
    """Tokens one row keeps by scores [L, H, N]: [L, H, S] int64, `EMPTY_SLOT` in gaps."""
    scorer, protection = rule.scorer, rule.protection
    raised = protected_scores(scores, protection)
    request = Request(
        scores=raised,
        budget=budget,
        floor=max(1, min(scores.shape[-1], protection.tokens)),
        sizes=scorer.sizes(raised) if isinstance(scorer, SelfSizing) else None,
    )
    return allocated_tokens(scores, allocated_counts(allocator, request), protection)


def _views(prefill: Prefill, rows: slice, budget: int, scorer: Scorer) -> Iterator[View]:
    pad = prefill.padding[rows.start]
    layers, needs = prefill.cache.layers, scorer.needs
    tokens = prefill.cache.get_seq_length() - pad
    extras = (LayerInputs(),) * len(layers)
    if needs_scorer_inputs(needs):
        extras = prefill.scorer_inputs(rows).for_needs(needs)
    for index, (layer, extra) in enumerate(zip(layers, extras, strict=True)):
        recent = recent_queries(prefill.queries, index, needs, tokens)
        yield View(
            layer=index,
            keys=layer.keys[rows, :, pad:],
            values=layer.values[rows, :, pad:],
            positions=layer.positions[rows, 0, pad:],
            budget=budget,
            queries=None if recent is None else recent[rows],
            **vars(extra),
        )


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """Indices [H, S] of each row as [R, H, widest], `EMPTY_SLOT` after a head's last one."""
    rows = [row[:, : int((row != EMPTY_SLOT).sum(dim=-1).max())] for row in rows]
    widest = max(row.shape[-1] for row in rows)
    return torch.stack(
        [
            torch.nn.functional.pad(row, (0, widest - row.shape[-1]), value=EMPTY_SLOT)
            for row in rows
        ]
    )
