"""The size of a ranker for estimates of cost, and how fast rankers train here.

A step on random tokens is measured: forward, a loss as cheap as the listwise one, backward. What is
left out: the optimiser, whose operations are counted (Muon, `train.optim.muon`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap

import torch

from kvp.costs import Plan, RankerSize
from policies.ranker import HeadRankers, head_shapes, parameters_per_head
from policies.ranker_spec import RankerSpec

_NEWTON_SCHULZ = 5
"""Iterations of an optimiser step."""
_FLOPS = {"cpu": 2e10, "cuda": 1e13}
"""Operations of a measured step, about."""
_ROUNDS = 3
"""Steps of which the fastest counts, so that other work of the machine is left out."""


def size_of_ranker(spec: RankerSpec) -> RankerSize:
    """Count the weights, operations and activations of one ranker."""
    shapes = head_shapes(spec)
    matrices = [
        shape
        for name, shape in shapes.items()
        if name.endswith("_weight") and len(shape) == 2 and shape[1] > 1
    ]
    products = sum(rows * columns for rows, columns in matrices)
    return RankerSize(
        parameters=parameters_per_head(spec),
        products=products,
        token_bytes=bytes_per_token(spec),
        update_flops=sum(starmap(_orthogonal_flops, matrices)),
    )


def bytes_per_token(spec: RankerSpec) -> int:
    """Bytes one head needs per token for activations and the temporaries of their backward pass.

    About 13 float32 vectors of the hidden width (10 were measured to be kept), the two inputs, and
    twice what the token adds to its neighbours.
    """
    taps = 2 * spec.neighbours + 1 if spec.neighbours else 0
    return 4 * (13 * spec.hidden + 2 * spec.head_dim + 2 * taps)


def ranker_flops_of(
    spec: RankerSpec, plan: Plan
) -> Callable[[torch.device, Callable[[], float]], float]:
    """`measured_ranker_flops` on the contexts of a step of a plan: of a device, by a clock."""

    def measured(device: torch.device, clock: Callable[[], float]) -> float:
        tokens = round(plan.training.contexts * plan.training.prefix(plan.lengths))
        return measured_ranker_flops(
            spec, heads=plan.heads, tokens=tokens, device=device, clock=clock
        )

    return measured


def measured_ranker_flops(
    spec: RankerSpec,
    *,
    heads: int,
    tokens: int,
    device: torch.device,
    clock: Callable[[], float],
) -> float:
    """Operations per second of a training step of rankers on contexts of so many tokens."""
    work = 6 * size_of_ranker(spec).products
    count = max(1, min(heads, int(_FLOPS[device.type] / (work * tokens))))
    tokens = max(64, min(tokens, int(_FLOPS[device.type] / work)))
    rankers = HeadRankers(spec, count).to(device)
    keys = torch.randn(count, tokens, spec.head_dim, device=device)
    positions = torch.arange(tokens, device=device)
    recent = None
    if spec.reads_queries:
        recent = torch.randn(count, tokens, spec.features_of("recent"), device=device)

    def step() -> None:
        scores = rankers(keys, keys, positions, tokens, recent, contexts=[tokens])
        (-scores.log_softmax(-1).mean(-1)).sum().backward()
        rankers.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(_ROUNDS + 1):
        start = clock()
        step()
        seconds.append(clock() - start)
    return work * tokens * count / max(min(seconds[1:]), 1e-9)


def _orthogonal_flops(rows: int, columns: int) -> float:
    """Operations of Newton and Schulz on a matrix: three products per iteration."""
    small, large = sorted((rows, columns))
    return _NEWTON_SCHULZ * (4.0 * small**2 * large + 2.0 * small**3)
