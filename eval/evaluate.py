"""One prompt under one protocol: one prefill, every cell's tokens, one batched run, its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.decode import Kept, Outcome, Prefix, all_kept, forced, greedy
from eval.methods import Method, method_fields
from eval.results.records import Row
from eval.selection import Ranked
from eval.settings import Setting, protection_of
from eval.tasks import Prompt
from kvp.budget_scores import ViewsAt, score_budgets
from kvp.hf import Observation, ScorerInputs, observe, views
from kvp.ops.future_attention import future_attention
from kvp.scoring import Needs


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every prompt of a run shares."""

    config: EvalConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Prefilled:
    """A prompt run up to the boundary of a protocol."""

    observation: Observation
    prefix: Prefix
    feed: Tensor
    """[F] int64, prompt tokens after the boundary."""
    scorer_inputs: ScorerInputs
    """What methods ask beyond keys, values and queries; made once, shared by all of them."""

    def views_at(self, needs: Needs, future: list[Tensor] | None) -> ViewsAt:
        """Views of all layers for a budget to come, with what a method needs."""
        return lambda budget: views(self.observation, needs, budget, future, self.scorer_inputs)


def prefill(
    bench: Bench, prompt: Prompt, protocol: str, methods: Iterable[Method] = ()
) -> Prefilled:
    """Run the prefix of a prompt once, with every query recorded and what the methods ask of it."""
    ids = prompt.ids.to(bench.model.device)
    boundary = prompt.boundary(protocol)
    observation = observe(
        bench.model,
        ids[None, :boundary],
        last_logits=True,
        hidden_after=hidden_after(method.scorer.needs for method in methods if method.scorer),
    )
    return Prefilled(
        observation=observation,
        prefix=Prefix(keys=tuple(observation.keys), values=tuple(observation.values)),
        feed=ids[boundary:],
        scorer_inputs=scorer_inputs_of(bench, observation, ids[None, :boundary]),
    )


def hidden_after(needs: Iterable[Needs]) -> tuple[int, ...]:
    """The numbers of left-out tokens for which hidden states are to be summed up."""
    asked = {need.hidden_after for need in needs}
    return tuple(sorted(after for after in asked if after is not None))


def scorer_inputs_of(bench: Bench, observation: Observation, ids: Tensor) -> ScorerInputs:
    """The extras of an observed prefix [1, N]."""
    return ScorerInputs(
        bench.model, ids, observation.keys, observation.values,
        hidden=observation.hidden, tokenizer=bench.tokenizer,
    )  # fmt: skip


def evaluate(bench: Bench, prompt: Prompt, protocol: str, cells: Sequence[Setting]) -> list[Row]:
    """Rows of one prompt for the cells asked for."""
    start = prefill(bench, prompt, protocol, [cell.method for cell in cells])
    future = None
    if any(cell.method.scorer and cell.method.scorer.needs.future for cell in cells):
        future = hindsight(bench, prompt, start)
    chosen = list(keep(bench.config, start, cells, future))
    caches = [kept for _, kept in chosen]
    outcomes: list[tuple[int, dict[str, Any]]] = []
    if prompt.forced:
        losses = forced(
            bench.model, start.prefix, caches, start.feed, prompt.reply,
            batch_rows=bench.config.decode_batch,
        )  # fmt: skip
        for loss in losses:
            outcomes.append((loss.nbytes, {"nll": loss.result, "reply_tokens": len(prompt.reply)}))
    else:
        for answer in answers(bench, prompt, start, caches):
            text = str(bench.tokenizer.decode(answer.result, skip_special_tokens=True))
            outcomes.append((answer.nbytes, {"prediction": text, "score": prompt.score(text)}))
    return [
        {
            **_row(bench.config, prompt, protocol, cell, kept, start.prefix.tokens),
            "cache_bytes": nbytes,
            **fields,
        }
        for (cell, kept), (nbytes, fields) in zip(chosen, outcomes, strict=True)
    ]


