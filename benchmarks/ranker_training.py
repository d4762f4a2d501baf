"""Seconds and memory of one training step, part by part, every variant in its own process.

    python -m benchmarks.ranker_training --heads 112 --tokens 4500 --head_dim 128 --contexts 16 \
        --device cuda --out benchmarks/results/ranker_training-h100.json

The default shapes are those of the KVP paper: Qwen2.5-7B (28 layers of 4 KV heads, D = 128), caches
of 4,500 tokens, 16 contexts per step. Keys, values and importance are random: time does not depend
on them. The step is that of `train.ranker_training`, without Lightning, reading and
validation. Variants take turns, so that other work of the machine slows all of them equally.
`seconds` is the wall time of a step (median over steps and rounds), `processor_seconds` what its
threads computed: the number to compare on a busy CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import in_process, peak_bytes, write_report

if TYPE_CHECKING:  # the parent stays small: memory is that of the processes it starts
    from train.contexts import Context
    from train.ranker_training import RankerTraining

PARTS = ("forward", "loss", "backward", "clipping", "optimizer", "averaging")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every number of heads, objective and form of the network, and write the file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _parser().parse_args(given)
    if args.child is not None:
        heads, objective, network = args.child
        print(json.dumps(_measure(int(heads), objective, network, args)))
        return
    variants = list(
        product(args.heads.split(","), args.objective.split(","), args.network.split(","))
    )
    rounds: list[list[dict[str, Any]]] = [[] for _ in variants]
    for _ in range(args.rounds):
        for variant, measured in zip(variants, rounds, strict=True):
            child = [*given, "--child", *variant]
            measured.append(in_process("benchmarks.ranker_training", child, threads=args.threads))
    results = []
    for (heads, objective, network), measured in zip(variants, rounds, strict=True):
        record: dict[str, Any] = {"heads": int(heads), "objective": objective, "network": network}
        record |= {key: statistics.median(run[key] for run in measured) for key in measured[0]}
        record["paper_minutes"] = record["seconds"] * args.paper_steps / 60
        print(json.dumps(record), flush=True)
        results.append(record)
    write_report(args, results=results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--heads", default="112", help="KV heads; several numbers, several rows")
    parser.add_argument("--tokens", type=int, default=4500)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--preset", choices=["paper", "fourier"], default="paper")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--optimizer", choices=["adamw", "muon"], help="default: the preset's")
    parser.add_argument("--objective", default="rloo,listwise,exact")
    parser.add_argument("--network", default="loop,stacked")
    parser.add_argument("--steps", type=int, default=3, help="steps measured per process")
    parser.add_argument("--rounds", type=int, default=1, help="processes per variant")
    parser.add_argument("--paper_steps", type=int, default=4000, help="for `paper_minutes`")
    parser.add_argument("--activation_gb", type=float, default=8.0, help="as for kvp-train")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", nargs=3, metavar=("HEADS", "OBJECTIVE", "NETWORK"))
    return parser


def _measure(
    heads: int, objective: str, network: str, args: argparse.Namespace
) -> dict[str, float]:
    """Medians over steps in seconds, in all and by part, and memory in GB (after a warm-up)."""
    import torch

    torch.set_num_threads(args.threads)
    module = _training(heads, objective, network, args)
    clock = _Clock(args.device)
    optimizer: Any = module.configure_optimizers()["optimizer"]
    before = module.rankers.register_forward_pre_hook(lambda *_: clock.enter("forward"))
    after = module.rankers.register_forward_hook(lambda *_: clock.leave())
    for step in range(args.steps + 1):
        _step(module, optimizer, clock, step)
    before.remove()
    after.remove()
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else peak_bytes()
    return clock.medians() | {"peak_gb": peak / 1e9}


def _step(module: RankerTraining, optimizer: Any, clock: _Clock, step: int) -> None:  # noqa: ANN401
    """One step, as Lightning makes `train.ranker_training` take it."""
    from train.optim import update_average

    with clock.step():
        with clock.part("loss"):  # less what the forward pass takes of it
            loss = module.training_step(step, 0)["loss"]
        with clock.part("backward"):
            loss.backward()
        with clock.part("clipping"):
            module.configure_gradient_clipping()
        with clock.part("optimizer"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with clock.part("averaging"):
            update_average(module.average, module.rankers, 0.99)


class _Clock:
    """Seconds of steps and of their parts; the first step is forgotten."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._steps: list[dict[str, float]] = []
        self._part: str | None = None
        self._entered = 0.0

    def now(self) -> float:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        self._steps.append(dict.fromkeys(PARTS, 0.0))
        wall, processor = self.now(), time.process_time()
        yield
        self._steps[-1]["seconds"] = self.now() - wall
        self._steps[-1]["processor_seconds"] = time.process_time() - processor

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._part, start = name, self.now()
        yield
        self._steps[-1][name] += self.now() - start

    def enter(self, name: str) -> None:
        """Begin a part within another one."""
        self._entered = self.now()

    def leave(self) -> None:
        """End it; in the backward pass, where activations are made again, it is part of that."""
        if self._part == "loss":
            seconds = self.now() - self._entered
            self._steps[-1]["forward"] += seconds
            self._steps[-1]["loss"] -= seconds

    def medians(self) -> dict[str, float]:
        measured = self._steps[1:]
        return {name: statistics.median(step[name] for step in measured) for name in measured[0]}


