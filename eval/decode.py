"""Many compressed caches of one prompt, run as one batch: greedy answers and given replies.

Each cache holds the same prompt with other tokens evicted; its heads may keep different numbers of
them. `EvictingCache.select` gathers all from one prefill. Caches leave the batch when their answer
ends, and equal ones run once. Greedy decoding only (`kvp.hf.generation`); one by one the tokens are
those of `model.generate(do_sample=False)` on the same cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.tasks import Prompt
from kvp.data.metrics import CHOICE, CHOICE_NORM
from kvp.data.metrics import chosen as choice_of
from kvp.hf import EvictingCache, Prefill, generation, prefill
from kvp.ranking import EMPTY_SLOT
from kvp.scoring import Needs

ResultT = TypeVar("ResultT")

MAXIMUM_LOGITS = 2**26
"""Logits of one teacher-forced batch (256 MiB in float32)."""


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values of a prefill: what compressed caches are gathered from."""

    keys: Sequence[Tensor]
    """Per layer [1, H, N, D], after RoPE."""
    values: Sequence[Tensor]
    """Per layer [1, H, N, D]."""
    others: Mapping[int, Any] = field(default_factory=dict)
    """Caches of the layers that nothing is evicted from, after N tokens (`kvp.hf.model_config`)."""

    @classmethod
    def of(cls, prefill: Prefill) -> Prefix:
        """What a cache may keep of a prefill: not the tokens that are fed again."""
        tokens = prefill.tokens
        return cls(
            keys=[keys[:, :, :tokens] for keys in prefill.keys],
            values=[values[:, :, :tokens] for values in prefill.values],
            others={} if prefill.observation is None else prefill.observation.others_kept,
        )

    @property
    def tokens(self) -> int:
        """N, tokens in the cache before eviction."""
        return self.keys[0].shape[2]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The tokens one compressed cache keeps."""

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
    """Result of one compressed cache."""

    result: ResultT
    nbytes: int
    """Bytes of its keys and values right after the eviction."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model, and how it answers prompts from compressed caches."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decode_batch: int
    """Maximum number of compressed caches decoded as one batch."""
    max_new_tokens: int | None = None
    """Maximum number of generated tokens; None for the number of each task."""

    def prefill(
        self, prompt: Prompt, protocol: str, needs: Needs | Iterable[Needs] = ()
    ) -> Prefill:
        """Run a prompt up to the boundary of a protocol, with the token that is fed again."""
        again = prompt.fed_again(protocol)
        ids = prompt.ids[None, : prompt.boundary(protocol) + again].to(self.model.device)
        seen = prefill(self.model, ids, needs, tokenizer=self.tokenizer, fed_again=again)
        return replace(seen, question=prompt.question_tokens(protocol))

    def answers(
        self, prompt: Prompt, prefix: Prefix, compressed: Sequence[Kept]
    ) -> list[Outcome[list[int]]]:
        """Greedy answer from every cache, as token ids."""
        return greedy(
            self.model, prefix, compressed, prompt.ids[prefix.tokens :],
            max_new_tokens=self.max_new_tokens or prompt.sample.max_new_tokens,
            ends=generation.end_tokens(self.model, self.tokenizer),
            decode_batch=self.decode_batch,
        )  # fmt: skip

    def losses(
        self, prompt: Prompt, prefix: Prefix, compressed: Sequence[Kept]
    ) -> list[Outcome[float]]:
        """Negative log-likelihood of the prompt's reply from every cache, summed, in nats."""
        return forced(
            self.model, prefix, compressed, prompt.ids[prefix.tokens :], prompt.reply,
            decode_batch=self.decode_batch,
        )  # fmt: skip

    def choice_losses(
        self, prompt: Prompt, prefix: Prefix, compressed: Sequence[Kept]
    ) -> list[Outcome[list[float]]]:
        """Negative log-likelihood of each of the prompt's choices from every cache, in nats."""
        return chosen(
            self.model, prefix, compressed, prompt.ids[prefix.tokens :],
            [torch.tensor(ids) for ids in prompt.encoded.choice_ids],
            decode_batch=self.decode_batch,
        )  # fmt: skip

    def text(self, ids: list[int]) -> str:
        """The text of an answer."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def all_kept(prefix: Prefix) -> Kept:
    """The cache that keeps everything."""
    heads = prefix.keys[0].shape[1]
    indices = torch.arange(prefix.tokens).expand(len(prefix.keys), heads, -1)
    return Kept(indices=indices)


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    prefix: Prefix,
    compressed: Sequence[Kept],
    feed: Tensor,
    *,
    max_new_tokens: int,
    decode_batch: int,
    ends: Sequence[int],
) -> list[Outcome[list[int]]]:
    """Greedy continuation of every cache, the ending token included where one was reached.

    `feed` [F] int64 are the prompt tokens after the eviction, F >= 1; `ends` the token ids that end
    an answer (`kvp.hf.generation.end_tokens`).
    """

    def run(cache: EvictingCache, batch: Sequence[Kept]) -> list[list[int]]:
        fed = feed.expand(len(batch), -1)
        return generation.greedy(
            model, cache, fed, prefix.tokens, max_new_tokens=max_new_tokens, ends=ends
        )

    return _in_batches(prefix, compressed, run, decode_batch)


@torch.inference_mode()
def forced(
    model: PreTrainedModel,
    prefix: Prefix,
    compressed: Sequence[Kept],
    feed: Tensor,
    reply: Tensor,
    *,
    decode_batch: int,
) -> list[Outcome[float]]:
    """Negative log-likelihood of a given reply, summed over its tokens, for every cache.

    `feed` [F] int64 are the prompt tokens after the eviction, F >= 1; `reply` [R] int64, R >= 1.
    """
    limit = _rows_of_logits(model, len(reply), decode_batch)

    def run(cache: EvictingCache, batch: Sequence[Kept]) -> list[float]:
        return _losses(model, cache, feed, reply, prefix.tokens, len(batch))

    return _in_batches(prefix, compressed, run, limit)


@torch.inference_mode()
def chosen(
    model: PreTrainedModel,
    prefix: Prefix,
    compressed: Sequence[Kept],
    feed: Tensor,
    choices: Sequence[Tensor],
    *,
    decode_batch: int,
) -> list[Outcome[list[float]]]:
    """Negative log-likelihood of every choice, summed over its tokens, for every cache.

    All choices go on from the same cache after `feed` [F] int64, F >= 1; each is [R] int64, R >= 1.
    """
    limit = _rows_of_logits(model, max(map(len, choices)), decode_batch)

    def run(cache: EvictingCache, batch: Sequence[Kept]) -> list[list[float]]:
        if len(feed) > 1:
            before = feed[:-1].to(model.device).expand(len(batch), -1)
            generation.next_logits(model, before, cache, prefix.tokens, keep=1)
        position = prefix.tokens + len(feed) - 1
        by_choice = [
            _losses(model, cache.fork(), feed[-1:], choice, position, len(batch))
            for choice in choices
        ]
        return [list(losses) for losses in zip(*by_choice, strict=True)]

    return _in_batches(prefix, compressed, run, limit)


def _rows_of_logits(model: PreTrainedModel, tokens: int, decode_batch: int) -> int:
    """Caches whose logits of `tokens` tokens are computed at once."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return max(1, min(decode_batch, MAXIMUM_LOGITS // (tokens * vocabulary)))


