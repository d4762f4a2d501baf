"""Prompts read in pieces, with the cache shrunk after each, next to the same prompts read at once.

    python -m benchmarks.prompt_pieces --policies FOLDER --out benchmarks/results/prompt_pieces.json

RULER prompts, answered by `generate` inside `evicting(prefill_chunk=)`, for no chunk (one eviction,
after the whole prompt) and for every chunk of `--chunks`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.long_answers import FULL, bench_of, by_tasks
from benchmarks.measuring import write_report
from eval.evaluate import Bench, Prompt
from kvp.config_groups import split_list
from kvp.hf import evicting
from kvp.ranking import Protection
from kvp.scoring import Scorer
from policies import load_policy, make_scorer

METHODS = "ring,random,streaming_llm,snapkv,tova,h2o,keydiff,lagkv"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every method and write the JSON file."""
    given = _parser().parse_args(arguments)
    scorers = [(name, make_scorer(name)) for name in split_list(given.methods)]
    scorers += [(folder, load_policy(folder)) for folder in split_list(given.policies)]
    write_report(given, answers=list(_answers(given, scorers)))


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


if __name__ == "__main__":
    main()