def _training(
    heads: int,
    objective: Any,  # noqa: ANN401
    network: str,
    args: argparse.Namespace,
) -> RankerTraining:
    """The training of random rankers on random contexts, all of the same length."""
    from dataclasses import replace
    from typing import cast

    import torch

    from kvp.store import SequenceRecord
    from policies.ranker import HeadRankers, RankerSpec
    from train.contexts import ContextSource
    from train.ranker_training import RankerTraining
    from train.recipe import PRESETS

    sizes: dict[str, Any] = {"hidden": args.hidden, "contexts": args.contexts, "min_prefix": 1}
    sizes |= {"compress_prompt": 0.0, "compress_context": 1.0, "compress_uniform": 0.0}
    preset = PRESETS[args.preset]
    sizes["optimizer"] = args.optimizer or preset.optimizer
    recipe = replace(preset, objective=objective, **sizes)
    spec = RankerSpec(
        head_dim=args.head_dim,
        architecture=recipe.architecture,
        hidden=recipe.hidden,
        max_positions=recipe.max_positions,
        reference_length=args.tokens,
    )
    rankers = HeadRankers(spec, heads, torch.Generator().manual_seed(0)).to(args.device)
    length = args.tokens + 1
    record = SequenceRecord(
        index=0,
        id="random",
        task="random",
        split="train",
        length=length,
        context_length=args.tokens,
        prompt_length=args.tokens,
        token_ids=tuple(range(length)),
    )
    return RankerTraining(
        rankers,
        recipe,
        cast("ContextSource", _RandomContexts(heads, args)),
        [record],
        seed=0,
        activation_bytes=args.activation_gb * 1e9,
        stacked=network == "stacked",
    )


class _RandomContexts:
    """Replaces a source of contexts: one context, made once, for every compression point."""

    def __init__(self, heads: int, args: argparse.Namespace) -> None:
        import torch

        from train.contexts import Context

        self.device = torch.device(args.device)
        random = torch.Generator(self.device).manual_seed(0)
        shape = (heads, args.tokens, args.head_dim)
        self._context = Context(
            keys=torch.randn(shape, generator=random, device=self.device),
            values=torch.randn(shape, generator=random, device=self.device),
            positions=torch.arange(args.tokens, device=self.device),
            length=args.tokens,
            importance=torch.rand(shape[:2], generator=random, device=self.device).pow(8),
        )

    def context(self, point: object) -> Context:
        return self._context


if __name__ == "__main__":
    main()
