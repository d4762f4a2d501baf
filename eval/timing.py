"""The batch-1 timing pass: seconds and bytes of one request, per method and budget.

Scored prompts run as one batch and tell nothing about cost; here every method and budget runs alone
on a few prompts. A fixed number of tokens is decoded, whatever the model answers. Floating-point
operations are those of matrix products and attention, which torch counts on the first prompt.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from eval.methods import Method
from eval.prepared_run import PreparedRun
from eval.prompts import Prompt
from eval.record_fields import tokens_per_head
from eval.results.record_schemas import TIMING_ROWS
from eval.results.records import Record, merge_records
from eval.runner import Runner, measure_future_attention, select_for_methods
from kvp.hf import EvictingCache, Prefill
from kvp.hf.decoding import next_logits
from kvp.hf.shrink import gather
from kvp.progress import Progress
from kvp.scoring import ALL_QUERIES, Needs, needs_of

DECODED_TOKENS = 8
"""Decode steps timed per record; their median is reported."""
SECONDS = ("prefill_seconds", "evict_seconds", "decode_seconds_per_token")
"""Fields of a record: what the three stages of a request take."""
FLOPS = ("prefill_flops", "evict_flops", "decode_flops_per_token")
Meter = Callable[[Runner], AbstractContextManager[list[float]]]
"""A context around a piece of work; the list then holds what the work took."""


def measure_times(runner: Runner, prepared: PreparedRun, prompts: int, file: Path) -> None:
    """The timing pass, on the first `prompts` prompts of one kind, generated answers preferred."""
    generated = [evaluation for evaluation in prepared.work if not evaluation.prompt.teacher_forced]
    prompt, protocol, methods = (generated or prepared.work)[0]
    alike = [other for other in prepared.prompts if other.teacher_forced == prompt.teacher_forced]
    bare = {it.at(it.budget, it.protection, False) for it in methods if it.protected}
    once = [method for method in methods if method not in bare]  # protection costs nothing
    merge_records(file, timing_records(runner, alike[:prompts], protocol, once), TIMING_ROWS)


def timing_records(
    runner: Runner, prompts: Sequence[Prompt], protocol: str, methods: Sequence[Method]
) -> list[Record]:
    """One record per method: the (lower) median over the prompts of everything measured.

    `by_prompt` holds the seconds of every prompt, in order. FLOPs are those of the first prompt.
    """
    # Counted first: the first run of anything pays for start-up.
    counted = _measure_prompt(runner, prompts[0], protocol, methods, _count_flops, FLOPS)
    with Progress("timing", len(prompts)) as progress:
        rounds = [
            _measure_prompt(runner, prompt, protocol, methods, _timed, SECONDS)
            for prompt in progress.over(prompts)
        ]
    middle = statistics.median_low(prompt.cached_tokens(protocol) for prompt in prompts)
    return [
        {
            "model": runner.config.model_name,
            **method.fields,
            "protocol": protocol,
            "budget_spec": method.budget_spec,
            "budget": None if method.budget is None else method.tokens(middle),
            "prompts": len(prompts),
            **{name: statistics.median_low(run[name] for run in measured) for name in measured[0]},
            **{name: count[name] for name in FLOPS},
            "by_prompt": {name: [values[name] for values in measured] for name in SECONDS},
        }
        for method, count, *measured in zip(methods, counted, *rounds, strict=True)
    ]


@torch.inference_mode()
def _measure_prompt(
    runner: Runner,
    prompt: Prompt,
    protocol: str,
    methods: Sequence[Method],
    meter: Meter,
    fields: Sequence[str],
) -> list[dict[str, float]]:
    """What every method takes; `fields` name what the meter measures of the stages."""
    ids = prompt.ids.to(runner.model.device)
    cached = prompt.cached_tokens(protocol)
    before = ids[None, : cached + prompt.fed_again(protocol)]
    prefills: dict[Hashable, tuple[Prefill, float]] = {}
    future: list[Tensor] | None = None
    results = []
    for method in methods:
        needs = needs_of(method.scorer) if method.scorer else Needs()
        if needs.future and future is None:
            whole = runner.prefill(prompt, protocol, Needs(queries=ALL_QUERIES))
            future = measure_future_attention(runner, prompt, whole)
        if needs.recorded not in prefills:
            with meter(runner) as took:
                start = runner.prefill(prompt, protocol, needs)
            prefills[needs.recorded] = start, took[0]
        start, prefill = prefills[needs.recorded]
        with meter(runner) as took:
            # Anew for every method, so that its time includes the extra passes that it needs.
            fresh = start.with_inputs(runner.model, before, runner.tokenizer)
            ((_, kept),) = select_for_methods(fresh, [method], future)
            cache = gather(start, [kept])
        sizes = {
            "prompt_tokens": prompt.encoded.prompt_length,
            "kept_tokens": tokens_per_head(kept),
            "cache_bytes": cache.nbytes,
        }
        decode = _decode(runner, cache, ids[cached:], cached, meter)
        results.append(sizes | dict(zip(fields, (prefill, took[0], decode), strict=True)))
    return results


def _decode(
    runner: Runner, cache: EvictingCache, feed: Tensor, position: int, meter: Meter
) -> float:
    tokens = feed[None]
    steps = []
    for _ in range(DECODED_TOKENS + 1):
        with meter(runner) as took:
            logits = next_logits(runner.model, tokens, cache, position, keep=1)
        steps += took
        position += tokens.shape[1]
        tokens = logits[:, -1:].argmax(-1)
    return statistics.median(steps[1:])


@contextmanager
def _timed(runner: Runner) -> Iterator[list[float]]:
    def now() -> float:
        if runner.model.device.type == "cuda":
            torch.cuda.synchronize(runner.model.device)
        return time.perf_counter()

    took: list[float] = []
    begin = now()
    yield took
    took.append(now() - begin)


@contextmanager
def _count_flops(_: Runner) -> Iterator[list[float]]:
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    took: list[float] = []
    with FlopCounterMode(display=False, custom_mapping={attention: _attention_flops}) as counter:
        yield took
    took.append(float(counter.get_total_flops()))


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object
) -> int:
    """FLOPs of attention, counted without regard to the mask, as torch counts other kernels."""
    batch, heads, tokens, width = query
    return 2 * batch * heads * tokens * key[2] * (width + value[3])
