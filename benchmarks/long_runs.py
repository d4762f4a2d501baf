"""Memory of long runs: does it stay flat, and are answers those of single calls?

    python -m benchmarks.long_runs --model FOLDER --out benchmarks/results/long_runs.json

`answer` decodes 20,000 tokens with an eviction every 64; `turns` is a conversation of 200 turns in
one cache; in `threads` 8 threads share one model, and their answers must be those of one call after
the other; `collect` records 1,000 prompts. Each is a process of its own; every second it notes its
resident memory in MiB. FILE keeps the parts that are there and not run; each has its own settings
and machine. `--draw PNG` draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from contextvars import copy_context
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

import kvp
from benchmarks.measuring import in_process, machine, noted, timed, write_json
from kvp import evicting, load_model

MODULE, SETTINGS = "benchmarks.long_runs", ("model", "policy", "scale")
POLICY, TEXT = "smollm2-135m-instruct", "The grass is green. The sky is blue. The sun is yellow. "


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every part in a process of its own and write the JSON file."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--policy", default=POLICY)
    parser.add_argument("--parts", default="answer,turns,threads,collect")
    parser.add_argument("--scale", type=float, default=1.0, help="share of tokens, turns, prompts")
    parser.add_argument("--draw", type=Path, help="draw --out into this PNG, run nothing")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", metavar="PART")
    args = parser.parse_args(given)
    if args.child:
        with redirect_stdout(sys.stderr):  # what programs say
            found = _measured(args.child, args)
        print(json.dumps(found))
    elif args.draw:
        _draw(json.loads(args.out.read_text()), args.draw)
    else:
        known = json.loads(args.out.read_text()) if args.out.exists() else {"results": {}}
        failed = known.setdefault("failed", {})
        for part in args.parts.split(","):
            failed.pop(part, None)
            with noted(failed, part):
                known["results"][part] = in_process(MODULE, [*given, "--child", part])
            write_json(args.out, known)


def _measured(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """What a part found, its seconds, and the process's memory each second in MiB."""
    memory: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(pages * os.sysconf("SC_PAGE_SIZE") // 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found, took = timed(lambda: PARTS[part](args))
    finally:
        ended.set()
        watcher.join()
    told = {"machine": machine(), "settings": {name: vars(args)[name] for name in SETTINGS}}
    return {"mib": memory, **found, "seconds": round(took.wall), **told}


def _answer(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(args.model)
    prompt, tokens = tokenizer(60 * TEXT, return_tensors="pt"), round(20_000 * args.scale)
    with evicting(model, "snapkv", 512, every=64) as kept:
        out = model.generate(**prompt, max_new_tokens=tokens, eos_token_id=None, do_sample=False)
    return {"tokens": out.shape[1], "cache_bytes": kept.nbytes}


def _turns(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(args.model)
    cache, ids = DynamicCache(config=model.config), torch.zeros(1, 0, dtype=torch.long)
    with evicting(model, args.policy, 512, allocator="ada") as kept:
        for turn in range(round(200 * args.scale)):
            said = [{"role": "user", "content": f"{TEXT}What is {turn} and {turn + 1} together?"}]
            asked = tokenizer.apply_chat_template(
                said, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            ids = torch.cat([ids, asked], dim=1)
            ids = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)
    return {"turns": round(200 * args.scale), "tokens": ids.shape[1], "cache_bytes": kept.nbytes}


def _threads(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = load_model(args.model)
    told = [f"The code of gate {n} is {7919 * n}. {30 * TEXT}The code of" for n in range(1, 9)]
    prompts = [f"{30 * TEXT}{fact} gate {n} is" for n, fact in enumerate(told, 1)]

    def answer(text: str) -> list[int]:
        ids = tokenizer(text, return_tensors="pt")
        return list(model.generate(**ids, max_new_tokens=32, do_sample=False)[0].tolist())

    rounds, equal = max(1, round(10 * args.scale)), 0
    with evicting(model, args.policy, "12.5%", allocator="ada"):
        alone = [answer(text) for text in prompts]
        for _ in range(rounds):
            with ThreadPoolExecutor(8) as pool:
                runs = [pool.submit(copy_context().run, answer, text) for text in prompts]
                together = [run.result() for run in runs]
            equal += sum(one == other for one, other in zip(alone, together, strict=True))
    return {"answers": 8 * rounds, "equal": equal}


def _collect(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        kvp.collect(
            model=args.model, dtype="bfloat16", tasks="niah_single_2", length=256,
            answers="reference", train=round(1000 * args.scale), validation=1,
            out=f"{folder}/traces",
        )  # fmt: skip
    return {"prompts": round(1000 * args.scale)}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "answer": _answer, "turns": _turns, "threads": _threads, "collect": _collect,
}  # fmt: skip


def _draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="share of the run, %", ylabel="resident memory, MiB")
    for part, row in report["results"].items():
        share = [100 * second / len(row["mib"]) for second in range(len(row["mib"]))]
        axes.plot(share, row["mib"], label=part)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
