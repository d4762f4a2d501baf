"""Time and memory of future attention against sequence length, every form in its own process.

    python -m benchmarks.future_attention --out FILE

The label of a cache compressed in mid sequence, for one KV head of Qwen2.5-7B (G = 7 query heads,
D = 128). Forms take turns, so that other load on the machine slows all of them equally. `seconds`
is the median over rounds of the medians of their repeats, `fastest` the minimum of all repeats: the
speed of an idle machine; `processor_seconds` (of all threads) are comparable where other programs
run. The flags of docs/performance.md take a minute and a half on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import (
    Seconds,
    build_parser,
    medians,
    noted,
    peak_bytes,
    run_in_process,
    timed,
    write_report,
)

if TYPE_CHECKING:  # the parent stays small: memory is that of the processes it starts
    from torch import Tensor

GROUP, WIDTH = 7, 128
LONG = 2
"""A first call that takes this many times `--seconds` is not repeated."""
FORMS = {
    "naive": "the whole [G, queries, T] matrix: multiply, mask, softmax, maximum, sum",
    "blocked": "future_attention.py, what CPUs use",
    "triton": "future_attention_kernel.py (CUDA only)",
    "flex": "flex_attention's log-sum-exp of the same queries (CUDA only): half of the work, as it "
    "can neither sum columns nor take the maximum over a group",
}
CUDA_ONLY = ("triton", "flex")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every form at every length and write the JSON file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = _arguments(given)
    if args.child is not None:
        length, form = args.child
        print(json.dumps(_measure(int(length), form, args)))
        return
    results: list[dict[str, Any]] = []
    for length in map(int, args.lengths.split(",")):
        results += _turns(length, args, given, results)
    write_report(args, results=results)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = build_parser(__doc__, lengths="512,1024,2048,4096,8192,16384,32768", threads=2)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--rounds", type=int, default=3, help="processes per form and length")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to repeat in a process")
    parser.add_argument("--naive-gib", type=float, default=8.0, help="skip naive above")
    parser.add_argument("--limit", type=float, default=600.0, help="skip calls of more seconds")
    parser.add_argument("--child", nargs=2, metavar=("LENGTH", "FORM"))
    args = parser.parse_args(given)
    if unknown := set(args.forms.split(",")) - set(FORMS):
        parser.error(f"--forms: no {', '.join(sorted(unknown))}; there are {', '.join(FORMS)}")
    return args


def _skipped(
    form: str, length: int, args: argparse.Namespace, before: Sequence[dict[str, Any]]
) -> str | None:
    """Why a form is not measured; None where it is. Its work grows as the square of the length."""
    gib = 3 * GROUP * (length - length // 2) * length * 4 / 2**30  # logits, masked, probabilities
    if form == "naive" and gib > args.naive_gib:
        return f"needs about {gib:.1f} GiB"
    if form in CUDA_ONLY and args.device == "cpu":
        return "needs --device cuda"
    for row in [row for row in before if row["form"] == form and "fastest" in row][-1:]:
        if row["fastest"] * (length / row["length"]) ** 2 > args.limit:
            took = f"{row['length']} tokens took {row['fastest']:.3g} s"
            return f"not run: {took}, more would be over {args.limit:g} s"
    return None


def _turns(
    length: int, args: argparse.Namespace, given: Sequence[str], before: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One record per form: medians over rounds in which the forms take turns.

    `before` are the records of shorter lengths, which tell what is too long.
    """
    forms = args.forms.split(",")
    skipped = {form: _skipped(form, length, args, before) for form in forms}
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in forms if not skipped[form]}
    failed: dict[str, str] = {}
    for _ in range(args.rounds):
        for form in [form for form in runs if form not in failed]:
            child = [*given, "--child", str(length), form]
            with noted(failed, form):
                found = run_in_process("benchmarks.future_attention", child, threads=args.threads)
                runs[form].append(found)
    skipped |= {form: f"failed: {line}" for form, line in failed.items()}
    records: list[dict[str, Any]] = []
    for form in forms:
        record: dict[str, Any] = {"length": length, "form": form}
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


def _measure(tokens: int, form: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds (median), MiB of working memory and of the whole process, and the result's sum."""
    import torch

    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(GROUP, tokens, WIDTH, generator=generator).mul_(2)  # no second copy
    keys = torch.randn(tokens, WIDTH, generator=generator)
    queries, keys = queries.to(args.device), keys.to(args.device)
    if on_gpu:
        queries, keys = queries.bfloat16(), keys.bfloat16()
    compute = _forms()[form]
    compute(queries[:, :64], keys[:64], 32)  # loads libraries
    before = torch.cuda.memory_allocated() if on_gpu else peak_bytes()

    def call() -> float:
        return float(compute(queries, keys, tokens // 2).double().sum())

    if on_gpu:
        call()  # compiles for these shapes
    total, first = timed(call, args.device)
    times: list[Seconds] = []
    while sum(one.wall for one in times) < args.seconds or len(times) < 2:
        if first.wall > LONG * args.seconds:  # once is enough: start-up is nothing next to it
            times = [first]
            break
        times.append(timed(call, args.device)[1])
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_bytes()
    memory = {"working_mib": (peak - before) / 2**20, "peak_mib": peak / 2**20}
    return {**medians(times), "fastest": min(one.wall for one in times), **memory, "sum": total}


def _forms() -> dict[str, Callable[[Tensor, Tensor, int], Tensor]]:
    """Every form as (queries [G, T, D], keys [T, D], tokens cached N) -> [N] float32."""
    from kvp.ops import future_attention, future_attention_kernel

    def of_all_queries(form: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, int], Tensor]:
        return lambda queries, keys, cached: form(queries, keys, cached, len(keys), cached)

    return {
        "naive": of_all_queries(future_attention.received_attention),
        "blocked": of_all_queries(future_attention.receive_by_tiles),
        "triton": of_all_queries(future_attention_kernel.receive_by_kernel),
        "flex": _flex,
    }


def _flex(queries: Tensor, keys: Tensor, start: int) -> Tensor:
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    tokens = len(keys)

    def causal(batch: Tensor, head: Tensor, query: Tensor, token: Tensor) -> Tensor:
        return token <= query + start

    shape: Any = (None, None, tokens - start, tokens, str(keys.device))
    mask = create_block_mask(causal, *shape, _compile=keys.is_cuda)  # else all of it is in memory
    attend = torch.compile(flex_attention) if keys.is_cuda else flex_attention
    all_keys = keys[None, None]
    future = queries[None, :, start:]
    lse_too = AuxRequest(lse=True)
    result: Any = attend(
        future, all_keys, all_keys, block_mask=mask, enable_gqa=True, return_aux=lse_too
    )
    lse: Tensor = result[1].lse
    return lse


if __name__ == "__main__":
    main()
