"""Sampled eviction next to the same eviction without draws: answers, errors, and their estimate.

    python -m benchmarks.sampled_eviction --model nano --prompts 2 --out FILE.json

For every `SCORER+SPLIT` of `--methods`, the deterministic cache and `SCORER+sampled(split=SPLIT)`
at several shares. Two measurements per cache:

- answers: share of the references answered, with the 95 % interval over prompts (`eval.stats`);
- errors, teacher forced on the rest of the prompt and the answer of the full cache, per prompt and
  query head: root of the squared error of the attention outputs over that of the outputs, both
  summed over tokens. `total` compares with the outputs of the full cache, `drawing` with attention
  of the same queries over all tokens, `certificate` is the estimate from the kept tokens
  (`kvp.hf.certificate`).

Prints Markdown tables and writes the numbers as JSON. Spearman's correlation of certificate and
error: `pooled` over prompts and heads, `within` a head over prompts (mean over heads), `between`
heads (of means over prompts), `prompts` (one number per prompt: root mean square over heads);
95 % intervals by a bootstrap over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from benchmarks.prompts import PROTOCOLS, bench_of
from eval.decode import Kept, Prefix, all_kept, gather
from eval.evaluate import Bench, Prefilled, keep, run_prefix
from eval.methods import Method, allocated, build_methods
from eval.settings import Setting
from eval.stats import Floats, bootstrap_mean, paired_difference
from eval.tasks import Prompt
from kvp.budgets import parse_budget
from kvp.config_groups import split_list
from kvp.hf.certificate import error_of, record_queries
from kvp.ranking import Protection

TASKS = (
    "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1,niah_multikey_2,niah_multikey_3,"
    "niah_multivalue,niah_multiquery,vt"
)
METHODS = "kvzip(plus=true)+global:kvzip,snapkv+ada,keydiff+uniform"
PLAIN = "deterministic"
LEVELS = ("pooled", "within", "between", "prompts")
Key = tuple[str, str, str, str]
"""Protocol, method, budget, and `PLAIN` or the options of the draw."""
Errors = tuple[Tensor, Tensor, Tensor]
"""Certificate, error of drawing and total error of one cache: [heads] float64 each."""


@dataclass(kw_only=True)
class Measured:
    """What one kind of cache did."""

    answers: dict[int | None, dict[tuple[str, str], float]] = field(default_factory=dict)
    """Seed of the draws -> prompt -> share of the references answered."""
    errors: list[Errors] = field(default_factory=list)
    """Of the first seed, one entry per prompt."""


def settings_of(
    methods: Sequence[str], options: Sequence[str], budgets: Sequence[str], seeds: int,
    policies: Sequence[str],
) -> dict[tuple[str, str, str, int | None], Setting]:  # fmt: skip
    """(method, budget, draw, seed) -> setting; `options` are those of `sampled` without split."""
    found = {}
    for spec in methods:
        scorer, _, split = spec.rpartition("+")
        for plain in build_methods([scorer], policies=policies):
            kinds: list[tuple[str, int | None, Method]] = [(PLAIN, None, allocated(plain, split))]
            for option in options:
                rule = f"sampled(split={split},{option})"
                kinds += [(option, seed, allocated(plain, rule, seed)) for seed in range(seeds)]
            for budget in budgets:
                for kind, seed, method in kinds:
                    found[f"{plain.label}+{split}", budget, kind, seed] = Setting(
                        method=method,
                        budget=parse_budget(budget),
                        protected=True,
                        protection=Protection(),
                    )
    return found


def relative(difference: Tensor, outputs: Tensor) -> Tensor:
    """Root of squared differences over squared outputs [1, Q, T, D], over T and D: [Q] float64."""
    squares = difference.square().sum((-1, -2))[0] / outputs.square().sum((-1, -2))[0]
    return squares.sqrt()


@torch.inference_mode()
def outputs_of(
    bench: Bench, prefix: Prefix, kept: Kept, fed: Tensor
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Per layer the output, its error (in units of the output), and the output over all tokens.

    Output and output over all tokens are [1, Q, T, D], for the same queries; the error is
    [1, Q, T, 1].
    """
    cache = gather(prefix, [kept])
    queries = record_queries(bench.model, cache, fed[None], prefix.tokens)
    count, found = len(fed), []
    fed_positions = torch.arange(prefix.tokens, prefix.tokens + count)
    everywhere = torch.arange(prefix.tokens + count) <= fed_positions[:, None]  # [T, N + T]
    for index, (layer, of_layer) in enumerate(zip(cache.layers, queries, strict=True)):
        keys, values, bias = layer.slots
        visible = layer.positions[:, :, None] <= fed_positions[:, None]
        estimate = error_of(of_layer, keys, values, bias, visible)
        whole_keys = torch.cat([prefix.keys[index], keys[:, :, -count:]], dim=2)
        whole_values = torch.cat([prefix.values[index], values[:, :, -count:]], dim=2)
        zeros = torch.zeros(whole_keys.shape[:3])
        every = everywhere.expand(1, whole_keys.shape[1], -1, -1)
        whole = error_of(of_layer, whole_keys, whole_values, zeros, every).output
        found.append((estimate.output, estimate.error[..., None], whole))
    return found


