"""Seconds and memory of one training step, part by part, every variant in its own process.

    python -m benchmarks.ranker_training --heads 112 --tokens 4500 --head_dim 128 --contexts 16 \
        --device cuda --out ranker_training.json

The default shapes are those of the KVP paper: Qwen2.5-7B (28 layers of 4 KV heads, D = 128), caches
of 4,500 tokens, 16 contexts per step. Keys, values and importance are random: time does not depend
on them. The step is that of `train.training`, without Lightning, reading and validation.
Variants take turns, so that other work of the machine slows all of them equally. `seconds` is the
wall time of a step (median over steps and rounds), `processor_seconds` what its threads computed:
the number to compare on a busy CPU. The flags of docs/performance.md take three minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.measuring import (
    Stopwatch,
    build_parser,
    noted,
    peak_bytes,
    run_in_process,
    timed,
    write_report,
)

if TYPE_CHECKING:  # the parent stays small: memory is that of the processes it starts
    from torch.optim import Optimizer

    from train.training import RankerTraining


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every number of heads, objective and form of the network, and write the file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(given)
    if args.child is not None:
        heads, objective, network = args.child
        print(json.dumps(_measure(int(heads), objective, network, args)))
        return
    widths = {
        shape: shape.partition(":")[2] or str(args.head_dim) for shape in args.heads.split(",")
    }
    variants = product(widths, args.objective.split(","), args.network.split(","))
    rounds: dict[tuple[str, str, str], list[dict[str, Any]]] = {each: [] for each in variants}
    failed: dict[str, str] = {}
    for _ in range(args.rounds):
        for (shape, *rest), measured in rounds.items():
            child = [*given, "--head_dim", widths[shape], "--child", shape.partition(":")[0], *rest]
            with noted(failed, " ".join([shape, *rest])):
                found = run_in_process("benchmarks.ranker_training", child, threads=args.threads)
                print(json.dumps({"of": [shape, *rest], **found}), flush=True)
                measured.append(found)
    results = []
    for (shape, objective, network), measured in rounds.items():
        record: dict[str, Any] = {"heads": int(shape.partition(":")[0]), "objective": objective}
        record |= {"network": network, "head_dim": int(widths[shape])}
        if measured:
            record |= {key: statistics.median(run[key] for run in measured) for key in measured[0]}
            results.append(record)
    write_report(args, results=results, failed=failed)


def _parser() -> argparse.ArgumentParser:
    parser = build_parser(
        __doc__, tokens=4500, head_dim=128, contexts=16, hidden=256, threads=1,
        objective="rloo,listwise,exact", network="loop,stacked",
    )  # fmt: skip
    parser.add_argument("--heads", default="112", help="KV heads, or KV heads:head_dim; several")
    parser.add_argument("--preset", choices=["paper", "fourier"], default="paper")
    parser.add_argument("--steps", type=int, default=3, help="steps measured per process")
    parser.add_argument("--rounds", type=int, default=1, help="processes per variant")
    parser.add_argument("--activation_gb", type=float, default=8.0, help="as for kvp train")
    parser.add_argument("--child", nargs=3, metavar=("HEADS", "OBJECTIVE", "NETWORK"))
    return parser


def _measure(
    heads: int, objective: str, network: str, args: argparse.Namespace
) -> dict[str, float]:
    """Medians over steps in seconds, in all and by part, and memory in GB (after a warm-up)."""
    import torch

    torch.set_num_threads(args.threads)
    module = _training(heads, objective, network, args)
    optimizer: Any = module.configure_optimizers()["optimizer"]
    steps = [_step(module, optimizer, step, args.device) for step in range(args.steps + 1)][1:]
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else peak_bytes()
    found = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    return found | {"peak_gb": peak / 1e9}


def _step(module: RankerTraining, optimizer: Optimizer, step: int, device: str) -> dict[str, float]:
    """Seconds of a step, as Lightning makes `train.training` take it, and of its parts.

    Where activations are made again, in the backward pass, they are part of that.
    """
    from train.learning.optim import update_average

    watch, spent = Stopwatch(device), {}
    with patch.object(module.rankers, "forward", watch.around(module.rankers.forward)):
        output, spent["loss"] = timed(lambda: module.training_step(step, 0), device)
    for name, call in {
        "backward": output["loss"].backward,
        "clipping": module.configure_gradient_clipping,
        "optimizer": optimizer.step,
        "clearing": partial(optimizer.zero_grad, set_to_none=True),
        "averaging": partial(update_average, module.average, module.rankers, 0.99),
    }.items():
        spent[name] = timed(call, device)[1]
    parts = {"forward": watch.total.wall} | {name: taken.wall for name, taken in spent.items()}
    parts["loss"] -= watch.total.wall
    processor = sum(taken.processor for taken in spent.values())
    return parts | {"seconds": sum(parts.values()), "processor_seconds": processor}


def _training(heads: int, objective: str, network: str, args: argparse.Namespace) -> RankerTraining:
    """The training of random rankers on random contexts, all of the same length."""
    from dataclasses import replace

    import torch

    from kvp.store import SequenceRecord
    from policies.ranker import HeadRankers, RankerSpec
    from train.recipe import PRESETS
    from train.training import RankerTraining

    sizes: dict[str, Any] = {"hidden": args.hidden, "contexts": args.contexts, "min_prefix": 2}
    sizes |= {"compress_prompt": 0.0, "compress_context": 1.0, "compress_uniform": 0.0}
    recipe = replace(PRESETS[args.preset], objective=objective, **sizes)
    spec = RankerSpec(
        head_dim=args.head_dim,
        architecture=recipe.architecture,
        hidden=recipe.hidden,
        reference_length=args.tokens,
    )
    rankers = HeadRankers(spec, heads, torch.Generator().manual_seed(0)).to(args.device)
    length = args.tokens + 1
    record = SequenceRecord(
        index=0, id="random", task="random", split="train", length=length,
        context_length=args.tokens, prompt_length=args.tokens, token_ids=tuple(range(length)),
    )  # fmt: skip
    module = RankerTraining(
        rankers, recipe, _random_contexts(heads, args), [record], seed=0,
        activation_bytes=args.activation_gb * 1e9,
    )  # fmt: skip
    forward: Any = partial(rankers.forward, stacked=network == "stacked")
    rankers.forward = forward
    return module


def _random_contexts(heads: int, args: argparse.Namespace) -> SimpleNamespace:
    """In place of a source of contexts: one context, made once, for every compression point."""
    import torch

    from train.data.contexts import RankingContext

    device = torch.device(args.device)
    random = torch.Generator(device).manual_seed(0)
    shape = (heads, args.tokens, args.head_dim)
    context = RankingContext(
        keys=torch.randn(shape, generator=random, device=device),
        values=torch.randn(shape, generator=random, device=device),
        importance=torch.rand(shape[:2], generator=random, device=device).pow(8),
    )
    return SimpleNamespace(device=device, context=lambda point: context)


if __name__ == "__main__":
    main()
