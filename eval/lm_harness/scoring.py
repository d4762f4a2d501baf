"""Log-likelihoods and caches of one request: prefill once, compress once, feed the rest.

The same pieces as kvp-eval's (`eval.evaluate`): `keep` selects, `gather` builds the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.evaluate import MAXIMUM_LOGITS, Prefilled, Prefix, gather, keep
from eval.lm_harness.compression import Compression
from kvp.hf import EvictingCache, evicting, prefill
from kvp.hf.attention import kvp_attention_set
from kvp.hf.eviction import pieces
from kvp.hf.prefill import next_logits
from kvp.scoring import Needs

LogLikelihood = tuple[float, bool]
"""Of a continuation, in nats, and whether greedy decoding would give it."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A model, and how its caches are compressed."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    compression: Compression
    batch: int
    """Continuations of one context that are fed together, at most."""
    dtype: torch.dtype = torch.float32
    """Of the softmax."""

    @torch.inference_mode()
    def context_cache(self, ids: Tensor, after: int) -> EvictingCache:
        """The compressed cache of all but the last `after` of `ids` [T] int64.

        With `after=1` the last token is prefilled too, so that the method sees its query, and left
        out of the cache: it is fed again. Empty where nothing comes before those tokens.
        """
        cut = max(len(ids) - after, 0)
        if cut == 0:
            return EvictingCache.of(self.model.config)
        setting = self.compression.setting
        again = int(after == 1)
        shrinks = setting.method.self_sized or setting.tokens(cut) < cut
        scorer = setting.method.scorer
        needs = scorer.needs if scorer is not None and shrinks else Needs()
        fed = ids[None, : cut + again].to(self.model.device)
        seen = prefill(self.model, fed, needs, tokenizer=self.tokenizer, fed_again=again)
        start = Prefilled(prefill=seen, prefix=Prefix.of(seen))
        ((_, kept),) = keep(start, [setting], None)
        return gather(start.prefix, [kept])

    @torch.inference_mode()
    def continuations(
        self, context: Sequence[int], after: int, continuations: Sequence[Sequence[int]]
    ) -> list[LogLikelihood]:
        """Log-likelihood of each continuation of a context of which all but `after` is compressed.

        Every token after the compressed ones attends to what was kept, also the last one of the
        context, from which the first token of a continuation is predicted. Continuations that
        differ in their last token alone are fed once.
        """
        ids = torch.tensor(context, device=self.model.device)
        with kvp_attention_set(self.model):
            cache = self.context_cache(ids, after)
            seen = cache.get_seq_length()
            if seen < len(ids) - 1:
                next_logits(self.model, ids[None, seen:-1], cache, seen, keep=1)
            sharing: dict[tuple[int, ...], list[int]] = {}  # what is fed -> continuations
            for number, each in enumerate(continuations):
                sharing.setdefault((context[-1], *each[:-1]), []).append(number)
            scores: dict[int, LogLikelihood] = {}
            for batch in self._batches(sorted(sharing, key=len)):
                for fed, log_probs in self._fed(cache, batch, len(ids) - 1):
                    for number in sharing[fed]:
                        scores[number] = _of_targets(log_probs, continuations[number])
        return [scores[number] for number in range(len(continuations))]

    @torch.inference_mode()
    def running_text(self, tokens: Sequence[int], scored: int) -> LogLikelihood:
        """Log-likelihood of the last `scored` of `tokens`, read with an eviction every so often.

        A text has no context to compress. So the cache is compressed each time
        `Compression.rolling_chunk` tokens were read, to the budget of all tokens read so far; each
        token is predicted from what the latest eviction left and the tokens since.
        """
        settings, method = self.compression, self.compression.method
        fed = torch.tensor([tokens[:-1]], device=self.model.device)  # [1, T - 1]
        if method.scorer is None:
            with kvp_attention_set(self.model):
                cache = EvictingCache.of(self.model.config)
                logits = next_logits(self.model, fed, cache, 0, keep=scored)
            return _of_targets(logits[0].log_softmax(-1, self.dtype), tokens[-scored:])
        block = evicting(
            self.model, method.scorer, settings.setting.budget or "100%",
            settings.setting.protection, allocator=method.rule, tokenizer=self.tokenizer,
        )  # fmt: skip
        cache = EvictingCache.of(self.model.config)
        log_probs = []
        with block:
            for start, stop in pieces(fed.shape[1], settings.rolling_chunk):
                if start == stop:
                    continue
                keep_last = min(stop - start, max(stop - (fed.shape[1] - scored), 1))
                logits = next_logits(self.model, fed[:, start:stop], cache, start, keep=keep_last)
                log_probs.append(logits[0].log_softmax(-1, self.dtype))
        return _of_targets(torch.cat(log_probs)[-scored:], tokens[-scored:])

    def _batches(self, fed: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Inputs, short ones first, as many together as `batch` and the memory of logits allow."""
        vocabulary = self.model.config.get_text_config().vocab_size
        batch: list[tuple[int, ...]] = []
        for tokens in fed:
            limit = max(1, min(self.batch, MAXIMUM_LOGITS // (len(tokens) * vocabulary)))
            if len(batch) >= limit:
                yield batch
                batch = []
            batch.append(tokens)
        yield batch

    def _fed(
        self, cache: EvictingCache, batch: Sequence[tuple[int, ...]], position: int
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Log-probabilities [F, V] after each of the F tokens of every input, which are padded on
        the right: what comes later changes nothing.
        """
        width = max(map(len, batch))
        rows = [[*tokens, *(0,) * (width - len(tokens))] for tokens in batch]
        fed = torch.tensor(rows, device=self.model.device)
        empty = cache.get_seq_length() == 0
        fork = EvictingCache.of(self.model.config) if empty else cache.fork(len(batch))
        logits = next_logits(self.model, fed, fork, position, keep=width)
        for tokens, row in zip(batch, logits, strict=True):
            yield tokens, row[: len(tokens)].log_softmax(-1, self.dtype)


def _of_targets(log_probs: Tensor, targets: Sequence[int]) -> LogLikelihood:
    """Sum over `targets` of their `log_probs` [F, V], and whether each is the most likely."""
    index = torch.tensor(targets, device=log_probs.device)
    total = log_probs.gather(-1, index[:, None]).double().sum()
    return float(total), bool((log_probs.argmax(-1) == index).all())


def shortened(context: Sequence[int], continuation: Sequence[int], limit: int) -> list[int]:
    """The end of a context that fits with its continuation into `limit` tokens, as HFLM cuts it.

    The last token of the continuation is not fed.
    """
    together = [*context, *continuation][-(limit + 1) :]
    return together[: -len(continuation)]