def errors_of(
    bench: Bench, prefix: Prefix, kept: Kept, fed: Tensor, truth: Sequence[Tensor]
) -> Errors:
    """Errors of a cache against the outputs `truth` of the full one, per layer [1, Q, T, D]."""
    parts: list[list[Tensor]] = [[], [], []]
    layers = zip(outputs_of(bench, prefix, kept, fed), truth, strict=True)
    for (output, error, whole), full in layers:
        parts[0].append(relative(error, output))
        parts[1].append(relative(output - whole, whole))
        parts[2].append(relative(output - full, full))
    certificate, drawing, total = (torch.cat(part) for part in parts)
    return certificate, drawing, total


def measure(
    bench: Bench, prompt: Prompt, protocol: str,
    settings: Mapping[tuple[str, str, str, int | None], Setting], found: dict[Key, Measured],
) -> None:  # fmt: skip
    """Add one prompt."""
    start: Prefilled = run_prefix(bench, prompt, protocol, [s.method for s in settings.values()])
    prefix = start.prefix
    names = {id(setting): name for name, setting in settings.items()}
    kept = {names[id(each)]: tokens for each, tokens in keep(start, list(settings.values()), None)}
    caches = [all_kept(prefix), *kept.values()]
    full, *answers = bench.answers(prompt, prefix, caches)
    fed = torch.cat([prompt.ids[prefix.tokens :], torch.tensor(full.result)])
    truth = [output for output, _, _ in outputs_of(bench, prefix, caches[0], fed)]
    unit = prompt.task, str(prompt.sample.id)
    whole = found.setdefault((protocol, "full", "", ""), Measured())
    whole.answers.setdefault(None, {})[unit] = prompt.score(bench.text(full.result))
    for (name, tokens), answer in zip(kept.items(), answers, strict=True):
        method, budget, kind, seed = name
        cell = found.setdefault((protocol, method, budget, kind), Measured())
        cell.answers.setdefault(seed, {})[unit] = prompt.score(bench.text(answer.result))
        if not seed:
            cell.errors.append(errors_of(bench, prefix, tokens, fed, truth))


def spearman(first: Floats, second: Floats) -> Floats:
    """Spearman's correlation of every column of [n, columns], NaN where one side is constant."""
    centred = [
        ranks - ranks.mean(0)
        for ranks in (stats.rankdata(side, axis=0) for side in (first, second))
    ]
    spreads = np.sqrt((centred[0] ** 2).sum(0) * (centred[1] ** 2).sum(0))
    together = (centred[0] * centred[1]).sum(0)
    return np.divide(together, spreads, out=np.full_like(together, np.nan), where=spreads > 0)


def correlations(certificate: Floats, error: Floats) -> dict[str, float]:
    """Spearman's correlation of [prompts, heads] at every level of `LEVELS`.

    NaN where one side is constant; such heads are left out of `within`.
    """

    def of(first: Floats, second: Floats) -> float:
        return float(spearman(first.reshape(-1, 1), second.reshape(-1, 1))[0])

    within = spearman(certificate, error)
    known = within[~np.isnan(within)]
    return {
        "pooled": of(certificate, error),
        "within": float(known.mean()) if len(known) else float("nan"),
        "between": of(certificate.mean(0), error.mean(0)),
        "prompts": of((certificate**2).mean(1) ** 0.5, (error**2).mean(1) ** 0.5),
    }


def with_intervals(
    certificate: Floats, error: Floats, resamples: int
) -> dict[str, tuple[float, float, float]]:
    """`correlations` with 95 % intervals of a bootstrap over prompts: (estimate, low, high)."""
    generator = np.random.default_rng(0)
    drawn = [
        correlations(certificate[rows], error[rows])
        for rows in generator.integers(0, len(error), (resamples, len(error)))
    ]
    found = {}
    for level, value in correlations(certificate, error).items():
        known = [one[level] for one in drawn if not np.isnan(one[level])] or [value]
        low, high = np.quantile(known, [0.025, 0.975]).tolist()
        found[level] = (value, low, high)
    return found


