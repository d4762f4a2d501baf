"""Time of one decoded token with the full cache and with evicted ones, side by side.

    python -m benchmarks.decoding --out FILE

The page says what the models and caches are (`benchmarks.performance.parts`). `wide` has narrow
projections, so that its time is the cache's. `uniform` has equal counts; `ragged` is measured once
per backend of `kvp.ops.ragged_attention`. Caches are filled with random numbers: time does not
depend on them.

Every case is a process of its own, on a CPU with one thread. In a round each cache is made anew and
decodes `--steps` tokens after two that are not counted (there the tails are made); caches take
turns at every token, so that other load on the machine slows all of them equally. `milliseconds` is
the median of a token, processor time in float32 on a CPU and wall time in bfloat16 on CUDA;
`fastest` the minimum, `speedup` the median of `full` over that of the cache. The cases of
docs/performance.md take half a minute on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measuring import (
    Seconds,
    build_parser,
    medians,
    rows_of,
    run_in_process,
    timed,
    write_report,
)
from kvp.ops.ragged_attention import RaggedLayout, StoredTokens, ragged_attention

if TYPE_CHECKING:
    from transformers import Cache

CASES = "wide:8192,nano:512,nano:1024,nano:4096"
UNCOUNTED = 2  # tokens at the start of a round
KEPT = 0.125
"""Share of the tokens that evicted caches keep."""
NAMES = ("attention", "nano", "wide", "smollm2-135m-instruct", "qwen2.5-7b")
Maker = Callable[[], Callable[[], object]]
"""Makes a fresh cache and returns a function that decodes a token with it."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case in a process of its own and write the JSON file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _arguments(given)
    if args.child is not None:
        print(json.dumps(_measure(args.child, args)))
        return
    results, failed = rows_of(
        args.cases.split(","),
        lambda case: run_in_process("benchmarks.decoding", [*given, "--child", case]),
    )
    write_report(args, results=results, failed=failed)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--cases", default=CASES, help="model:tokens seen")
    parser.add_argument("--backends", default="auto", help="of ragged_attention: auto, torch")
    parser.add_argument("--layers", type=int, default=0, help="of random models; 0: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="tokens per cache and round")
    parser.add_argument("--child", metavar="CASE")
    args = parser.parse_args(given)
    for case in args.cases.split(","):
        model, _, tokens = case.partition(":")
        if model not in NAMES or not tokens.isdigit() or int(tokens) < 16:
            parser.error(f"--cases: {case!r} is not MODEL:TOKENS, 16 or more; MODEL is of {NAMES}")
    return args


def _measure(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each cache of a case."""
    device = args.device
    if device == "cpu":
        torch.set_num_threads(1)
    name, tokens = case.split(":")[0], int(case.split(":")[1])
    torch.manual_seed(0)
    if name == "attention":
        makers = _attention_makers(tokens, args)
    else:
        makers = _cache_makers(name, tokens, args)
    times: dict[str, list[Seconds]] = {label: [] for label in makers}
    for _ in range(args.rounds):
        calls = {label: make() for label, make in makers.items()}
        for step in range(UNCOUNTED + args.steps):
            for label, call in calls.items():
                spent = _timed(call, label.partition(":")[2], device)
                if step >= UNCOUNTED:
                    times[label].append(spent)
    clock = "processor" if device == "cpu" else "wall"
    seconds = {label: [getattr(one, clock) for one in taken] for label, taken in times.items()}
    full = statistics.median(seconds["full"])
    told = {"device": device, "model": name, "tokens": tokens}
    return [
        {
            **told,
            "cache": label,
            "milliseconds": round(1000 * statistics.median(of_cache), 5),
            "wall_milliseconds": round(1000 * medians(times[label])["seconds"], 5),
            "fastest": round(1000 * min(of_cache), 5),
            "speedup": round(full / statistics.median(of_cache), 3),
        }
        for label, of_cache in seconds.items()
    ]


def _timed(call: Callable[[], object], backend: str, device: str) -> Seconds:
    """Time of one token with a backend of `kvp.ops.ragged_attention`, `torch` or any other."""
    triton = "kvp.ops.ragged_attention.has_triton"
    chosen: Any = patch(triton, lambda: False) if backend == "torch" else nullcontext()
    with torch.no_grad(), chosen:
        return timed(call, device)[1]


def _attention_makers(tokens: int, args: argparse.Namespace) -> dict[str, Maker]:
    """By label, makers of the attention of one token to random keys and values of one layer."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    query = torch.randn(1, 28, 1, 128).to(args.device, dtype)
    keys, values = torch.randn(2, 1, 4, tokens, 128, dtype=dtype, device=args.device)
    budget = max(1, round(KEPT * tokens))
    layout = RaggedLayout(_counts(4, tokens, budget)[None].to(args.device))
    flat = [tensor.flatten(0, 2)[: layout.stored] for tensor in (keys, values)]
    stored = StoredTokens(*flat, layout, *(tensor[:, :, :1] for tensor in (keys, values)))

    def dense(kept: int) -> Maker:
        some = [tensor[:, :, :kept].contiguous() for tensor in (keys, values)]
        return lambda: lambda: scaled_dot_product_attention(query, *some, enable_gqa=True)

    def ragged() -> Callable[[], object]:
        return lambda: ragged_attention(query, stored)

    makers = {"full": dense(tokens), "uniform": dense(budget)}
    return makers | {f"ragged:{backend}": ragged for backend in args.backends.split(",")}


def _cache_makers(name: str, tokens: int, args: argparse.Namespace) -> dict[str, Maker]:
    """By label, makers of a model's caches after `tokens` tokens, with random content."""
    from transformers import DynamicCache

    from benchmarks.models import model_of
    from kvp.hf.cache import EvictingCache

    model = model_of(name, args.device, args.layers)
    config = model.config
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape, like = (2, layers, 1, heads, tokens, width), next(model.parameters())
    keys, values = torch.randn(shape, dtype=like.dtype, device=like.device)
    budget = max(1, round(KEPT * tokens))
    even = [torch.rand(1, heads, tokens).argsort(-1)[..., :budget] for _ in range(layers)]
    uneven = [_uneven(heads, tokens, budget) for _ in range(layers)]
    token = torch.ones(1, 1, dtype=torch.int64, device=args.device)

    def full() -> Cache:
        cache = DynamicCache()
        for index in range(layers):
            cache.update(keys[index].clone(), values[index].clone(), index)
        return cache

    def decoding(cache: Cache, attention: str) -> Callable[[], object]:
        def decode() -> object:
            model.set_attn_implementation(attention)
            return model(token, past_key_values=cache, use_cache=True)

        return decode

    def evicted(slots: list[Tensor]) -> Maker:
        gather = partial(EvictingCache.gather, list(keys), list(values), slots, seen=tokens)
        return lambda: decoding(gather(), "kvp")

    makers = {"full": lambda: decoding(full(), "sdpa"), "uniform": evicted(even)}
    return makers | {f"ragged:{backend}": evicted(uneven) for backend in args.backends.split(",")}


def _counts(heads: int, tokens: int, budget: int) -> Tensor:
    """Tokens of each head [H], `heads * budget` in all; their shares are drawn between 1 and 6."""
    shares = 1 + 5 * torch.rand(heads)
    counts = (shares / shares.sum() * budget * heads).long().clamp(1, tokens)
    for head in range(heads):  # what rounding and clamping left over
        counts[head] = (counts[head] + budget * heads - counts.sum()).clamp(1, tokens)
    return counts


def _uneven(heads: int, tokens: int, budget: int) -> Tensor:
    """Indices [1, H, longest] of so many tokens, -1 after a head's last one."""
    counts = _counts(heads, tokens, budget)
    order = torch.rand(1, heads, tokens).argsort(-1)[..., : int(counts.max())]
    beyond = torch.arange(order.shape[-1]) >= counts[None, :, None]
    return order.masked_fill(beyond, -1)


if __name__ == "__main__":
    main()
