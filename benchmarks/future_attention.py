"""Time and memory of future attention against sequence length, every form in its own process.

    python benchmarks/future_attention.py --out benchmarks/results/future_attention.json

One KV head of Qwen2.5-7B (G = 7 query heads, D = 128), three workloads: `cut`, the label of a cache
compressed in mid sequence, `grid`, all queries summed in 48 intervals, and `reply`, the largest
attention after mid sequence, where the last quarter of all queries writes a reply and the others
count a fifth. Forms take turns, so
that other load on the machine slows all of them equally. `seconds` is the median over rounds of the
medians of their repeats, `fastest` the minimum of all repeats: the speed of an idle machine;
`processor_seconds` (of all threads) are comparable where other programs run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine

if TYPE_CHECKING:  # the parent stays small: memory is that of the processes it starts
    from torch import Tensor

GROUP, WIDTH, INTERVALS = 7, 128, 48
READING = 0.2
"""What queries count that write no reply, as in the label max_reply_attention."""
FORMS = {
    "naive": "the whole [G, queries, T] matrix: multiply, mask, softmax, maximum, sum",
    "definition": "reference.py, 256 queries at a time",
    "blocked": "blocked.py, what CPUs use",
    "windows": "blocked.py twice, all queries and those of the reply (workload reply only)",
    "products": "the multiplications of `blocked` alone, in blocks of 64 queries",
    "triton": "kernel.py (CUDA only)",
    "flex": "flex_attention's log-sum-exp of the same queries (CUDA only): half of the work, as it "
    "can neither sum columns nor take the maximum over a group",
}
CUDA_ONLY = ("triton", "flex")


def main() -> None:
    """Measure every form at every length and write the JSON file."""
    args = _arguments()
    if args.child is not None:
        workload, length, form = args.child
        print(json.dumps(_measure(workload, int(length), form, args)))
        return
    results = []
    for workload in args.workloads.split(","):
        for length in map(int, args.lengths.split(",")):
            results += _turns(workload, length, args)
    settings = {"group": GROUP, "width": WIDTH, "intervals": INTERVALS, "rounds": args.rounds}
    limits = {"threads": args.threads, "device": args.device, "naive_gib": args.naive_gib}
    report = {"machine": machine(), "settings": settings | limits, "forms": FORMS}
    args.out.write_text(json.dumps(report | {"results": results}, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384,32768")
    parser.add_argument("--workloads", default="cut,grid,reply")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rounds", type=int, default=3, help="processes per form and length")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to repeat in a process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--naive-gib", type=float, default=8.0, help="skip naive above")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", nargs=3, metavar=("WORKLOAD", "LENGTH", "FORM"))
    args = parser.parse_args()
    if unknown := set(args.forms.split(",")) - set(FORMS):
        parser.error(f"--forms: no {', '.join(sorted(unknown))}; there are {', '.join(FORMS)}")
    return args


def _skipped(form: str, workload: str, naive_gib: float, args: argparse.Namespace) -> str | None:
    """Why a form is not measured; None where it is."""
    if form == "naive" and naive_gib > args.naive_gib:
        return f"needs about {naive_gib:.1f} GiB"
    if form in CUDA_ONLY and args.device == "cpu":
        return "needs --device cuda"
    if form == "windows" and workload != "reply":
        return "is for the workload reply"
    return None


def _turns(workload: str, length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record per form: medians over rounds in which the forms take turns."""
    queries = length if workload == "grid" else length - length // 2
    naive_gib = 3 * GROUP * queries * length * 4 / 2**30  # logits, masked logits, probabilities
    forms = args.forms.split(",")
    skipped = {form: _skipped(form, workload, naive_gib, args) for form in forms}
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in forms if not skipped[form]}
    for _ in range(args.rounds):
        for form, measured in runs.items():
            call = [sys.executable, __file__, *sys.argv[1:], "--child", workload, str(length), form]
            environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
            made = subprocess.run(call, env=environment, capture_output=True, text=True, check=True)
            measured.append(json.loads(made.stdout))
    records: list[dict[str, Any]] = []
    for form in forms:
        record: dict[str, Any] = {"workload": workload, "length": length, "form": form}
        if skipped[form]:
            record["skipped"] = skipped[form]
        else:
            record |= {
                key: statistics.median(run[key] for run in runs[form]) for key in runs[form][0]
            }
            record["fastest"] = min(run["fastest"] for run in runs[form])
            record["seconds_of_rounds"] = [run["seconds"] for run in runs[form]]
        record["load"] = os.getloadavg()[0]
        print(json.dumps(record), flush=True)
        records.append(record)
    return records