def _losses(
    model: PreTrainedModel,
    cache: EvictingCache,
    feed: Tensor,
    reply: Tensor,
    position: int,
    batch: int,
) -> list[float]:
    """Negative log-likelihood of `reply` [R] after `feed` [F], which begins at `position`."""
    target = reply.to(model.device)
    fed = torch.cat([feed.to(model.device), target[:-1]]).expand(batch, -1)
    logits = generation.next_logits(model, fed, cache, position, keep=len(reply))
    log_probs = logits.float().log_softmax(-1)
    of_targets = log_probs.gather(-1, target.expand(batch, -1)[..., None])[..., 0]
    totals: list[float] = (-of_targets.double().sum(-1)).tolist()
    return totals


def gather(prefix: Prefix, batch: Sequence[Kept]) -> EvictingCache:
    """One batch with an entry per `Kept`; heads with fewer tokens are filled with empty slots."""
    width = max(kept.width for kept in batch)
    layers, heads, _ = batch[0].indices.shape
    slots = torch.full((len(batch), layers, heads, width), EMPTY_SLOT)
    for index, kept in enumerate(batch):
        slots[index, :, :, : kept.width] = kept.indices
    widest = torch.stack([kept.counts for kept in batch]).amax(dim=(0, 2)).tolist()
    slots = slots.to(prefix.keys[0].device)
    indices = [slots[:, layer, :, : widest[layer]] for layer in range(layers)]
    return EvictingCache.select(
        prefix.keys, prefix.values, indices, seen=prefix.tokens, others=prefix.others
    )


