"""Eviction while a model answers: what is remembered, and what a long answer costs.

    python -m benchmarks.long_answers facts --out benchmarks/results/long_answers_facts.json
    python -m benchmarks.long_answers long --out benchmarks/results/long_answers_long.json

`facts`: the beginning of a needle prompt, with the needle in it, is the prompt; the rest of the
haystack is fed token by token, as if the model had written it, and every `--every` tokens the cache
is shrunk to the budget; then the question is read and answered, with no more eviction. Scores are
those of the task. The null methods are `ring` (the latest tokens), `random` and `random_pinned`
(the prompt, and random tokens after it). `long`: the model writes `--tokens` tokens by sampling;
tokens held per head, bytes and the presence of the first tokens are noted at every eviction.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.machine import machine
from benchmarks.prompts import bench_of
from eval.evaluate import Bench
from eval.stats import bootstrap_mean
from eval.tasks import Prompt
from kvp.config_groups import split_list
from kvp.errors import KvpError, UsageError
from kvp.hf import evicting, load_model
from kvp.hf.cache import EvictingCache
from kvp.hf.cache.base import EMPTY
from kvp.hf.generation import end_tokens, greedy
from kvp.ranking import Protection
from kvp.scoring import Scorer
from policies import load_policy, make_scorer

METHODS = "ring,random,random_pinned,streaming_llm,snapkv,tova,h2o,keydiff,knorm,lagkv"
FULL = "full"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one of the two and write the JSON file."""
    given = _parser().parse_args(arguments)
    rows = list(facts(given) if given.probe == "facts" else long_runs(given))
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    report = {"machine": machine(), "settings": settings, "results": rows}
    Path(given.out).write_text(json.dumps(report, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("probe", choices=["facts", "long"])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--policies", default="", help="folders of policies, as further methods")
    parser.add_argument("--budgets", default="128", help="tokens per KV head")
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tasks", default="niah_single_1,niah_single_2,niah_multikey_1")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--split", default="validation")
    parser.add_argument("--prompts", type=int, default=200, help="of each task, before the choice")
    parser.add_argument("--max_new_tokens", type=int, default=16)
    parser.add_argument("--first", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of a long answer")
    return parser


def _scorers(given: argparse.Namespace) -> list[tuple[str, Scorer]]:
    named = [(name, make_scorer(name)) for name in split_list(given.methods)]
    return named + [(folder, load_policy(folder)) for folder in split_list(given.policies)]


def facts(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Scores of every method and budget on the prompts whose needle is told first."""
    bench, prompts = bench_of(given)
    chosen = [prompt for prompt in prompts if _told_first(prompt, given.first)]
    if not chosen:
        raise UsageError(f"no prompt tells its needle in the first {given.first} tokens")
    ids, question = _aligned(chosen)
    settings: list[tuple[str, Scorer | None, str]] = [(FULL, None, "")]
    for budget in split_list(given.budgets):
        settings += [(name, scorer, budget) for name, scorer in _scorers(given)]
    for name, scorer, budget in settings:
        start = time.process_time()
        block = _block(bench.model, scorer, budget, given)
        scores = _answered(bench, chosen, ids, question, block, given)
        row = {
            "method": name, "budget": budget, "prompts": len(chosen), "tokens": ids.shape[1],
            **_mean(chosen, scores), "processor_seconds": round(time.process_time() - start, 1),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


def _told_first(prompt: Prompt, first: int) -> bool:
    return bool(prompt.evidence) and max(prompt.evidence) < first


def _aligned(prompts: Sequence[Prompt]) -> tuple[Tensor, int]:
    """Token ids [B, T] of equal length, cut before the question, and its longest length."""
    questions = [prompt.encoded.ids[prompt.encoded.context_length :] for prompt in prompts]
    length = min(prompt.encoded.prompt_length for prompt in prompts)
    rows = [
        [*prompt.encoded.ids[: length - len(question)], *question]
        for prompt, question in zip(prompts, questions, strict=True)
    ]
    return torch.tensor(rows), max(map(len, questions))


def _block(
    model: PreTrainedModel, scorer: Scorer | None, budget: str, given: argparse.Namespace
) -> AbstractContextManager[None]:
    if scorer is None:
        return nullcontext()
    return evicting(model, scorer, budget, Protection(), every=given.every)


@torch.inference_mode()
def _answered(
    bench: Bench,
    prompts: Sequence[Prompt],
    ids: Tensor,
    question: int,
    block: AbstractContextManager[None],
    given: argparse.Namespace,
) -> list[float]:
    """Scores of the answers: the first tokens as a prompt, single ones, then the question."""
    model, tokenizer = bench.model, bench.tokenizer
    cache = EvictingCache()
    stop = ids.shape[1] - question
    with block:
        told = ids[:, : given.first]
        model(input_ids=told, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for position in range(given.first, stop):
            model(
                input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True,
                position_ids=torch.full((len(ids), 1), position), logits_to_keep=1,
            )  # fmt: skip
    answers = greedy(
        model, cache, ids[:, stop:], stop, max_new_tokens=given.max_new_tokens,
        ends=end_tokens(model, tokenizer),
    )  # fmt: skip
    texts = [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
    return [prompt.score(text) for prompt, text in zip(prompts, texts, strict=True)]


def _mean(prompts: Sequence[Prompt], scores: Sequence[float]) -> dict[str, float]:
    """Mean over tasks, in percent, with its 95 % interval."""
    of_prompts = zip(prompts, scores, strict=True)
    units = {(prompt.task, str(index)): score for index, (prompt, score) in enumerate(of_prompts)}
    mean = bootstrap_mean({None: units})
    names = ("mean", "low", "high")
    return {name: round(100 * getattr(mean, name), 1) for name in names}


def long_runs(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What every method holds while the model writes one long answer."""
    model, tokenizer = load_model(given.model)
    ids = torch.tensor([tokenizer("Once upon a time")["input_ids"]])
    for budget in split_list(given.budgets):
        for name, scorer in _scorers(given):
            row = {"method": name, "budget": budget, "every": given.every, "tokens": given.tokens}
            try:
                block = _block(model, scorer, budget, given)
            except KvpError as refused:
                row["refused"] = str(refused)
            else:
                with block:
                    row |= _written(model, ids, given)
            print(json.dumps(row), flush=True)
            yield row


@torch.inference_mode()
def _written(model: PreTrainedModel, ids: Tensor, given: argparse.Namespace) -> dict[str, Any]:
    """Sample an answer; how much is held, in tokens per head and bytes."""
    generator, cache = torch.Generator().manual_seed(0), EvictingCache()
    start, most, nbytes, tokens, sinks = time.process_time(), 0.0, set[int](), ids, True
    for _ in range(given.tokens):
        output = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        shares = output.logits[:, -1].float().softmax(-1)
        tokens = torch.multinomial(shares, 1, generator=generator)
        held = [layer.positions for layer in cache.layers]
        counts = [int((positions < EMPTY).sum()) for positions in held]
        heads = sum(positions.shape[1] for positions in held)
        most = max(most, sum(counts) / heads)
        assert cache.turn is not None
        full = cache.get_seq_length() > cache.turn.budgets[0] + given.every
        if full and cache.turn.shrunk_at == cache.get_seq_length():
            nbytes.add(cache.nbytes)
            firsts = [(positions < Protection().sinks).sum(-1) for positions in held]
            sinks &= all(bool((first == Protection().sinks).all()) for first in firsts)
    return {
        "most_tokens_per_head": most, "bytes_after_evictions": sorted(nbytes),
        "first_tokens_held": sinks, "processor_seconds": round(time.process_time() - start, 1),
    }  # fmt: skip


if __name__ == "__main__":
    main()
