"""One prompt under one protocol: one prefill, every cell's tokens, one batched run, its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.decode import Kept, Prefix, all_kept, forced, greedy
from eval.methods import Cell, Method, method_fields, protection_of
from eval.rows import Row
from eval.selection import ViewsAt, kept_indices, rank_layers, score_layers
from eval.tasks import Prompt
from kvp.hf import Observation, observe, views
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

    def views_at(self, needs: Needs, future: list[Tensor] | None) -> ViewsAt:
        """Views of all layers for a budget to come, with what a method needs."""
        return lambda budget: views(self.observation, needs, budget, future)


def prefill(bench: Bench, prompt: Prompt, protocol: str) -> Prefilled:
    """Run the prefix of a prompt once, with every query recorded."""
    ids = prompt.ids.to(bench.model.device)
    boundary = prompt.boundary(protocol)
    observation = observe(bench.model, ids[None, :boundary], last_logits=True)
    prefix = Prefix(keys=tuple(observation.keys), values=tuple(observation.values))
    return Prefilled(observation=observation, prefix=prefix, feed=ids[boundary:])


def evaluate(bench: Bench, prompt: Prompt, protocol: str, cells: Sequence[Cell]) -> list[Row]:
    """Rows of one prompt for the cells asked for."""
    start = prefill(bench, prompt, protocol)
    future = None
    if any(cell.method.scorer and cell.method.scorer.needs.future for cell in cells):
        future = hindsight(bench, prompt, start)
    chosen = [(cell, kept) for cell, kept in keep(bench.config, start, cells, future)]
    caches = [kept for _, kept in chosen]
    rows = [
        _row(bench.config, prompt, protocol, cell, kept, start.prefix.tokens)
        for cell, kept in chosen
    ]
    if prompt.forced:
        losses = forced(
            bench.model, start.prefix, caches, start.feed, prompt.reply,
            batch_rows=bench.config.rows,
        )  # fmt: skip
        for row, loss in zip(rows, losses, strict=True):
            row.update(nll=loss, reply_tokens=len(prompt.reply))
        return rows
    for row, answer in zip(rows, answers(bench, prompt, start, caches), strict=True):
        text = str(bench.tokenizer.decode(answer, skip_special_tokens=True))
        row.update(prediction=text, score=prompt.score(text))
    return rows


def answers(
    bench: Bench, prompt: Prompt, start: Prefilled, caches: Sequence[Kept]
) -> list[list[int]]:
    """Greedy answers of every cache row, as token ids."""
    return greedy(
        bench.model, start.prefix, caches, start.feed,
        max_new_tokens=bench.config.max_new_tokens or prompt.sample.max_new_tokens,
        batch_rows=bench.config.rows,
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
        reply = torch.tensor(answer)
    fed = torch.cat([start.feed, reply.to(start.feed.device)])
    after = observe(bench.model, fed[None], cache=start.observation.cache, last_logits=True)
    result = []
    for keys, before, later in zip(
        after.keys, start.observation.queries, after.queries, strict=True
    ):
        queries = torch.cat([before, later], dim=2)
        heads = keys.shape[1]
        grouped = queries.view(1, heads, -1, *queries.shape[2:])
        result.append(future_attention(grouped, keys, cut=start.prefix.tokens))
    return result


def keep(
    config: EvalConfig, start: Prefilled, cells: Sequence[Cell], future: list[Tensor] | None
) -> Iterator[tuple[Cell, Kept]]:
    """The tokens that every cell keeps, method by method."""
    tokens = start.prefix.tokens
    everything = all_kept(start.prefix)
    by_method: dict[Method, list[Cell]] = {}
    for cell in cells:
        by_method.setdefault(cell.method, []).append(cell)
    for method, own in by_method.items():
        sizes = {cell: cell.budget.tokens(tokens) if cell.budget else tokens for cell in own}
        yield from ((cell, everything) for cell in own if sizes[cell] >= tokens)
        evicting = [cell for cell in own if sizes[cell] < tokens]
        if not evicting or method.scorer is None:
            continue
        budgets = sorted({sizes[cell] for cell in evicting})
        for scores, served in score_layers(
            method.scorer, start.views_at(method.scorer.needs, future), budgets
        ):
            for protected in (True, False):
                matching = [
                    cell for cell in evicting
                    if cell.protected is protected and sizes[cell] in served
                ]  # fmt: skip
                if not matching:
                    continue
                ranking = rank_layers(scores, protection_of(config, protected=protected))
                for cell in matching:
                    yield cell, Kept(indices=kept_indices(ranking, sizes[cell]))


def identify(config: EvalConfig, prompt: Prompt, protocol: str, cell: Cell) -> Row:
    """The fields of a row that are known before any work, its key among them."""
    return {
        "model": config.model,
        **method_fields(cell.method),
        "protected": cell.protected,
        "protocol": protocol,
        "task": prompt.task,
        "split": config.split,
        "length": config.length,
        "budget_spec": None if cell.budget is None else str(cell.budget),
        "example": prompt.sample.id,
        "seed": config.seed,
    }


def _row(
    config: EvalConfig, prompt: Prompt, protocol: str, cell: Cell, kept: Kept, tokens: int
) -> Row:
    """A row with everything but its outcome."""
    return {
        **identify(config, prompt, protocol, cell),
        "budget": None if cell.budget is None else cell.budget.tokens(tokens),
        "prompt_tokens": prompt.encoded.prompt_length,
        "cached_tokens": tokens,
        "kept_tokens": kept.tokens,
        "cache_bytes": None,
        "prediction": None,
        "references": list(prompt.sample.references),
        "score": None,
        "nll": None,
        "reply_tokens": None,
        "seconds": None,
    }
