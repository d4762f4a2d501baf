"""Attention recall of a whole model at a budget, however it is split over the heads.

The mean over heads of the share of future attention that the kept tokens would receive
(`kvp.metrics`). So allocators of one budget can be compared without generating anything. kept.jsonl
is described in `docs/formats.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eval.methods import method_fields
from eval.results.records import Record
from eval.settings import Setting
from eval.stats import bootstrap_mean
from kvp import metrics
from kvp.reward import cost_curve


@dataclass(frozen=True, kw_only=True)
class AttentionRecall:
    """One setting on one sequence."""

    share: float
    """Mean over heads of the share of future attention kept, 0 to 1."""
    kept_tokens: float
    """Tokens kept per KV head, mean over heads."""
    cached_tokens: int
    """N, tokens before the eviction."""


def attention_recall(importance: Tensor, ranking: Tensor, counts: Tensor) -> AttentionRecall:
    """Recall of importance [L, H, N] by the first counts [L, H] of every ranking [L, H, N].

    A head whose tokens receive nothing at all loses nothing: its share is 1.
    """
    recall = metrics.attention_recall(cost_curve(importance, ranking), counts)  # [L, H]
    return AttentionRecall(
        share=float(recall.mean()),
        kept_tokens=float(counts.double().mean()),
        cached_tokens=importance.shape[-1],
    )


def kept_record(
    setting: Setting,
    parts: Sequence[AttentionRecall],
    *,
    model: str,
    protocol: str,
    bootstrap: int,
    seed: int,
) -> Record:
    """One line of kept.jsonl: means over sequences, and the interval of the recall."""
    values = {("", str(number)): part.share for number, part in enumerate(parts)}
    interval = bootstrap_mean({None: values}, bounds=None, resamples=bootstrap, seed=seed)
    return {
        "model": model,
        **method_fields(setting.method),
        "protected": setting.protected,
        "protocol": protocol,
        "budget_spec": setting.spec,
        "kept": interval.mean,
        "low": max(0.0, interval.low),
        "high": min(1.0, interval.high),
        "kept_tokens": sum(part.kept_tokens for part in parts) / len(parts),
        "cached_tokens": sum(part.cached_tokens for part in parts) / len(parts),
        "sequences": len(parts),
    }