def rows_of(found: Mapping[Key, Measured], resamples: int, redraws: int) -> list[dict[str, Any]]:
    """One row of numbers per protocol, method, budget and kind of cache."""
    rows = []
    for (protocol, method, budget, kind), cell in found.items():
        answers = bootstrap_mean(cell.answers, resamples=resamples)
        row: dict[str, Any] = {
            "protocol": protocol, "method": method, "budget": budget, "cache": kind,
            "prompts": answers.prompts, "seeds": len(cell.answers),
            "answers": [answers.mean, answers.low, answers.high],
        }  # fmt: skip
        if cell.errors:
            certificate, drawing, total = (
                torch.stack([errors[part] for errors in cell.errors]).numpy() for part in range(3)
            )
            row["error"] = {"drawing": _rms(drawing), "total": _rms(total)}
            if kind != PLAIN:
                plain = found[protocol, method, budget, PLAIN].answers
                lost = paired_difference(cell.answers, plain, resamples=resamples)
                row["gained"] = [lost.mean, lost.low, lost.high]
                row["error"]["certificate"] = _rms(certificate)
                row["covered"] = float((drawing <= 2 * certificate).mean())
                row["spearman_drawing"] = with_intervals(certificate, drawing, redraws)
                row["spearman_total"] = with_intervals(certificate, total, redraws)
        rows.append(row)
    return rows


def _rms(errors: Floats) -> float:
    """Root mean square over heads, mean over prompts."""
    return float(((errors**2).mean(1) ** 0.5).mean())


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: answers and errors, then correlations."""

    def span(values: Sequence[float], form: Callable[[float], str]) -> str:
        mean, low, high = map(form, values)
        return f"{mean} ({low} to {high})"

    def percent(value: float) -> str:
        return f"{100 * value:.1f}"

    def correlation(value: float) -> str:
        return f"{value:.2f}"

    first = [
        "| question | method | budget | cache | answers, % | gained | error | certificate |",
        "|---|---|--:|---|--:|--:|--:|--:|",
    ]
    second = [
        "| question | method | budget | cache | error | " + " | ".join(LEVELS) + " | covered, % |",
        "|---|---|--:|---|---|" + "--:|" * (len(LEVELS) + 1),
    ]
    for row in rows:
        head = (
            f"| {PROTOCOLS[row['protocol']]} | {row['method']} | {row['budget']} | {row['cache']}"
        )
        gained = span(row["gained"], percent) if "gained" in row else ""
        errors = row.get("error", {})
        numbers = (
            f"{errors[name]:.3f}" if name in errors else "" for name in ("total", "certificate")
        )
        first.append(
            f"{head} | {span(row['answers'], percent)} | {gained} | {' | '.join(numbers)} |"
        )
        for error in ("drawing", "total") if "gained" in row else ():
            of = row[f"spearman_{error}"]
            cells = " | ".join(span(of[level], correlation) for level in LEVELS)
            covered = percent(row["covered"]) if error == "drawing" else ""
            second.append(f"{head} | {error} | {cells} | {covered} |")
    return "\n".join([*first, "", *second])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--length", type=int, default=640)
    parser.add_argument("--prompts", type=int, default=2, help="of each task")
    parser.add_argument("--split", default="test", choices=["test", "validation"])
    parser.add_argument("--methods", default=METHODS, help="SCORER+SPLIT, comma-separated")
    parser.add_argument("--policies", default="", help="policy folders of kvp, comma-separated")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS))
    parser.add_argument("--budgets", default="6%,12.5%,25%")
    parser.add_argument("--draws", default="share=0.25;share=0.5;share=0.75",
                        help="options of sampled, one set after each semicolon")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=1, help="of the draws: 0, 1, ...")
    parser.add_argument("--max_new_tokens", type=int, default=40)
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--spearman_resamples", type=int, default=200)
    parser.add_argument("--out", help="JSON file of the numbers")
    given = parser.parse_args(arguments)
    bench, prompts = bench_of(given)
    kinds = settings_of(
        split_list(given.methods), given.draws.split(";"), split_list(given.budgets), given.seeds,
        split_list(given.policies),
    )  # fmt: skip
    found: dict[Key, Measured] = {}
    for prompt in prompts:
        for protocol in split_list(given.protocols):
            measure(bench, prompt, protocol, kinds, found)
    rows = rows_of(found, given.resamples, given.spearman_resamples)
    print(tables(rows))
    if given.out:
        content = {"flags": {**vars(given), "out": None}, "rows": rows}
        Path(given.out).write_text(json.dumps(content) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
