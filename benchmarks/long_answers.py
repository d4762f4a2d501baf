"""What is remembered of facts where the cache is shrunk while a model answers.

    python -m benchmarks.long_answers --out benchmarks/results/long_answers_facts.json
    python -m benchmarks.long_answers --told answer --tasks niah_multikey_1,vt_0shot --out FILE

The beginning of a RULER prompt is the prompt; the rest of the haystack is fed token by token, as if
the model had written it, and every `--every` tokens the cache is shrunk to the budget; then the
question is read and answered, with no more eviction. What is asked for was told in the prompt, or
(`--told answer`) after it: needles, and variables that are assigned one to the next (`vt_0shot`).
Scores are those of the task. The null methods are `ring` (the latest tokens), `random` and
`random_pinned` (the prompt, and random tokens after it).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measuring import write_report
from eval.config import EvalConfig
from eval.evaluate import Bench, Prompt
from eval.prepare import load_all
from eval.results.stats import bootstrap_mean
from kvp.data.task import TaskSettings
from kvp.errors import UsageError
from kvp.hf import evicting, load_model
from kvp.hf.cache import EvictingCache
from kvp.hf.prefill import decode_greedily, end_tokens
from kvp.program.names import split_list
from kvp.ranking import Protection
from kvp.scoring import Scorer
from policies import load_policy, make_scorer

METHODS = "ring,random,random_pinned,streaming_llm,snapkv,tova,h2o,keydiff,knorm,lagkv"
FULL = "full"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every method and write the JSON file."""
    given = _parser().parse_args(arguments)
    write_report(given, results=list(facts(given)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
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
    parser.add_argument("--told", choices=["prompt", "answer"], default="prompt")
    parser.add_argument("--most", type=int, default=24, help="prompts of each task, after it")
    return parser


def bench_of(given: argparse.Namespace) -> tuple[Bench, Sequence[Prompt]]:
    """Model and prompts of --model, --tasks, --length, --prompts, --split and --max_new_tokens."""
    model, tokenizer = load_model(given.model)
    settings: dict[str, Any] = {"split": given.split, "seed": 0, "length": given.length}
    requested = TaskSettings(tasks=split_list(given.tasks), count=given.prompts, **settings)
    prompts, _ = load_all(requested, tokenizer)
    bench = Bench(
        model=model, tokenizer=tokenizer,
        config=EvalConfig(
            model=given.model, dry_run=True, decode_batch=64,
            max_new_tokens=given.max_new_tokens, **settings,
        ),
    )  # fmt: skip
    return bench, prompts


def _scorers(given: argparse.Namespace) -> list[tuple[str, Scorer]]:
    named = [(name, make_scorer(name)) for name in split_list(given.methods)]
    return named + [(folder, load_policy(folder)) for folder in split_list(given.policies)]


def facts(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Scores of every method and budget on the prompts whose facts are told where `--told` says."""
    bench, prompts = bench_of(given)
    batches = [_batch(of_task, given) for of_task in _by_task(prompts)]
    settings: list[tuple[str, Scorer | None, str]] = [(FULL, None, "")]
    for budget in split_list(given.budgets):
        settings += [(name, scorer, budget) for name, scorer in _scorers(given)]
    for name, scorer, budget in settings:
        start = time.process_time()
        scores = []
        for batch in batches:
            block = _block(bench.model, scorer, budget, given)
            scores += _answered(bench, batch, block, given)
        row = {
            "method": name, "budget": budget, **by_tasks(scores),
            "processor_seconds": round(time.process_time() - start, 1),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


@dataclass(frozen=True)
class _Batch:
    """Prompts of one task, of equal length."""

    prompts: list[Prompt]
    ids: Tensor
    """[B, T] int64."""
    question: int
    """Tokens of the longest question; each prompt ends with its own."""


def _by_task(prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    tasks = dict.fromkeys(prompt.task for prompt in prompts)
    return [[prompt for prompt in prompts if prompt.task == task] for task in tasks]


def _batch(prompts: Sequence[Prompt], given: argparse.Namespace) -> _Batch:
    """The prompts that tell their facts in the right place, cut before the question."""
    length = min(prompt.encoded.prompt_length for prompt in prompts)
    rows, chosen = [], []
    for prompt in prompts:
        question = prompt.encoded.ids[prompt.encoded.context_length :]
        cut = length - len(question)
        first, last = (0, given.first) if given.told == "prompt" else (given.first, cut)
        if prompt.evidence and first <= min(prompt.evidence) <= max(prompt.evidence) < last:
            chosen.append((prompt, len(question)))
            rows.append([*prompt.encoded.ids[:cut], *question])
    if not rows:
        where = f"in the {given.told} (--first {given.first}, --prompts {given.prompts})"
        raise UsageError(f"no prompt of {prompts[0].task} tells its facts {where}")
    ids = torch.tensor(rows[: given.most], dtype=torch.int64)
    chosen = chosen[: given.most]
    question = max((tokens for _, tokens in chosen), default=0)
    return _Batch([prompt for prompt, _ in chosen], ids, question)


def _block(
    model: PreTrainedModel, scorer: Scorer | None, budget: str, given: argparse.Namespace
) -> AbstractContextManager[None]:
    if scorer is None:
        return nullcontext()
    return evicting(model, scorer, budget, Protection(), every=given.every)


@torch.inference_mode()
def _answered(
    bench: Bench, batch: _Batch, block: AbstractContextManager[None], given: argparse.Namespace
) -> list[tuple[Prompt, float]]:
    """Scores of the answers: the first tokens as a prompt, single ones, then the question."""
    model, ids = bench.model, batch.ids
    cache = EvictingCache()
    stop = ids.shape[1] - batch.question
    with block:
        told = ids[:, : given.first]
        model(input_ids=told, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for position in range(given.first, stop):
            model(
                input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True,
                position_ids=torch.full((len(ids), 1), position), logits_to_keep=1,
            )  # fmt: skip
    answers = decode_greedily(
        model, cache, ids[:, stop:], stop, max_new_tokens=given.max_new_tokens,
        ends=end_tokens(model, bench.tokenizer),
    )  # fmt: skip
    scored = zip(batch.prompts, answers, strict=True)
    return [(prompt, prompt.score(bench.text(answer))) for prompt, answer in scored]


def by_tasks(scores: Sequence[tuple[Prompt, float]]) -> dict[str, Any]:
    """Prompts, and mean scores in percent with 95 % intervals, over tasks and of each task."""
    units = {(prompt.task, str(number)): score for number, (prompt, score) in enumerate(scores)}
    tasks = dict.fromkeys(prompt.task for prompt, _ in scores)
    of_tasks = {
        task: _percent({unit: score for unit, score in units.items() if unit[0] == task})
        for task in tasks
    }
    return {"prompts": len(scores), **_percent(units), "tasks": of_tasks}


def _percent(units: Mapping[tuple[str, str], float]) -> dict[str, float]:
    mean = bootstrap_mean({None: dict(units)})
    names = ("mean", "low", "high")
    return {name: round(100 * getattr(mean, name), 1) for name in names}


if __name__ == "__main__":
    main()
