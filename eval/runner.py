"""One prompt under one protocol: prefill once, select tokens per method, decode as one batch.

Each compressed cache holds the same prompt with other tokens evicted; its heads may keep different
numbers of them. `kvp.hf.shrink.gather` gathers all from one prefill. Caches leave the batch when
their answer ends, and equal ones run once. Greedy decoding only (`kvp.hf.decoding`); one by one
the tokens are those of `model.generate(do_sample=False)` on the same cache.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.config import EvalConfig
from eval.methods import Method
from eval.prompts import Prompt
from eval.record_fields import make_record, text_fields, tokens_per_head
from eval.results.records import Record
from kvp.grouping import group_by
from kvp.hf import EvictingCache, Prefill, prefill, run_and_record
from kvp.hf.decoding import decode_greedily, end_tokens, next_logits
from kvp.hf.model_identity import model_identity, weights_digest
from kvp.hf.shrink import all_tokens, gather
from kvp.ops.future_attention import future_attention
from kvp.ranking import Choice, score_and_select
from kvp.scoring import ALL_QUERIES, Needs, needs_of

ResultT = TypeVar("ResultT")
Outcome = tuple[ResultT, int]
"""Result of one compressed cache, and the bytes of its keys and values right after the eviction."""

MAXIMUM_LOGITS = 2**26
"""Logits of one teacher-forced batch (256 MiB in float32)."""


def rows_of_logits(model: PreTrainedModel, tokens: int, most: int) -> int:
    """Rows whose logits of `tokens` tokens are computed at once, 1 to `most`."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    return max(1, min(most, MAXIMUM_LOGITS // (tokens * vocabulary)))


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A model, and how it answers prompts from compressed caches: what all prompts share."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: EvalConfig

    def identify_model(self) -> dict[str, Any]:
        """Name, revision and digests of the model (`kvp.hf.model_identity`), JSON."""
        weights, config = weights_digest(self.model), self.config
        return model_identity(config.model, config.revision, self.tokenizer, weights)

    def prefill(
        self, prompt: Prompt, protocol: str, needs: Needs | Iterable[Needs] = ()
    ) -> Prefill:
        """Run a prompt as far as a protocol caches it, with the token that is fed again."""
        again = prompt.fed_again(protocol)
        ids = prompt.ids[None, : prompt.cached_tokens(protocol) + again].to(self.model.device)
        start = prefill(self.model, ids, needs, tokenizer=self.tokenizer, fed_again=again)
        return replace(start, question_tokens=prompt.question_tokens(protocol))

    @torch.inference_mode()
    def generate_answers(
        self, prompt: Prompt, start: Prefill, kept_tokens: Sequence[Tensor]
    ) -> list[Outcome[list[int]]]:
        """Greedy answer from every cache, as token ids, the ending token included."""
        feed = prompt.ids[start.tokens :]
        ends = end_tokens(self.model, self.tokenizer)
        new = self.config.max_new_tokens or prompt.sample.max_new_tokens

        def run(cache: EvictingCache) -> list[list[int]]:
            fed = feed.expand(cache.batch, -1)
            return decode_greedily(
                self.model, cache, fed, start.tokens, max_new_tokens=new, ends=ends
            )

        return _in_batches(start, kept_tokens, run, self.config.decode_batch)

    @torch.inference_mode()
    def measure_losses(
        self, prompt: Prompt, start: Prefill, kept_tokens: Sequence[Tensor]
    ) -> list[Outcome[float]]:
        """Negative log-likelihood of the prompt's reply from every cache, summed, in nats."""
        target = prompt.reply.to(self.model.device)  # [R]
        feed = torch.cat([prompt.ids[start.tokens :].to(self.model.device), target[:-1]])

        def run(cache: EvictingCache) -> list[float]:
            fed = feed.expand(cache.batch, -1)
            logits = next_logits(self.model, fed, cache, start.tokens, keep=len(target))
            log_probs = logits.float().log_softmax(-1)
            chosen = log_probs.gather(-1, target.expand(len(fed), -1)[..., None])[..., 0]
            return list((-chosen.double().sum(-1)).tolist())

        limit = rows_of_logits(self.model, len(target), self.config.decode_batch)
        return _in_batches(start, kept_tokens, run, limit)

    def decode(self, ids: list[int]) -> str:
        """The text of an answer."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _in_batches(
    start: Prefill,
    kept_tokens: Sequence[Tensor],
    run: Callable[[EvictingCache], list[ResultT]],
    limit: int,
) -> list[Outcome[ResultT]]:
    """Run distinct caches in batches; outcomes in the order of `kept_tokens`."""
    contents = [kept.cpu().numpy().tobytes() for kept in kept_tokens]
    distinct = dict(zip(contents, kept_tokens, strict=True))
    by_content: dict[bytes, Outcome[ResultT]] = {}
    order = sorted(distinct, key=lambda content: tokens_per_head(distinct[content]))
    for first in range(0, len(order), limit):  # small caches first
        batch = order[first : first + limit]
        cache = gather(start, [distinct[content] for content in batch])
        sizes = cache.entry_nbytes
        by_content |= zip(batch, zip(run(cache), sizes, strict=True), strict=True)
    return [by_content[content] for content in contents]


def measure_outcomes(
    runner: Runner, prompt: Prompt, start: Prefill, kept_tokens: Sequence[Tensor]
) -> list[Outcome[Record]]:
    """Outcome of every cache: the `score` of its answer or, for a given reply, `nll`.

    `kept_tokens` are the indices of each: [L, H, S] int64, `EMPTY_SLOT` after a head's last one.
    """
    if prompt.teacher_forced:
        return [
            ({"nll": loss, "reply_tokens": len(prompt.reply)}, nbytes)
            for loss, nbytes in runner.measure_losses(prompt, start, kept_tokens)
        ]
    answers = runner.generate_answers(prompt, start, kept_tokens)
    texts = [(runner.decode(answer), nbytes) for answer, nbytes in answers]
    return [({"prediction": text, "score": prompt.score(text)}, nbytes) for text, nbytes in texts]


def evaluate_together(
    runner: Runner, prompts: Sequence[Prompt], protocol: str, methods: Sequence[Method]
) -> Iterator[list[Record]]:
    """The records of each prompt, one per method, for prompts of one prefill (`eval.work`).

    Methods that read the answer to come select tokens for each prompt anew, all others once.
    """
    needs = [needs_of(method.scorer) for method in methods if method.scorer]
    seeing = [method for method in methods if method.scorer and needs_of(method.scorer).future]
    whole = Needs(queries=ALL_QUERIES if seeing else 0)  # `measure_future_attention` reads them
    start = runner.prefill(prompts[0], protocol, [whole, *needs])
    blind = [method for method in methods if method not in seeing]
    shared = list(select_for_methods(start, blind, None))
    for prompt in prompts:
        text = text_fields(prompt, runner.decode) if prompt.readable else {}
        selected = list(shared)
        if seeing:
            future = measure_future_attention(runner, prompt, start)
            selected += select_for_methods(start, seeing, future)
        results = measure_outcomes(runner, prompt, start, [kept for _, kept in selected])
        yield [
            {
                **make_record(runner.config, prompt, protocol, method, kept, start.tokens),
                "cache_bytes": nbytes,
                **result,
                **text,
            }
            for (method, kept), (result, nbytes) in zip(selected, results, strict=True)
        ]


@torch.inference_mode()
def measure_future_attention(runner: Runner, prompt: Prompt, start: Prefill) -> list[Tensor]:
    """Attention from all later tokens to the cached ones: per layer [1, H, N] float32.

    The future is the rest of the prompt and the greedy answer with the full cache (or the reference
    reply, where the task scores one).
    """
    if prompt.teacher_forced:
        reply = prompt.reply
    else:
        ((answer, _),) = runner.generate_answers(prompt, start, [all_tokens(start)])
        reply = torch.tensor(answer)
    rest = prompt.ids[start.cache.get_seq_length() :]
    fed = torch.cat([rest, reply]).to(runner.model.device)
    after = run_and_record(runner.model, fed[None], cache=start.cache.fork())
    result = []
    for keys, before, later in zip(after.keys, start.queries, after.queries, strict=True):
        queries = torch.cat([before, later], dim=2)  # [1, Q, T, D], T tokens of prompt and reply
        heads = keys.shape[1]
        grouped = queries.view(1, heads, -1, *queries.shape[2:])  # [1, H, G, T, D]
        result.append(future_attention(grouped, keys, prefix_length=start.tokens))
    return result


def select_for_methods(
    start: Prefill, methods: Sequence[Method], future: list[Tensor] | None
) -> Iterator[tuple[Method, Tensor]]:
    """Select the tokens of every method; methods with the same scorer share its scores."""
    tokens = start.tokens
    shrinking = [method for method in methods if method.shrinks(tokens)]
    yield from ((method, all_tokens(start)) for method in methods if not method.shrinks(tokens))
    for same in group_by(shrinking, lambda method: method.scorer_key).values():
        scorer = same[0].scorer
        assert scorer is not None, "the full cache keeps everything"
        choices = [Choice(it.tokens(tokens), it.protection, it.allocator) for it in same]
        views = partial(start.views, needs_of(scorer), future=future)
        for number, (kept,) in score_and_select(views, scorer, choices):
            yield same[number], kept
