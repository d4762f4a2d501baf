"""Prompts read in pieces, with the cache shrunk after each, next to the same prompts read at once.

    python -m benchmarks.prompt_pieces --policies FOLDER --out benchmarks/results/prompt_pieces.json

Two parts. Answers: RULER prompts, answered by `generate` inside `evicting(prefill_chunk=)`, for no
chunk (one eviction, after the whole prompt) and for every chunk of `--chunks`. Length: the same
prompts as long as `--long` says, read in pieces of the smallest chunk: most tokens that a KV head
held on average while they were read, and bytes of the cache at the end.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.long_answers import FULL, by_tasks, held_per_head
from benchmarks.measuring import write_report
from benchmarks.prompts import bench_of
from eval.evaluate import Bench
from eval.tasks import Prompt
from kvp.config_groups import split_list
from kvp.hf import evicting
from kvp.hf.cache import EvictingCache
from kvp.ranking import Protection
from kvp.scoring import Scorer
from policies import load_policy, make_scorer

METHODS = "ring,random,streaming_llm,snapkv,tova,h2o,keydiff,lagkv"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both parts and write the JSON file."""
    given = _parser().parse_args(arguments)
    scorers = [(name, make_scorer(name)) for name in split_list(given.methods)]
    scorers += [(folder, load_policy(folder)) for folder in split_list(given.policies)]
    answers, lengths = list(_answers(given, scorers)), list(_lengths(given, scorers))
    write_report(given, answers=answers, lengths=lengths)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--policies", default="", help="folders of policies, as further methods")
    parser.add_argument("--tasks", default="niah_single_1,niah_multikey_1,vt_0shot")
    parser.add_argument("--prompts", type=int, default=12, help="of each task")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--budgets", default="128,256", help="tokens per KV head")
    parser.add_argument("--chunks", default="128,256,512", help="tokens of a piece")
    parser.add_argument("--long", default="2048,8192,32768", help="tokens of the longer prompts")
    parser.add_argument("--out", required=True)
    return parser


def _answers(
    given: argparse.Namespace, scorers: Sequence[tuple[str, Scorer]]
) -> Iterator[dict[str, Any]]:
    """Scores of every method, budget and chunk."""
    bench, prompts = bench_of(given)
    settings: list[tuple[str, Scorer | None, int | None, int | None]] = [(FULL, None, None, None)]
    for budget in map(int, split_list(given.budgets)):
        for chunk in [None, *map(int, split_list(given.chunks))]:
            settings += [(name, scorer, budget, chunk) for name, scorer in scorers]
    for name, scorer, budget, chunk in settings:
        scores = [(prompt, _score(bench, prompt, scorer, budget, chunk)) for prompt in prompts]
        row = {"method": name, "budget": budget, "chunk": chunk, **by_tasks(scores)}
        print(json.dumps(row), flush=True)
        yield row


def _score(
    bench: Bench, prompt: Prompt, scorer: Scorer | None, budget: int | None, chunk: int | None
) -> float:
    ids = prompt.ids[None]
    options: dict[str, Any] = {"max_new_tokens": bench.max_new_tokens, "do_sample": False}
    options["attention_mask"] = torch.ones_like(ids)
    if scorer is None or budget is None:
        answer = bench.model.generate(ids, **options)
    else:
        with evicting(bench.model, scorer, budget, Protection(), prefill_chunk=chunk):
            answer = bench.model.generate(ids, **options)
    return prompt.score(bench.text(answer[0, ids.shape[1] :].tolist()))


def _lengths(
    given: argparse.Namespace, scorers: Sequence[tuple[str, Scorer]]
) -> Iterator[dict[str, Any]]:
    """What is held while longer and longer prompts are read."""
    budget, chunk = int(split_list(given.budgets)[0]), int(split_list(given.chunks)[0])
    task = split_list(given.tasks)[0]
    for length in map(int, split_list(given.long)):
        options = {**vars(given), "length": length, "tasks": task, "prompts": 1}
        bench, (prompt,) = bench_of(argparse.Namespace(**options))
        for name, scorer in scorers:
            row = {"method": name, "tokens": len(prompt.ids), "budget": budget, "chunk": chunk}
            row |= _held(bench, prompt, scorer, budget, chunk)
            print(json.dumps(row), flush=True)
            yield row


@torch.inference_mode()
def _held(
    bench: Bench, prompt: Prompt, scorer: Scorer, budget: int, chunk: int
) -> dict[str, float]:
    """Most tokens per KV head in any pass, new ones included, and bytes after the last."""
    model, cache, most = bench.model, EvictingCache(), 0.0

    def count(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, held_per_head(cache) + kwargs["input_ids"].shape[1])

    with evicting(model, scorer, budget, Protection(), prefill_chunk=chunk):
        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            model(input_ids=prompt.ids[None], past_key_values=cache, use_cache=True)
        finally:
            hook.remove()
    return {"most_tokens_per_head": most, "bytes": cache.nbytes}


if __name__ == "__main__":
    main()
