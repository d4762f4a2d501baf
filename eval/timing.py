"""The batch-1 timing pass: what one request costs, in seconds and bytes, per method and budget.

Scored rows run as one batch and say nothing about cost; here every method and budget runs alone on
a few prompts. Answers are decoded for a fixed number of tokens, whatever the model says.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from eval.decode import forward
from eval.methods import Cell, method_fields, protection_of
from eval.prompts import Bench, hindsight, prefill
from eval.rows import Row
from eval.tasks import Prompt
from kvp.hf import EvictingCache, Observation, observe, views
from kvp.ranking import keep_tokens

DECODED_TOKENS = 8
"""Decode steps timed per row; their median is reported."""

TIMING_KEY = ("model", "method", "variant", "protected", "policy", "protocol", "budget_spec")

Measures = dict[str, float]

ValueT = TypeVar("ValueT")


def timing_rows(
    bench: Bench, prompts: Sequence[Prompt], protocol: str, cells: Sequence[Cell]
) -> list[Row]:
    """One row per cell: the (lower) median over the prompts of everything measured."""
    measured: dict[int, list[Measures]] = {number: [] for number in range(len(cells))}
    for place, prompt in enumerate(prompts):
        if place == 0:  # the first run of anything pays for start-up
            _time_prompt(bench, prompt, protocol, cells[:1])
        for number, values in enumerate(_time_prompt(bench, prompt, protocol, cells)):
            measured[number].append(values)
    middle = statistics.median_low(prompt.boundary(protocol) for prompt in prompts)
    return [
        {
            "model": bench.config.model,
            **method_fields(cell.method),
            "protected": cell.protected,
            "protocol": protocol,
            "budget_spec": None if cell.budget is None else str(cell.budget),
            "budget": None if cell.budget is None else cell.budget.tokens(middle),
            "prompts": len(prompts),
            **{
                name: statistics.median_low(values[name] for values in measured[number])
                for name in measured[number][0]
            },
        }
        for number, cell in enumerate(cells)
    ]


@torch.inference_mode()
def _time_prompt(
    bench: Bench, prompt: Prompt, protocol: str, cells: Sequence[Cell]
) -> list[Measures]:
    ids = prompt.ids.to(bench.model.device)
    boundary = prompt.boundary(protocol)
    feed = ids[boundary:]
    observations: dict[int, tuple[Observation, float]] = {}
    future: list[Tensor] | None = None
    results = []
    for cell in cells:
        needs = cell.method.scorer.needs if cell.method.scorer else None
        queries = needs.queries if needs else 0
        if needs and needs.future and future is None:
            future = hindsight(bench, prompt, prefill(bench, prompt, protocol))
        if queries not in observations:
            observations[queries] = _timed(
                bench,
                partial(
                    observe,
                    bench.model,
                    ids[None, :boundary],
                    queries=queries,
                    last_logits=True,
                ),
            )
        observation, prefill_seconds = observations[queries]
        cache, evict_seconds = _timed(bench, partial(_evict, bench, observation, cell, future))
        held = cache.nbytes
        results.append(
            {
                "prompt_tokens": prompt.encoded.prompt_length,
                "cache_bytes": held,
                "prefill_seconds": prefill_seconds,
                "evict_seconds": evict_seconds,
                "decode_seconds_per_token": _decode_seconds(bench, cache, feed, boundary),
            }
        )
    return results


def _evict(
    bench: Bench, observation: Observation, cell: Cell, future: list[Tensor] | None
) -> EvictingCache:
    """Score, select and gather one row; the full cache is gathered whole."""
    boundary = observation.keys[0].shape[2]
    scorer = cell.method.scorer
    if scorer is None or cell.budget is None or cell.budget.tokens(boundary) >= boundary:
        heads = observation.keys[0].shape[1]
        every = torch.arange(boundary, device=bench.model.device).expand(1, heads, -1)
        indices = [every] * len(observation.keys)
    else:
        budget = cell.budget.tokens(boundary)
        protection = protection_of(bench.config, protected=cell.protected)
        indices = [
            keep_tokens(scorer.score(view), budget, protection)
            for view in views(observation, scorer.needs, budget, future)
        ]
    return EvictingCache.select(observation.keys, observation.values, indices, seen=boundary)


def _decode_seconds(bench: Bench, cache: EvictingCache, feed: Tensor, position: int) -> float:
    tokens = feed[None]
    seconds = []
    for _ in range(DECODED_TOKENS + 1):
        logits, took = _timed(
            bench,
            partial(forward, bench.model, tokens, cache, position, keep=1),
        )
        seconds.append(took)
        position += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)
    return statistics.median(seconds[1:])


def _timed(bench: Bench, work: Callable[[], ValueT]) -> tuple[ValueT, float]:
    def settle() -> None:
        if bench.model.device.type == "cuda":
            torch.cuda.synchronize(bench.model.device)

    settle()
    begin = time.perf_counter()
    result = work()
    settle()
    return result, time.perf_counter() - begin
