"""Cost of scoring a layer's tokens, as a share of that layer's prefill.

    python -m benchmarks.ranker_scoring --out benchmarks/results/ranker_scoring.json

One decoder layer of Qwen2.5-7B (hidden 3,584, 28 query and 4 KV heads, D = 128, intermediate
18,944; random weights) prefills N tokens; rankers of several sizes and heuristics score its cache.
On a CPU everything runs on one thread in float32, on CUDA in bfloat16. Each repeat times the
prefill and then every scorer, and divides: `share` is the median over repeats, `share_low` and
`share_high` the extremes. Seconds are processor time on a CPU and wall time on CUDA; they contain
the recording of the queries that a scorer reads. `flops` counts matrix products only, two per
multiplication and addition, of the prefill with causal attention. `bytes` is the whole policy of
28 layers. Inputs are random: time does not depend on them.

Forms of the network: `loop` and `stacked` (`policies.network`), `compiled`, which is `stacked`
through `torch.compile` (a C++ compiler on a CPU; `first_seconds` of wall time are the first call's,
compiling included; its products are those of `stacked`, and not counted).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import in_process, timed, write_report

if TYPE_CHECKING:
    from transformers import Qwen2Config

    from kvp.scoring import Scorer, View

LAYERS = 28
NETWORKS = ("loop", "stacked", "compiled")
HEURISTICS = ("snapkv:kvpress", "keydiff", "expected_attention")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every number of tokens in a process of its own and write the JSON file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    args = parser.parse_args(given)
    if unknown := set(args.network.split(",")) - set(NETWORKS):
        parser.error(f"--network: no {', '.join(sorted(unknown))}; there are {', '.join(NETWORKS)}")
    if args.child is not None:
        print(json.dumps(_measure(args.child, args)))
        return
    found = []
    for tokens in args.tokens.split(","):
        found.append(in_process("benchmarks.ranker_scoring", [*given, "--child", tokens]))
        for record in found[-1]["scorers"]:
            print(json.dumps({"tokens": int(tokens)} | record), flush=True)
    write_report(args, results=found)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--hidden", default="16,32,64,128,256", help="widths of the rankers")
    parser.add_argument("--neighbours", default="0,31")
    parser.add_argument("--weights", default="float32,bfloat16", help="formats of the weights")
    parser.add_argument("--network", default="loop", help="some of loop, stacked, compiled")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--calls", type=int, default=3, help="calls of a scorer per repeat")
    parser.add_argument("--model_width", type=int, default=3584, help="less for a quick try")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", type=int, metavar="TOKENS")
    return parser


def _measure(tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    """Prefill and scorers at one number of tokens."""
    import torch

    if args.device == "cpu":
        torch.set_num_threads(1)
    config = _config(args.model_width)
    prefill = _prefill(config, tokens, args.device)
    view = _view(config, tokens, args.device)
    scorers = list(_scorers(config, args))
    calls = [partial(_score, scorer, view) for _, scorer in scorers]
    seconds: list[list[float]] = [[] for _ in calls]
    of_prefill = []
    prefill()
    for (described, _), call in zip(scorers, calls, strict=True):
        start = time.perf_counter()
        call()
        if described.get("network") == "compiled":
            described["first_seconds"] = round(time.perf_counter() - start, 1)
    for _ in range(args.repeats):
        of_prefill.append(_seconds(prefill, args.device))
        for call, found in zip(calls, seconds, strict=True):
            every = [_seconds(call, args.device) for _ in range(args.calls)]
            found.append(statistics.median(every))
    flops = _prefill_flops(config, tokens)
    return {
        "tokens": tokens,
        "prefill_seconds": statistics.median(of_prefill),
        "prefill_flops": flops,
        "scorers": [
            described
            | _compared(found, of_prefill)
            | ({} if described.get("network") == "compiled" else _products(call, flops))
            for (described, _), call, found in zip(scorers, calls, seconds, strict=True)
        ],
    }


def _compared(seconds: list[float], of_prefill: list[float]) -> dict[str, float]:
    shares = [mine / whole for mine, whole in zip(seconds, of_prefill, strict=True)]
    return {
        "milliseconds": round(1000 * statistics.median(seconds), 2),
        "share": round(statistics.median(shares), 6),
        "share_low": round(min(shares), 6),
        "share_high": round(max(shares), 6),
    }


def _products(call: Callable[[], object], of_prefill: int) -> dict[str, float]:
    """Work of a call's matrix products, and as a share of the prefill's."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        call()
    flops = counter.get_total_flops()
    return {"flops": flops, "flop_share": round(flops / of_prefill, 6)}


