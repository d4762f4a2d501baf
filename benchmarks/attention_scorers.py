"""Processor time and memory of scorers that read recent queries, against the number of tokens.

    python -m benchmarks.attention_scorers --out benchmarks/results/attention_scorers.json

One layer of Qwen2.5-7B (4 KV heads, G = 7 query heads each, D = 128), one thread, float32. Form
`copied` multiplies queries [B, H, G, W, D] by keys [B, H, 1, N, D], where broadcasting copies the
keys G times; `folded` is what the scorers do (`kvp.ops.group_products`). Cases are the attention of
the last 1, 4, 32 or 64 queries, and `gvote`, a whole `GVote().score`. Every case runs in a process
of its own: `milliseconds` is the processor time of a call (minimum of the repeats), `working_mib`
what the process needed beyond keys and queries, `sum` a checksum of the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from benchmarks.measuring import in_process, peak_bytes, write_report

if TYPE_CHECKING:  # the parent stays small: memory is that of the processes it starts
    from torch import Tensor

HEADS, GROUP, WIDTH = 4, 7, 128
FORMS = ("copied", "folded")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case in both forms and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", default="8192,65536")
    parser.add_argument("--cases", default="1,4,32,64,gvote", help="windows, and gvote")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", nargs=3, metavar=("TOKENS", "CASE", "FORM"))
    given = sys.argv[1:] if arguments is None else list(arguments)
    args = parser.parse_args(given)
    if args.child is not None:
        tokens, case, form = args.child
        print(json.dumps(_measure(int(tokens), case, form, args.repeats)))
        return
    results = []
    for tokens in args.tokens.split(","):
        for case in args.cases.split(","):
            for form in FORMS:
                child = [*given, "--child", tokens, case, form]
                record = {"tokens": int(tokens), "case": case, "form": form}
                results.append(record | in_process("benchmarks.attention_scorers", child))
                print(json.dumps(results[-1]), flush=True)
    write_report(args, results=results)


def _measure(tokens: int, case: str, form: str, repeats: int) -> dict[str, float]:
    """Processor milliseconds, MiB beyond the inputs, and the sum of the result."""
    compute = _case(tokens, case)
    with ExitStack() as stack:
        if form == "copied":
            for module in ("policies.recent_attention", "policies.gvote"):
                stack.enter_context(patch(f"{module}.group_products", _copied))
        before = peak_bytes()
        seconds = []
        for _ in range(repeats):
            start = time.process_time()
            result = compute()
            seconds.append(time.process_time() - start)
    return {
        "milliseconds": round(1000 * min(seconds), 2),
        "working_mib": round((peak_bytes() - before) / 2**20, 1),
        "sum": float(result.double().sum()),
    }


def _case(tokens: int, case: str) -> Callable[[], Tensor]:
    """The call to measure, on random inputs; loads every library first."""
    import torch

    from kvp.rope import Rope
    from kvp.scoring import HiddenStates, View
    from policies.gvote import GVote
    from policies.recent_attention import recent_attention

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, HEADS, tokens, WIDTH, generator=generator)
    queries = torch.randn(1, HEADS * GROUP, 64, WIDTH, generator=generator)
    recent_attention(queries[:, :, :2], keys[:, :, :16], 2)
    if case != "gvote":
        return lambda: recent_attention(queries, keys, int(case))
    weight = torch.randn(16, HEADS * GROUP * WIDTH, generator=generator)

    def project(hidden: Tensor) -> Tensor:
        return torch.unflatten(hidden @ weight, -1, (-1, WIDTH)).transpose(1, 2)

    view = View(
        layer=0, keys=keys, values=keys, budget=tokens // 8, queries=queries[:, :, -1:],
        positions=torch.arange(tokens)[None],
        rope=Rope(frequencies=1e6 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))),
        hidden=HiddenStates(mean=torch.zeros(1, 16), variance=torch.ones(1, 16), project=project),
    )  # fmt: skip
    return lambda: GVote().score(view)


def _copied(queries: Tensor, keys: Tensor) -> Tensor:
    product: Tensor = queries @ keys[..., None, :, :].mT
    return product


if __name__ == "__main__":
    main()
