"""Evaluate which tokens of requested needles policies keep: the values' digits, and others.

    python recipes/training/needles.py TRACES OBJECTIVES ARM [ARM ...]

Test sequences of nano's needle tasks with several needles, the question not seen, uniform budgets.
Prints, per task, arm and KV head, the share that is kept of the values' digits, of the 14 tokens
before each value, and of the last eighth of the cache (%, means over seeds and prompts).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

import kvp.nano
from kvp.budgets import parse_budgets
from kvp.ranking import Protection, keep_tokens
from kvp.store import TraceReader
from policies import load_policy
from train.data.compression_points import CompressionPoint
from train.data.contexts import Context, ContextSource

BUDGETS = parse_budgets("12.5%,25%")
BEFORE = 14
KEPT = ("digits", f"{BEFORE} before", "last eighth")
MANY = ("multikey", "multivalue", "multiquery")


def contexts_with_values(traces: Path) -> Iterator[tuple[str, Context, list[slice]]]:
    """Task, cache at the end of the context, and the tokens of the requested values."""
    tokenizer = AutoTokenizer.from_pretrained(kvp.nano.path())
    reader = TraceReader(traces)
    source = ContextSource(reader, memory_bytes=int(1e9))
    for record in reader.records("test"):
        if not any(name in record.task for name in MANY):
            continue
        point = CompressionPoint(
            sequence=record.index, prefix_length=record.context_length, stop=record.length
        )
        ids = list(record.token_ids[: record.context_length])
        values = []
        for value in record.references:
            digits = tokenizer.encode(value, add_special_tokens=False)
            starts = range(len(ids) - len(digits) + 1)
            values += [
                slice(i, i + len(digits)) for i in starts if ids[i : i + len(digits)] == digits
            ]
        yield record.task, source.context(point), values


def kept_shares(scores: Tensor, budget: int, values: list[slice]) -> Tensor:
    """Shares of digits, tokens before them and last tokens that are kept: [A, N] -> [3, A]."""
    kept = torch.zeros_like(scores).scatter_(1, keep_tokens(scores, budget, Protection()), 1)
    digits = torch.cat([kept[:, value] for value in values], dim=1)
    before = torch.cat(
        [kept[:, max(value.start - BEFORE, 0) : value.start] for value in values], dim=1
    )
    late = kept[:, -(kept.shape[1] // 8) :]
    return 100 * torch.stack([part.mean(1) for part in (digits, before, late)])


def main() -> None:
    """Print a table in Markdown."""
    traces, objectives, *arms = sys.argv[1:]
    if missing := [arm for arm in arms if not Path(objectives, "final", arm).exists()]:
        sys.exit(f"{objectives}: no policies {missing[0]!r}")
    policies = {
        arm: [
            load_policy(path).rankers
            for path in sorted(Path(objectives, "final", arm).glob("seed*"))
        ]
        for arm in arms
    }
    shares: dict[tuple[str, str, str], list[Tensor]] = defaultdict(list)
    for task, context, values in contexts_with_values(Path(traces)):
        for arm, seeds in policies.items():
            for rankers in seeds:
                with torch.no_grad():
                    scores = rankers(
                        context.keys, context.values, context.positions, context.length
                    )
                for budget in BUDGETS:
                    tokens = budget.tokens(context.length)
                    shares[task, str(budget), arm].append(kept_shares(scores, tokens, values))
    if not shares:
        sys.exit(f"{traces}: no test sequences of {', '.join(MANY)}")
    heads = len(next(iter(shares.values()))[0][0])
    print("| task | budget | policies | kept |", " | ".join(f"head {h}" for h in range(heads)), "|")
    print("|---|--:|---|---|" + "--:|" * heads)
    for (task, budget, arm), runs in sorted(shares.items()):
        for name, by_head in zip(KEPT, torch.stack(runs).mean(0), strict=True):
            columns = " | ".join(f"{share:.0f}" for share in by_head)
            print(f"| {task} | {budget} | {arm} | {name} | {columns} |")


if __name__ == "__main__":
    main()
