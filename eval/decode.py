"""Many cache rows of one prompt, run as one batch: greedy answers and forced replies.

Every row is the same prompt with other tokens evicted, in each head its own number of them;
`EvictingCache.select` gathers them from one prefill. Rows leave the batch when they end, and equal
rows run once. Greedy decoding only, without the penalties a model's generation config may ask for;
row by row the tokens are those of
`model.generate(do_sample=False)` on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvp.allocation import EMPTY_SLOT
from kvp.hf import EvictingCache

ResultT = TypeVar("ResultT")

MOST_LOGITS = 2**26
"""Most logits of one teacher-forced batch (256 MiB in float32)."""
SIZE_RATIO = 3.0
"""Rows share a batch while the largest holds at most this many times the smallest's tokens."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """What a prefill left behind: everything rows are gathered from."""

    keys: Sequence[Tensor]
    """Per layer [1, H, N, D], after RoPE."""
    values: Sequence[Tensor]
    """Per layer [1, H, N, D]."""

    @property
    def tokens(self) -> int:
        """N, tokens in the cache before eviction."""
        return self.keys[0].shape[2]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The tokens one row keeps."""

    indices: Tensor
    """[L, H, S] int64, ascending per head, -1 after a head's last one."""

    @property
    def width(self) -> int:
        """S, tokens of the largest head."""
        return self.indices.shape[-1]

    @property
    def counts(self) -> Tensor:
        """Tokens kept: [L, H] int64."""
        return (self.indices != EMPTY_SLOT).sum(-1)

    @property
    def tokens(self) -> float:
        """Tokens kept per head, the mean over all heads of the model."""
        return float(self.counts.double().mean())


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[ResultT]):
    """What one row gave."""

    result: ResultT
    nbytes: int
    """Bytes of the row's keys and values right after the eviction."""


def all_kept(prefix: Prefix) -> Kept:
    """The row that keeps everything."""
    heads = prefix.keys[0].shape[1]
    indices = torch.arange(prefix.tokens).expand(len(prefix.keys), heads, -1)
    return Kept(indices=indices)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    prefix: Prefix,
    rows: Sequence[Kept],
    feed: Tensor,
    *,
    max_new_tokens: int,
    batch_rows: int,
) -> list[Outcome[list[int]]]:
    """Greedy continuation of every row, the ending token included where one was reached.

    `feed` [F] int64 are the prompt tokens after the eviction, F >= 1.
    """
    ends = torch.tensor(end_tokens(model), device=model.device, dtype=torch.long)

    def run(cache: EvictingCache, batch: Sequence[Kept]) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in batch]
        alive = list(range(len(batch)))
        tokens = feed.to(model.device).expand(len(batch), -1)
        position = prefix.tokens
        for _ in range(max_new_tokens):
            logits = forward(model, tokens, cache, position, keep=1)
            position += tokens.shape[1]
            tokens = logits[:, -1:].argmax(-1)
            for row, token in zip(alive, tokens[:, 0].tolist(), strict=True):
                answers[row].append(token)
            going = ~torch.isin(tokens[:, 0], ends)
            if not bool(going.all()):
                alive = [row for row, goes in zip(alive, going.tolist(), strict=True) if goes]
                if not alive:
                    break
                tokens = tokens[going]
                cache.batch_select_indices(going.nonzero()[:, 0])
        return answers

    return _in_batches(prefix, rows, run, batch_rows)


@torch.inference_mode()
def forced(
    model: PreTrainedModel,
    prefix: Prefix,
    rows: Sequence[Kept],
    feed: Tensor,
    reply: Tensor,
    *,
    batch_rows: int,
) -> list[Outcome[float]]:
    """Negative log-likelihood of a given reply, summed over its tokens, for every row.

    `feed` [F] int64 are the prompt tokens after the eviction, F >= 1; `reply` [R] int64, R >= 1.
    """
    target = reply.to(model.device)
    tokens = torch.cat([feed.to(model.device), target[:-1]])
    vocabulary = model.config.get_text_config().vocab_size
    limit = max(1, min(batch_rows, MOST_LOGITS // (len(reply) * vocabulary)))

    def run(cache: EvictingCache, batch: Sequence[Kept]) -> list[float]:
        fed = tokens.expand(len(batch), -1)
        logits = forward(model, fed, cache, prefix.tokens, keep=len(reply))
        log_probs = logits.float().log_softmax(-1)
        chosen = log_probs.gather(-1, target.expand(len(batch), -1)[..., None])[..., 0]
        totals: list[float] = (-chosen.double().sum(-1)).tolist()
        return totals

    return _in_batches(prefix, rows, run, limit)


def gather(prefix: Prefix, batch: Sequence[Kept]) -> EvictingCache:
    """One cache with a row per `Kept`; heads that keep fewer tokens are filled with empty slots."""
    width = max(row.width for row in batch)
    layers, heads, _ = batch[0].indices.shape
    slots = torch.full((len(batch), layers, heads, width), EMPTY_SLOT)
    for row, kept in enumerate(batch):
        slots[row, :, :, : kept.width] = kept.indices
    widest = torch.stack([kept.counts for kept in batch]).amax(dim=(0, 2)).tolist()
    slots = slots.to(prefix.keys[0].device)
    indices = [slots[:, layer, :, : widest[layer]] for layer in range(layers)]
    return EvictingCache.select(prefix.keys, prefix.values, indices, seen=prefix.tokens)


def end_tokens(model: PreTrainedModel) -> list[int]:
    """Token ids that end a generation, as `generate` reads them."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    if ends is None:
        return []
    return list(ends) if isinstance(ends, list) else [int(ends)]


def forward(
    model: PreTrainedModel, tokens: Tensor, cache: EvictingCache, position: int, *, keep: int
) -> Tensor:
    """Logits [R, keep, V] of the last `keep` of the tokens [R, F], whose first is at `position`."""
    positions = torch.arange(position, position + tokens.shape[1], device=tokens.device)
    output = model(
        input_ids=tokens,
        position_ids=positions.expand(tokens.shape[0], -1),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits
    return logits


def _in_batches(
    prefix: Prefix,
    rows: Sequence[Kept],
    run: Callable[[EvictingCache, Sequence[Kept]], list[ResultT]],
    limit: int,
) -> list[Outcome[ResultT]]:
    """Run distinct rows in batches of similar size; outcomes in the order of `rows`."""
    known: dict[bytes, int] = {}
    distinct: list[Kept] = []
    places: list[int] = []
    for row in rows:
        content = row.indices.cpu().numpy().tobytes()
        if content not in known:
            known[content] = len(distinct)
            distinct.append(row)
        places.append(known[content])
    outcomes: dict[int, Outcome[ResultT]] = {}
    for batch in _batches(distinct, limit):
        chosen = [distinct[place] for place in batch]
        cache = gather(prefix, chosen)
        held = cache.entry_nbytes
        for place, nbytes, result in zip(batch, held, run(cache, chosen), strict=True):
            outcomes[place] = Outcome(result=result, nbytes=nbytes)
    return [outcomes[place] for place in places]


def _batches(rows: Sequence[Kept], limit: int) -> Iterator[list[int]]:
    """Places of rows, small ones first, cut where a batch is full or its rows too unlike."""
    sizes = [row.tokens for row in rows]
    order = sorted(range(len(rows)), key=lambda place: sizes[place])
    batch: list[int] = []
    for place in order:
        too_large = bool(batch) and sizes[place] > SIZE_RATIO * sizes[batch[0]]
        if len(batch) == limit or too_large:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
