"""Time of one decoded token with the full cache and with evicted ones, side by side.

    python -m benchmarks.decoding --out benchmarks/results/decoding.json

Two models: `nano`, the bundled one, and `wide`, 2 layers with the heads of Qwen2.5-7B (28 query and
4 KV heads, head_dim 128; random weights) and narrow projections, so that its time is the cache's.
`full` is transformers' `DynamicCache` with its own sdpa attention, `uniform` keeps the budget in
every head, `ragged` keeps as many tokens with heads of very different lengths, once per backend of
`kvp.ops.ragged_attention`. Caches are filled with random numbers: time does not depend on them.

Every case is a process of its own, on a CPU with one thread. In a round each cache is made anew and
decodes `--steps` tokens after two that are not counted (there the tails are made); caches take
turns at every token, so that other load on the machine slows all of them equally. `milliseconds` is
the median of a token, processor time in float32 on a CPU and wall time in bfloat16 on CUDA;
`fastest` the minimum, `speedup` the median of `full` over that of the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.measuring import Seconds, in_process, medians, timed, write_report

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel

CASES = "wide:8192,nano:512,nano:1024,nano:4096"
UNCOUNTED = 2  # tokens at the start of a round


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case in a process of its own and write the JSON file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _arguments(given)
    if args.child is not None:
        print(json.dumps(_measure(args.child, args)))
        return
    results = []
    for case in args.cases.split(","):
        for row in in_process("benchmarks.decoding", [*given, "--child", case]):
            print(json.dumps(row), flush=True)
            results.append(row)
    write_report(args, results=results)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cases", default=CASES, help="model:tokens seen, wide or nano")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backends", default="auto", help="of ragged_attention: auto, torch")
    parser.add_argument("--budget", type=float, default=0.125, help="share of the tokens kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24, help="tokens per cache and round")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", metavar="CASE")
    args = parser.parse_args(given)
    for case in args.cases.split(","):
        model, _, tokens = case.partition(":")
        if model not in ("wide", "nano") or not tokens.isdigit() or int(tokens) < 16:
            parser.error(f"--cases: {case!r} is not wide:TOKENS or nano:TOKENS, 16 or more")
    if not 0 < args.budget < 1:
        parser.error("--budget must be between 0 and 1")
    return args


def _measure(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per cache."""
    import torch

    device = args.device
    if device == "cpu":
        torch.set_num_threads(1)
    name, _, length = case.partition(":")
    tokens = int(length)
    torch.manual_seed(0)
    model = _model(name).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    makers = _makers(model, tokens, args)
    times: dict[str, list[Seconds]] = {label: [] for label in makers}
    for _ in range(args.rounds):
        caches = {label: make() for label, make in makers.items()}
        for step in range(UNCOUNTED + args.steps):
            for label, cache in caches.items():
                spent = _token(model, cache, label, device)
                if step >= UNCOUNTED:
                    times[label].append(spent)
    seconds = {label: [_clock(one, device) for one in taken] for label, taken in times.items()}
    full = statistics.median(seconds["full"])
    return [
        {
            "device": device,
            "model": name,
            "tokens": tokens,
            "cache": label,
            "milliseconds": round(1000 * statistics.median(of_cache), 3),
            "wall_milliseconds": round(1000 * medians(times[label])["seconds"], 3),
            "fastest": round(1000 * min(of_cache), 3),
            "speedup": round(full / statistics.median(of_cache), 3),
        }
        for label, of_cache in seconds.items()
    ]


def _clock(taken: Seconds, device: str) -> float:
    return taken.processor if device == "cpu" else taken.wall


def _token(model: PreTrainedModel, cache: Cache, label: str, device: str) -> Seconds:
    """Time of one token."""
    import torch

    model.set_attn_implementation("sdpa" if label == "full" else "kvp")
    chosen = label.partition(":")[2]
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    triton = "kvp.ops.ragged_attention.has_triton"
    backend: Any = patch(triton, lambda: False) if chosen == "torch" else nullcontext()
    with torch.no_grad(), backend:
        return timed(lambda: model(token, past_key_values=cache, use_cache=True), device)[1]


def _model(name: str) -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from kvp.hf import load_model

    if name == "nano":
        model: PreTrainedModel = load_model("nano")[0]
        return model
    config = Qwen2Config(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=28,
        num_key_value_heads=4, head_dim=128, vocab_size=1000, max_position_embeddings=2**20,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def _makers(
    model: PreTrainedModel, tokens: int, args: argparse.Namespace
) -> dict[str, Callable[[], Cache]]:
    """Name of each cache -> how a fresh one is made, after `tokens` tokens of random content."""
    import torch
    from transformers import DynamicCache

    from kvp.hf.cache import EvictingCache

    config = model.config
    heads, layers = config.num_key_value_heads, config.num_hidden_layers
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape, like = (2, layers, 1, heads, tokens, width), next(model.parameters())
    keys, values = torch.randn(shape, dtype=like.dtype, device=like.device)
    budget = max(1, round(args.budget * tokens))
    even = [torch.rand(1, heads, tokens).argsort(-1)[..., :budget] for _ in range(layers)]
    uneven = [_uneven(heads, tokens, budget) for _ in range(layers)]

    def full() -> Cache:
        cache = DynamicCache()
        for index in range(layers):
            cache.update(keys[index].clone(), values[index].clone(), index)
        return cache

    def evicted(indices: list[Tensor]) -> Callable[[], Cache]:
        return lambda: EvictingCache.select(list(keys), list(values), indices, seen=tokens)

    backends = args.backends.split(",")
    ragged = {f"ragged:{backend}": evicted(uneven) for backend in backends}
    return {"full": full, "uniform": evicted(even)} | ragged


def _uneven(heads: int, tokens: int, budget: int) -> Tensor:
    """Indices [1, H, longest] of `heads * budget` tokens, -1 after a head's last one.

    Shares of the heads are drawn between 1 and 6.
    """
    import torch

    shares = 1 + 5 * torch.rand(heads)
    counts = (shares / shares.sum() * budget * heads).long().clamp(1, tokens)
    for head in range(heads):  # what rounding and clamping left over
        counts[head] = (counts[head] + budget * heads - counts.sum()).clamp(1, tokens)
    order = torch.rand(1, heads, tokens).argsort(-1)[..., : int(counts.max())]
    beyond = torch.arange(order.shape[-1]) >= counts[None, :, None]
    return order.masked_fill(beyond, -1)


if __name__ == "__main__":
    main()
