"""Ranks of one prompt's tokens for every method and head: tokens.json, for the heat map.

Ranks are without protection, so that they show what a method itself prefers. Methods that look at
the budget rank for the middle one of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eval.evaluate import Bench, Prompt, hindsight, run_prefix
from eval.methods import Method, rankings
from kvp.budgets import Budget
from kvp.hf import geometry_of
from kvp.ranking import UNPROTECTED, rank_tokens
from kvp.scoring import score_budgets


def token_ranks(
    bench: Bench,
    prompt: Prompt,
    protocol: str,
    methods: Sequence[Method],
    budgets: Sequence[Budget],
) -> dict[str, Any]:
    """Content of tokens.json."""
    start = run_prefix(bench, prompt, protocol, methods)
    tokens = start.prefix.tokens
    sizes = sorted(min(budget.tokens(tokens), tokens) for budget in budgets)
    budget = sizes[len(sizes) // 2]
    future = None
    if any(method.scorer and method.scorer.needs.future for method in methods):
        future = hindsight(bench, prompt, start)
    ranks: dict[str, list[list[int]]] = {}
    for method in rankings(methods):
        assert method.scorer is not None
        views_at = start.views_at(method.scorer.needs, future)
        (scored,) = score_budgets(method.scorer, views_at, [budget])
        ranking = rank_tokens(scored.scores, UNPROTECTED).flatten(0, 1)
        positions = torch.empty_like(ranking)
        positions.scatter_(1, ranking, torch.arange(tokens).expand_as(ranking))
        ranks[method.label] = positions.tolist()
    ids = prompt.encoded.ids[:tokens]
    return {
        "tokens": [bench.tokenizer.decode([token]) for token in ids],
        "methods": ranks,
        "prompt_length": tokens,
        "geometry": geometry_of(bench.model.config).to_dict(),
        "task": prompt.task,
        "example": prompt.sample.id,
        "protocol": protocol,
        "budget": budget,
        "protected": False,
        "references": list(prompt.sample.references),
    }
