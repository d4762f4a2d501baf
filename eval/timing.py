"""The batch-1 timing pass: seconds and bytes of one request, per method and budget.

Scored prompts run as one batch and tell nothing about cost; here every method and budget runs alone
on a few prompts. A fixed number of tokens is decoded, whatever the model answers. Floating-point
operations are those of matrix products and attention, which torch counts on the first prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eval.evaluate import Bench, Prompt, hindsight, keep, run_prefix, tokens_per_head
from eval.methods import Setting, method_fields
from eval.records import Record
from kvp.hf import EvictingCache, Prefill
from kvp.hf.evict import gather
from kvp.hf.prefill import next_logits
from kvp.progress import Progress
from kvp.scoring import Needs

DECODED_TOKENS = 8
"""Decode steps timed per record; their median is reported."""

SECONDS = ("prefill_seconds", "evict_seconds", "decode_seconds_per_token")
"""Measures that differ from run to run, so that a median needs an interval."""

FLOPS = {name: name.replace("seconds", "flops") for name in SECONDS}

Measures = dict[str, float]

ValueT = TypeVar("ValueT")


class Meter(Protocol):
    """A way to measure a piece of work."""

    def __call__(self, bench: Bench, work: Callable[[], ValueT], /) -> tuple[ValueT, float]:
        """Do the work; its result, and what it took."""


def timing_records(
    bench: Bench,
    prompts: Sequence[Prompt],
    protocol: str,
    settings: Sequence[Setting],
) -> list[Record]:
    """One record per setting: the (lower) median over the prompts of everything measured.

    `by_prompt` holds the seconds of every prompt, in the order of the prompts. FLOPs are those of
    the first prompt.
    """
    # Counted first: the first run of anything pays for start-up.
    counted = _measure_prompt(bench, prompts[0], protocol, settings, _count_flops)
    with Progress("timing", len(prompts)) as progress:
        rounds = [
            _measure_prompt(bench, prompt, protocol, settings, _timed)
            for prompt in progress.over(prompts)
        ]
    middle = statistics.median_low(prompt.boundary(protocol) for prompt in prompts)
    return [
        {
            "model": bench.config.model_name,
            **method_fields(setting.method),
            "protected": setting.protected,
            "protocol": protocol,
            "budget_spec": setting.spec,
            "budget": None if setting.budget is None else setting.tokens(middle),
            "prompts": len(prompts),
            **{name: statistics.median_low(one[name] for one in measured) for name in measured[0]},
            **{flops: count[name] for name, flops in FLOPS.items()},
            "by_prompt": {name: [values[name] for values in measured] for name in SECONDS},
        }
        for setting, count, *measured in zip(settings, counted, *rounds, strict=True)
    ]


@torch.inference_mode()
def _measure_prompt(
    bench: Bench, prompt: Prompt, protocol: str, settings: Sequence[Setting], meter: Meter
) -> list[Measures]:
    """What every setting takes, under the names of `SECONDS` whatever the meter measures."""
    ids = prompt.ids.to(bench.model.device)
    boundary = prompt.boundary(protocol)
    before = ids[None, : boundary + prompt.fed_again(protocol)]
    prefills: dict[tuple[int, int | None, bool], tuple[Prefill, float]] = {}
    future: list[Tensor] | None = None
    results = []
    for setting in settings:
        needs = setting.method.scorer.needs if setting.method.scorer else Needs()
        if needs.future and future is None:
            future = hindsight(bench, prompt, run_prefix(bench, prompt, protocol))
        recorded = needs.queries, needs.hidden_after, needs.every_state
        if recorded not in prefills:
            run = partial(bench.prefill, prompt, protocol, needs)
            prefills[recorded] = meter(bench, run)
        seen, prefill_seconds = prefills[recorded]
        evicting = partial(_evict, bench, seen, before, setting, future)
        (cache, kept), evict_seconds = meter(bench, evicting)
        nbytes = cache.nbytes
        results.append(
            {
                "prompt_tokens": prompt.encoded.prompt_length,
                "kept_tokens": tokens_per_head(kept),
                "cache_bytes": nbytes,
                "prefill_seconds": prefill_seconds,
                "evict_seconds": evict_seconds,
                "decode_seconds_per_token": _decode(bench, cache, ids[boundary:], boundary, meter),
            }
        )
    return results


def _evict(
    bench: Bench, seen: Prefill, ids: Tensor, setting: Setting, future: list[Tensor] | None
) -> tuple[EvictingCache, Tensor]:
    """Extra passes, scores, selection and gathering of one prompt; the full cache is gathered."""
    assert seen.observation is not None, "the prompt was just run"
    # Anew for every setting, so that its time includes the extra passes that it needs.
    fresh = Prefill.of(seen.observation, bench.model, ids, bench.tokenizer).inputs
    ((_, kept),) = keep(replace(seen, inputs=fresh), [setting], future)
    return gather(seen, [kept]), kept


def _decode(bench: Bench, cache: EvictingCache, feed: Tensor, position: int, meter: Meter) -> float:
    """What one token takes, the median of several."""
    tokens = feed[None]
    took = []
    for _ in range(DECODED_TOKENS + 1):
        step = partial(next_logits, bench.model, tokens, cache, position, keep=1)
        logits, one = meter(bench, step)
        took.append(one)
        position += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)
    return statistics.median(took[1:])


def _timed(bench: Bench, work: Callable[[], ValueT], /) -> tuple[ValueT, float]:
    def settle() -> None:
        if bench.model.device.type == "cuda":
            torch.cuda.synchronize(bench.model.device)

    settle()
    begin = time.perf_counter()
    result = work()
    settle()
    return result, time.perf_counter() - begin


def _count_flops(bench: Bench, work: Callable[[], ValueT], /) -> tuple[ValueT, float]:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={attention: _attention_flops}) as counter:
        result = work()
    return result, float(counter.get_total_flops())


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    """Of a whole mask, causal or not, as torch counts its other attention kernels."""
    batch, heads, tokens, width = query
    return 2 * batch * heads * tokens * key[2] * (width + value[3])