def _measure(workload: str, tokens: int, form: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds (median), MiB of working memory and of the whole process, and the result's sum."""
    import torch

    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    generator = torch.Generator().manual_seed(0)
    queries = 2 * torch.randn(GROUP, tokens, WIDTH, generator=generator)
    keys = torch.randn(tokens, WIDTH, generator=generator)
    queries, keys = queries.to(args.device), keys.to(args.device)
    if on_gpu:
        queries, keys = queries.bfloat16(), keys.bfloat16()
    compute = _forms()[form]
    compute(queries[:, :64], keys[:64], _edges(workload, 64), workload)  # loads libraries
    before = torch.cuda.memory_allocated() if on_gpu else _peak_bytes()
    edges = _edges(workload, tokens)
    compute(queries, keys, edges, workload)
    seconds: list[float] = []
    processor: list[float] = []
    while sum(seconds) < args.seconds or len(seconds) < 2:
        start, busy = time.perf_counter(), time.process_time()
        total = compute(queries, keys, edges, workload).double().sum().item()  # waits for a GPU
        processor.append(time.process_time() - busy)
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_gpu else _peak_bytes()
    return {
        "seconds": statistics.median(seconds),
        "fastest": min(seconds),
        "processor_seconds": statistics.median(processor),
        "working_mib": (peak - before) / 2**20,
        "peak_mib": peak / 2**20,
        "sum": total,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _edges(workload: str, tokens: int) -> list[int]:
    if workload in ("cut", "reply"):
        return [tokens // 2, tokens]
    return [tokens * index // INTERVALS for index in range(INTERVALS + 1)]


def _weights(keys: Tensor) -> Tensor:
    """What queries count in the workload `reply`, [T] float32."""
    import torch

    weights = torch.full((len(keys),), READING, device=keys.device)
    weights[_reply(len(keys)) :] = 1.0
    return weights


def _reply(tokens: int) -> int:
    return tokens - tokens // 4


def _forms() -> dict[str, Callable[[Tensor, Tensor, list[int], str], Tensor]]:
    """Every form as (queries [G, T, D], keys [T, D], edges, workload) -> [E, N] or [N] float32."""
    import torch

    from kvp.ops.future_attention import blocked, reference

    def naive(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
        start, tokens = edges[0], len(keys)
        logits: Tensor = queries[:, start:] @ keys.T / WIDTH**0.5
        index = torch.arange(tokens, device=keys.device)
        attention = logits.masked_fill(index > index[start:, None], -torch.inf).softmax(dim=-1)
        largest = attention.amax(dim=0)
        if workload == "cut":
            return largest[:, :start].sum(dim=0)
        if workload == "reply":
            return (largest[:, :start] * _weights(keys)[start:, None]).amax(dim=0)
        sums = [largest[low:high].sum(dim=0) for low, high in pairwise(edges)]
        return torch.stack(sums)

    def definition(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
        if workload == "cut":
            return reference.future_attention(queries, keys, edges[0])
        if workload == "reply":
            weights = _weights(keys)
            return reference.max_future_attention(queries, keys, edges[0], weights=weights)
        return reference.grid_attention(queries, keys, edges)

    def tiles(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
        return blocked.interval_attention(queries, keys, edges, **_options(keys, edges, workload))

    def products(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
        block = 64
        tile = keys.new_empty(GROUP * block * len(keys))
        for first in range(edges[0], len(keys), block):
            end = min(first + block, len(keys))
            out = tile[: GROUP * (end - first) * end].view(-1, end)
            block_queries = queries[:, first:end].reshape(-1, WIDTH)
            torch.mm(block_queries, keys[:end].T, out=out)
        return out

    return {
        "naive": naive,
        "definition": definition,
        "blocked": tiles,
        "windows": _windows,
        "products": products,
        "triton": _triton,
        "flex": _flex,
    }


def _options(keys: Tensor, edges: list[int], workload: str) -> dict[str, Any]:
    """Of `interval_attention`, for a workload."""
    if workload == "reply":
        return {"tokens": edges[0], "reduction": "max", "weights": _weights(keys)}
    return {"tokens": edges[0] if workload == "cut" else edges[-1]}


def _windows(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
    import torch

    from kvp.ops.future_attention import blocked

    reply = (_reply(len(keys)), len(keys))
    everyone, written = (
        blocked.interval_attention(queries, keys, part, edges[0], "max") for part in (edges, reply)
    )
    return torch.maximum(READING * everyone, written)


def _triton(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
    from kvp.ops.future_attention import kernel

    return kernel.interval_attention(queries, keys, edges, **_options(keys, edges, workload))


def _flex(queries: Tensor, keys: Tensor, edges: list[int], workload: str) -> Tensor:
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    start, tokens = edges[0], len(keys)

    def causal(batch: Tensor, head: Tensor, query: Tensor, token: Tensor) -> Tensor:
        return token <= query + start

    mask = create_block_mask(causal, None, None, tokens - start, tokens, device=str(keys.device))
    attend = torch.compile(flex_attention) if keys.is_cuda else flex_attention
    all_keys = keys[None, None]
    future = queries[None, :, start:]
    result: Any = attend(
        future,
        all_keys,
        all_keys,
        block_mask=mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    lse: Tensor = result[1].lse
    return lse


if __name__ == "__main__":
    main()
