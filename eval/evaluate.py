"""Evaluate a prompt under one protocol: prefill once, select tokens per setting, decode batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.decode import Decoder, Kept, Prefix, all_kept, outcomes
from eval.methods import Method, method_fields
from eval.results.records import Record
from eval.settings import Setting
from eval.tasks import Prompt
from kvp.hf import Prefill, observe
from kvp.ops.future_attention import future_attention
from kvp.ranking import Protection, Selection
from kvp.scoring import ALL_QUERIES, Needs, ViewsAt, score_budgets


@dataclass(frozen=True, kw_only=True)
class RunNames:
    """Settings of a run that are in every record."""

    name: str
    """Name of the model in every record."""
    split: str
    length: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Bench(RunNames, Decoder):
    """Model and settings that all prompts of a run share."""


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A prompt run up to the boundary of a protocol."""

    prefill: Prefill
    """What scorers see: the token that is fed again, too."""
    prefix: Prefix
    """What caches are gathered from: not that token."""

    def views_at(self, needs: Needs, future: list[Tensor] | None) -> ViewsAt:
        """Views of all layers, with the inputs a method needs, as a function of the budget."""
        return lambda budget: self.prefill.views(needs, budget, future=future)


def run_prefix(
    bench: Bench, prompt: Prompt, protocol: str, methods: Iterable[Method] = ()
) -> Prefilled:
    """Prefill a prompt up to the boundary; record all queries and what the methods need."""
    needs = [Needs(queries=ALL_QUERIES)]
    needs += [method.scorer.needs for method in methods if method.scorer]
    seen = bench.prefill(prompt, protocol, needs)
    return Prefilled(prefill=seen, prefix=Prefix.of(seen))


def evaluate(
    bench: Bench, prompt: Prompt, protocol: str, settings: Sequence[Setting]
) -> list[Record]:
    """Evaluate every setting on one prompt; one record per setting."""
    (records,) = evaluate_together(bench, [prompt], protocol, settings)
    return records


def evaluate_together(
    bench: Bench, prompts: Sequence[Prompt], protocol: str, settings: Sequence[Setting]
) -> Iterator[list[Record]]:
    """The records of each prompt, one per setting, for prompts of one prefill (`by_prefill`).

    Methods that read the answer to come select tokens for each prompt anew, all others once.
    """
    start = run_prefix(bench, prompts[0], protocol, [setting.method for setting in settings])
    blind = [each for each in settings if not _reads_future(each)]
    seeing = [each for each in settings if _reads_future(each)]
    shared = list(keep(start, blind, None))
    for prompt in prompts:
        compressed = list(shared)
        if seeing:
            compressed += keep(start, seeing, hindsight(bench, prompt, start))
        results = outcomes(bench, prompt, start.prefix, [kept for _, kept in compressed])
        yield [
            {
                **_record(bench, prompt, protocol, setting, kept, start.prefix.tokens),
                "cache_bytes": outcome.nbytes,
                **outcome.result,
            }
            for (setting, kept), outcome in zip(compressed, results, strict=True)
        ]


def _reads_future(setting: Setting) -> bool:
    return setting.method.scorer is not None and setting.method.scorer.needs.future


@torch.inference_mode()
def hindsight(bench: Bench, prompt: Prompt, start: Prefilled) -> list[Tensor]:
    """Attention from all tokens after the boundary to the cached ones: per layer [1, H, N] float32.

    The future is the rest of the prompt and the greedy answer with the full cache (or the reference
    reply, where the task scores one, or the right choice).
    """
    if prompt.forced or prompt.encoded.choice_ids:
        reply = prompt.reply
    else:
        (answer,) = bench.answers(prompt, start.prefix, [all_kept(start.prefix)])
        reply = torch.tensor(answer.result)
    seen = start.prefill.observation
    assert seen is not None, "a prompt that was just run has an observation"
    rest = prompt.ids[seen.cache.get_seq_length() :]
    fed = torch.cat([rest, reply]).to(bench.model.device)
    after = observe(bench.model, fed[None], cache=seen.cache.fork(), last_logits=True)
    result = []
    for keys, before, later in zip(after.keys, seen.queries, after.queries, strict=True):
        queries = torch.cat([before, later], dim=2)  # [1, Q, T, D], T tokens of prompt and reply
        heads = keys.shape[1]
        grouped = queries.view(1, heads, -1, *queries.shape[2:])  # [1, H, G, T, D]
        result.append(future_attention(grouped, keys, prefix_length=start.prefix.tokens))
    return result