def _prefill_flops(config: Qwen2Config, tokens: int) -> int:
    """Work of a layer's matrix products, with causal attention."""
    width, heads = config.hidden_size, config.num_attention_heads
    head_dim = width // heads
    weights = 2 * width * width + 2 * width * config.num_key_value_heads * head_dim
    weights += 3 * width * config.intermediate_size
    pairs = tokens * (tokens + 1) // 2
    return 2 * tokens * weights + 4 * pairs * width


def _seconds(call: Callable[[], object], device: str) -> float:
    took = timed(call, device)[1]
    return took.processor if device == "cpu" else took.wall


def _config(width: int) -> Qwen2Config:
    """Shapes of Qwen2.5-7B; of another width, its proportions and heads of 128 channels."""
    from transformers import Qwen2Config

    return Qwen2Config(
        hidden_size=width, num_attention_heads=width // 128, num_key_value_heads=width // 896,
        intermediate_size=width * 37 // 7, num_hidden_layers=LAYERS, rope_theta=1e6,
        max_position_embeddings=32768, attn_implementation="sdpa",
    )  # fmt: skip


def _prefill(config: Qwen2Config, tokens: int, device: str) -> Callable[[], object]:
    """One layer's forward pass over N tokens, rotary embedding made before."""
    import torch
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        layer = Qwen2DecoderLayer(config, layer_idx=0).to(dtype).eval()
        states = torch.randn(1, tokens, config.hidden_size, dtype=dtype)
        positions = torch.arange(tokens)[None]
        embeddings = Qwen2RotaryEmbedding(config)(states, positions)
    forward = torch.no_grad()(layer)
    return partial(forward, states, position_embeddings=embeddings, attention_mask=None)


def _view(config: Qwen2Config, tokens: int, device: str) -> View:
    """A random cache of the layer with the queries of every token; scorers get what they need."""
    import torch

    from kvp.rope import Rope
    from kvp.scoring import View

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        keys, values = torch.randn(2, 1, config.num_key_value_heads, tokens, 128, dtype=dtype)
        return View(
            layer=0,
            keys=keys,
            values=values,
            positions=torch.arange(tokens)[None],
            budget=tokens // 8,
            queries=torch.randn(1, config.num_attention_heads, tokens, 128, dtype=dtype),
            rope=Rope(frequencies=1e6 ** (-torch.arange(64) / 64)),
        )


def _score(scorer: Scorer, view: View) -> object:
    """Record the queries that the scorer reads, as a prefill does, and score."""
    from dataclasses import replace

    import torch

    from kvp.hf.attention import QueryRecorder

    queries = None
    with torch.no_grad():
        if scorer.needs.queries:
            assert view.queries is not None
            recorder = QueryRecorder(scorer.needs.queries)
            recorder.record(0, view.queries)
            (queries,) = recorder.queries
        return scorer.score(replace(view, queries=queries))


def _scorers(config: Qwen2Config, args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any]]:
    """What is measured: how it is called in the file, and the scorer."""
    import torch

    from kvp.geometry import Geometry
    from policies import make_scorer
    from policies.learned import LearnedScorer
    from policies.ranker import HeadRankers, RankerSpec
    from policies.ranker_spec import INPUTS, TOKEN_INPUTS

    for name in HEURISTICS:
        yield {"scorer": name}, make_scorer(name)
    heads = config.num_key_value_heads
    geometry = Geometry(
        layers=1, query_heads=config.num_attention_heads, kv_heads=heads, head_dim=128
    )
    sizes = (map(int, text.split(",")) for text in (args.hidden, args.neighbours))
    ways = (args.weights.split(","), args.network.split(","))
    for hidden, reach, recent, weights, network in product(*sizes, (False, True), *ways):
        inputs = INPUTS if recent else TOKEN_INPUTS
        spec = RankerSpec(head_dim=128, hidden=hidden, neighbours=reach, inputs=inputs)
        rankers = HeadRankers(spec, heads, torch.Generator().manual_seed(0))
        rankers = rankers.with_dtype(getattr(torch, weights)).requires_grad_(False)
        size = sum(tensor.nbytes for tensor in rankers.state_dict().values()) * LAYERS
        forward = partial(rankers.forward, stacked=network != "loop")
        if network == "compiled":
            forward = torch.compile(forward)
        rankers.forward = forward  # type: ignore[method-assign]
        described = {"scorer": "kvp", "hidden": hidden, "neighbours": reach, "recent": recent}
        described |= {"weights": weights, "network": network, "bytes": size}
        yield described, LearnedScorer(rankers=rankers, geometry=geometry)


if __name__ == "__main__":
    main()