def answers(
    bench: Bench, prompt: Prompt, start: Prefilled, caches: Sequence[Kept]
) -> list[Outcome[list[int]]]:
    """Greedy answers of every cache row, as token ids."""
    return greedy(
        bench.model, start.prefix, caches, start.feed,
        max_new_tokens=bench.config.max_new_tokens or prompt.sample.max_new_tokens,
        batch_rows=bench.config.decode_batch,
    )  # fmt: skip


@torch.inference_mode()
def hindsight(bench: Bench, prompt: Prompt, start: Prefilled) -> list[Tensor]:
    """Attention that everything after the boundary really pays: per layer [1, H, N] float32.

    The future is the rest of the prompt and the full cache's own greedy answer (for a forced reply,
    that reply). Changes `start.observation.cache`, which nothing else reads.
    """
    if prompt.forced:
        reply = prompt.reply
    else:
        (answer,) = answers(bench, prompt, start, [all_kept(start.prefix)])
        reply = torch.tensor(answer.result)
    fed = torch.cat([start.feed, reply.to(start.feed.device)])
    after = observe(bench.model, fed[None], cache=start.observation.cache, last_logits=True)
    result = []
    for keys, before, later in zip(
        after.keys, start.observation.queries, after.queries, strict=True
    ):
        queries = torch.cat([before, later], dim=2)
        heads = keys.shape[1]
        grouped = queries.view(1, heads, -1, *queries.shape[2:])
        result.append(future_attention(grouped, keys, prefix_length=start.prefix.tokens))
    return result


def keep(
    config: EvalConfig, start: Prefilled, cells: Sequence[Setting], future: list[Tensor] | None
) -> Iterator[tuple[Setting, Kept]]:
    """The tokens that every cell keeps, scorer by scorer."""
    tokens = start.prefix.tokens
    everything = all_kept(start.prefix)
    by_ranking: dict[tuple[str, str, str | None], list[Setting]] = {}
    for cell in cells:
        if cell.method.own or cell.tokens(tokens) < tokens:
            by_ranking.setdefault(cell.method.ranking, []).append(cell)
        else:
            yield cell, everything
    for own in by_ranking.values():
        scorer = own[0].method.scorer
        assert scorer is not None, "the full cache keeps everything"
        budgets = sorted({cell.tokens(tokens) for cell in own})
        for scored in score_budgets(scorer, start.views_at(scorer.needs, future), budgets):
            for protected in (True, False):
                matching = [
                    cell for cell in own
                    if cell.protected is protected and cell.tokens(tokens) in scored.budgets
                ]  # fmt: skip
                if not matching:
                    continue
                ranked = Ranked(scored, protection_of(config, protected=protected))
                for cell in matching:
                    yield cell, Kept(indices=ranked.kept(cell.method.rule, cell.tokens(tokens)))


def identify(config: EvalConfig, prompt: Prompt, protocol: str, cell: Setting) -> Row:
    """The fields of a row that are known before any work, its key among them."""
    return {
        "model": config.model,
        **method_fields(cell.method),
        "protected": cell.protected,
        "protocol": protocol,
        "task": prompt.task,
        "split": config.split,
        "length": config.length,
        "budget_spec": cell.spec,
        "example": prompt.sample.id,
        "seed": config.seed,
    }


def _row(
    config: EvalConfig, prompt: Prompt, protocol: str, cell: Setting, kept: Kept, tokens: int
) -> Row:
    """A row with everything but its outcome."""
    return {
        **identify(config, prompt, protocol, cell),
        "budget": None if cell.budget is None else cell.budget.tokens(tokens),
        "prompt_tokens": prompt.encoded.prompt_length,
        "cached_tokens": tokens,
        "kept_tokens": int(kept.tokens) if kept.tokens.is_integer() else kept.tokens,
        "cache_bytes": None,
        "prediction": None,
        "references": list(prompt.sample.references),
        "score": None,
        "nll": None,
        "reply_tokens": None,
        "seconds": None,
    }