def keep(
    start: Prefilled, settings: Sequence[Setting], future: list[Tensor] | None
) -> Iterator[tuple[Setting, Kept]]:
    """Select the tokens of every setting; settings with the same scorer share its scores."""
    tokens = start.prefix.tokens
    everything = all_kept(start.prefix)
    by_ranking: dict[tuple[str, str, str | None], list[Setting]] = {}
    for setting in settings:
        if setting.method.self_sized or setting.tokens(tokens) < tokens:
            by_ranking.setdefault(setting.method.ranking, []).append(setting)
        else:
            yield setting, everything
    for same in by_ranking.values():
        scorer = same[0].method.scorer
        assert scorer is not None, "the full cache keeps everything"
        budgets = sorted({setting.tokens(tokens) for setting in same})
        for scored in score_budgets(scorer, start.views_at(scorer.needs, future), budgets):
            selections: dict[Protection, Selection] = {}
            for setting in same:
                if setting.tokens(tokens) not in scored.budgets:
                    continue
                protection = setting.protection
                if protection not in selections:
                    selections[protection] = Selection(scored.scores, protection, scored.sizes)
                selection = selections[protection]
                budget = setting.tokens(tokens)
                yield setting, Kept(indices=selection.tokens(budget, setting.method.rule))


def identify(run: RunNames, prompt: Prompt, protocol: str, setting: Setting) -> Record:
    """Fields of a record that identify it, known before the prompt runs."""
    return {
        "model": run.name,
        **method_fields(setting.method),
        "protected": setting.protected,
        "protocol": protocol,
        "task": prompt.task,
        "split": run.split,
        "length": run.length,
        "budget_spec": setting.spec,
        "example": prompt.sample.id,
        "seed": run.seed,
    }


def _record(
    bench: Bench, prompt: Prompt, protocol: str, setting: Setting, kept: Kept, tokens: int
) -> Record:
    """A record without its outcome."""
    return {
        **identify(bench, prompt, protocol, setting),
        "budget": _budget(setting, tokens),
        "prompt_digest": prompt.sample.digest,
        "prompt_tokens": prompt.encoded.prompt_length,
        "cached_tokens": tokens,
        "kept_tokens": int(kept.tokens) if kept.tokens.is_integer() else kept.tokens,
        **_evidence_fields(prompt.evidence, kept.indices, tokens),
        "cache_bytes": None,
        "prediction": None,
        "references": list(prompt.sample.references),
        "metric": prompt.sample.metric,
        **({"labels": dict(prompt.sample.labels)} if prompt.sample.labels else {}),
        "score": None,
        "nll": None,
        "reply_tokens": None,
        "seconds": None,
    }


def _evidence_fields(evidence: Sequence[int], kept: Tensor, cached: int) -> dict[str, Any]:
    """Evidence among the first `cached` tokens, and how much of it each head keeps.

    `kept` are the indices that are left. None without evidence: nothing to keep is
    not the same as nothing kept.
    """
    tokens = torch.tensor([token for token in evidence if token < cached], dtype=torch.int64)
    if not len(tokens):
        return {"evidence_tokens": None, "evidence_kept": None, "evidence_lost": None}
    indices = kept.cpu()
    return {
        "evidence_tokens": len(tokens),
        "evidence_kept": torch.isin(indices, tokens).sum(-1).tolist(),
        "evidence_lost": int((~torch.isin(tokens, indices)).sum()),
    }


def _budget(setting: Setting, cached: int) -> int | None:
    """Budget in tokens per KV head; may exceed the cached tokens."""
    if setting.budget is None:
        return None
    return max(setting.budget.tokens(cached), setting.tokens(cached))
