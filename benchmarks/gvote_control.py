"""GVote's control: the same vote by guessed queries, by more of them, and by the real ones.

    python -m benchmarks.gvote_control --model nano --prompts 20

`real` replaces GVote's Gaussian draws by the queries that the rest of the prompt and the answer
with the full cache really ask: what the rule would keep if its guesses were right. Every setting
takes the size that it votes for (`gvote+self_sized`). Prints a Markdown table: the share of
references answered, its 95 % interval over prompts and seeds of the draws (`eval.stats`), and the
share of the cache that is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.prompts import PROTOCOLS, bench_of
from eval.decode import all_kept
from eval.evaluate import Bench, evaluate, run_prefix
from eval.methods import Method, allocated, method_of
from eval.results.records import FULL, Record
from eval.settings import Setting
from eval.stats import bootstrap_mean, by_policy
from eval.tasks import Prompt
from kvp.hf import observe
from kvp.scoring import View
from policies.gvote import GVote

TASKS = "niah_single_1,niah_single_2,niah_multikey_1,niah_multikey_2"


@dataclass(frozen=True, kw_only=True)
class RealQueries(GVote):
    """GVote whose voters are the queries that the future really has."""

    queries: tuple[Tensor, ...]
    """Per layer [1, Q, T, D] after RoPE, T tokens to come."""

    def guesses(self, view: View) -> Iterator[Tensor]:
        """The queries [1, Q, D] of every token to come."""
        yield from self.queries[view.layer].float().unbind(dim=2)


@torch.inference_mode()
def real_queries(bench: Bench, prompt: Prompt, protocol: str) -> tuple[Tensor, ...]:
    """Queries of the rest of the prompt and of the full cache's answer: per layer [1, Q, T, D]."""
    start = run_prefix(bench, prompt, protocol)
    (answer,) = bench.answers(prompt, start.prefix, [all_kept(start.prefix)])
    seen = start.prefill.observation
    assert seen is not None, "a prompt that was just run has an observation"
    rest = prompt.ids[seen.cache.get_seq_length() :]
    fed = torch.cat([rest, torch.tensor(answer.result)])[None]
    after = observe(bench.model, fed, cache=seen.cache, last_logits=True).queries
    if not prompt.fed_again(protocol):
        return after
    again = [queries[:, :, -1:] for queries in seen.queries]  # it attends to the compressed cache
    return tuple(torch.cat(pair, dim=2) for pair in zip(again, after, strict=True))


def measure(
    bench: Bench, prompts: Sequence[Prompt], protocol: str, samples: Sequence[int], seeds: int
) -> dict[str, list[Record]]:
    """Records of every setting, by its name in the table; draws have a seed in `policy`."""
    found: dict[str, list[Record]] = {}
    for prompt in prompts:
        queries = real_queries(bench, prompt, protocol)
        methods = {("full cache", None): Method(name=FULL)}
        for count in samples:
            for seed in range(seeds):
                draws = GVote(samples=count, seed=seed)
                methods[f"{count} samples", seed] = _sized(draws)
        voters = queries[0].shape[2]
        methods["real future queries", None] = _sized(RealQueries(samples=voters, queries=queries))
        settings = [Setting(method=method, budget=None) for method in methods.values()]
        records = evaluate(bench, prompt, protocol, settings)
        for (name, seed), record in zip(methods, records, strict=True):
            found.setdefault(name, []).append({**record, "policy": seed})
    return found


def _sized(scorer: GVote) -> Method:
    return allocated(method_of(scorer), "self_sized")


def table(measured: dict[str, dict[str, list[Record]]], resamples: int) -> str:
    """Markdown: a line per protocol and setting."""
    lines = ["| question | voters | answers, % | of the cache kept, % |", "|---|---|--:|--:|"]
    for protocol, settings in measured.items():
        for name, records in settings.items():
            answers = bootstrap_mean(by_policy(records), resamples=resamples)
            kept = [record["kept_tokens"] / record["cached_tokens"] for record in records]
            interval = f"{100 * answers.low:.0f} to {100 * answers.high:.0f}"
            lines.append(
                f"| {PROTOCOLS[protocol]} | {name} | {100 * answers.mean:.0f} ({interval}) | "
                f"{100 * sum(kept) / len(kept):.0f} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--split", default="test", choices=["test", "validation"])
    parser.add_argument("--samples", default="8,128", help="numbers of guessed queries")
    parser.add_argument("--seeds", type=int, default=5, help="of the guesses: 0, 1, ...")
    parser.add_argument("--max_new_tokens", type=int)
    parser.add_argument("--resamples", type=int, default=2000)
    given = parser.parse_args(arguments)
    bench, prompts = bench_of(given)
    samples = [int(count) for count in given.samples.split(",")]
    measured = {
        protocol: measure(bench, prompts, protocol, samples, given.seeds) for protocol in PROTOCOLS
    }
    print(table(measured, given.resamples))


if __name__ == "__main__":
    main()