def _in_batches(
    prefix: Prefix,
    compressed: Sequence[Kept],
    run: Callable[[EvictingCache, Sequence[Kept]], list[ResultT]],
    limit: int,
) -> list[Outcome[ResultT]]:
    """Run distinct caches in batches; outcomes in the order of `compressed`."""
    numbers: dict[bytes, int] = {}
    distinct: list[Kept] = []
    number_of: list[int] = []
    for kept in compressed:
        content = kept.indices.cpu().numpy().tobytes()
        if content not in numbers:
            numbers[content] = len(distinct)
            distinct.append(kept)
        number_of.append(numbers[content])
    outcomes: dict[int, Outcome[ResultT]] = {}
    for batch in _batches(distinct, limit):
        members = [distinct[number] for number in batch]
        cache = gather(prefix, members)
        sizes = cache.entry_nbytes
        for number, nbytes, result in zip(batch, sizes, run(cache, members), strict=True):
            outcomes[number] = Outcome(result=result, nbytes=nbytes)
    return [outcomes[number] for number in number_of]


def _batches(compressed: Sequence[Kept], limit: int) -> Iterator[list[int]]:
    """Indices, small caches first, in batches of at most `limit`."""
    sizes = [kept.tokens for kept in compressed]
    order = sorted(range(len(compressed)), key=lambda index: sizes[index])
    for start in range(0, len(order), limit):
        yield order[start : start + limit]


Fields = dict[str, Any]
"""Fields of a record that say what came out."""


def outcomes(
    decoder: Decoder, prompt: Prompt, prefix: Prefix, compressed: Sequence[Kept]
) -> list[Outcome[Fields]]:
    """Outcome of every cache, as the prompt's metric asks: `score` or, of a given reply, `nll`."""
    if prompt.forced:
        tokens = len(prompt.reply)
        return [
            Outcome(nbytes=loss.nbytes, result={"nll": loss.result, "reply_tokens": tokens})
            for loss in decoder.losses(prompt, prefix, compressed)
        ]
    if prompt.encoded.choice_ids:
        return [
            Outcome(nbytes=losses.nbytes, result=_chosen(prompt, losses.result))
            for losses in decoder.choice_losses(prompt, prefix, compressed)
        ]
    written = [
        (answer.nbytes, decoder.text(answer.result))
        for answer in decoder.answers(prompt, prefix, compressed)
    ]
    return [
        Outcome(nbytes=nbytes, result={"prediction": text, "score": prompt.score(text)})
        for nbytes, text in written
    ]


def _chosen(prompt: Prompt, losses: Sequence[float]) -> Fields:
    """The choice that the metric picks; `losses` in nats, one per choice."""
    sample = prompt.sample
    choice, by_character = (choice_of(losses, sample.choices, one) for one in (CHOICE, CHOICE_NORM))
    picked = by_character if sample.metric == CHOICE_NORM else choice
    return {
        "prediction": sample.choices[picked],
        "score": float(picked == sample.gold),
        "score_norm": float(by_character == sample.gold),
        "choice_nll": list(losses),
    }
