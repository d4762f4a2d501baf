"""Traces of sequences: prompts, continuations, and the queries, keys and values of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvp.data.encode import Encoded, encode
from kvp.data.sample import Sample
from kvp.errors import UsageError
from kvp.hf import observe
from kvp.hf.answers import Answered, Answers, Prompt
from kvp.hf.decoding_batch import Prefix
from kvp.hf.generation import end_tokens
from kvp.hf.host_copies import HostCopies, OnHost
from kvp.hf.limits import context_limit, rope_switch
from kvp.hf.scorer_inputs import ScorerInputs
from kvp.hf.traced import Traced
from kvp.scoring import ALL_QUERIES, Reconstruction
from kvp.store import SequenceRecord
from kvp.store.importance_grid import edges_of, label_grids

LABEL_PASSES = {"kvzip": Reconstruction(), "kvzip_plus": Reconstruction(weighted=True)}
"""Labels that are the attention a token receives while the model repeats its prompt."""


def check_reach(config: PreTrainedConfig, name: str, length: int, max_new_tokens: int) -> None:
    """Raise UsageError when prompts of `length` tokens and their continuations may not fit."""
    reach = context_limit(config)
    if reach is not None and length + max_new_tokens > reach:
        raise UsageError(
            f"--length {length} with --max_new_tokens {max_new_tokens} exceeds the context of "
            f"{name}, {reach} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What is recorded of every sequence."""

    continuation: Literal["model", "reference"]
    """What follows the prompt: the model's greedy answer, or the data's."""
    max_new_tokens: int
    """Most tokens of it; a sample's own number may be smaller."""
    queries: bool = True
    """Whether traces have queries."""
    grid: int = 0
    """Compression points of the grid of importance, 0 for none (`kvp.store.importance_grid`)."""
    grid_labels: Sequence[str] = ()
    """Labels that the grid holds at all of its points."""
    labels: Sequence[str] = ()
    """Names of `LABEL_PASSES`."""


def collect_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Iterable[tuple[int, Sample]],
    recorded: Recorded,
    *,
    rows: int,
) -> Iterator[Traced]:
    """Traces of samples, each given with its index in the store, in the order in which they end.

    Answers of the model are made up to `rows` at a time (`kvp.hf.answers`), without their end
    token, which a model never reads while it answers. Prompt and answer are recorded by passes of
    the sequence alone, so a trace depends on the others by rounding only: where two tokens are as
    likely up to it, the answer may be another one. A reference is recorded in one
    pass with its prompt.

    Raises UsageError when references are requested and a sample has none.
    """
    collector = _Collector(model, tokenizer, recorded)
    if recorded.continuation == "reference":
        for job in samples:
            yield collector.referenced(*job)
        return
    answers = Answers(
        model,
        ends=end_tokens(model, tokenizer),
        rows=rows,
        queries=collector.needs_queries,
        host=None if recorded.grid else collector.host,
    )
    for answered in answers.of(collector.prompts(samples, rows)):
        yield collector.answered(answered)
        yield from collector.left_out()
    yield from collector.left_out()


class _Collector:
    """Makes traces of samples, and prompts of them whose answers are made together."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recorded: Recorded
    ) -> None:
        self.host = HostCopies(model.device)
        self.needs_queries = recorded.queries or recorded.grid > 0
        self._model = model
        self._tokenizer = tokenizer
        self._recorded = recorded
        self._asked: dict[int, tuple[Sample, Encoded]] = {}
        self._left_out: list[int] = []

    def prompts(self, samples: Iterable[tuple[int, Sample]], window: int) -> Iterator[Prompt]:
        """Prompts of samples; of every `window` samples the longest first."""
        source = iter(samples)
        while jobs := list(islice(source, window)):
            prompts = [prompt for job in jobs for prompt in self._prompt(*job)]
            yield from sorted(prompts, key=lambda prompt: len(prompt.ids), reverse=True)

    def _prompt(self, index: int, sample: Sample) -> list[Prompt]:
        """The prompt of a sample; none where it is left out."""
        encoded = encode(sample, self._tokenizer)
        self._asked[index] = (sample, encoded)
        limit = min(self._recorded.max_new_tokens, sample.max_new_tokens)
        switch = rope_switch(self._model.config)
        if switch is not None and len(encoded.ids) <= switch < len(encoded.ids) + limit:
            self._left_out.append(index)
            return []
        return [Prompt(number=index, ids=encoded.ids, max_new_tokens=limit)]

    def left_out(self) -> Iterator[Traced]:
        """Traces of the prompts left out: their answers may reach the length that changes RoPE."""
        while self._left_out:
            index = self._left_out.pop()
            sample, encoded = self._asked.pop(index)
            limit = min(self._recorded.max_new_tokens, sample.max_new_tokens)
            reply = greedy(self._model, self._tokenizer, encoded.ids, limit)
            yield self._in_one_pass(index, sample, encoded, reply)

    def referenced(self, index: int, sample: Sample) -> Traced:
        """The trace of a sample with its reference."""
        encoded = encode(sample, self._tokenizer)
        if not encoded.reply_ids:
            raise UsageError(
                f"--answers reference: {sample.id} has no reference; use --answers model"
            )
        limit = min(self._recorded.max_new_tokens, sample.max_new_tokens)
        return self._in_one_pass(index, sample, encoded, encoded.reply_ids[:limit])

    def answered(self, answered: Answered) -> Traced:
        """The trace of a prompt and its answer."""
        sample, encoded = self._asked.pop(answered.prompt.number)
        record = _record(
            sample, encoded, answered.reply, answered.prompt.number, self._recorded.grid
        )
        labels = self._labels(encoded, answered.prefix)
        pieces = [answered.prompt_queries, answered.reply_queries]
        return self._traced(record, answered.prefix, [piece for piece in pieces if piece], labels)

    def _in_one_pass(
        self, index: int, sample: Sample, encoded: Encoded, reply: tuple[int, ...]
    ) -> Traced:
        device, queries = self._model.device, ALL_QUERIES if self.needs_queries else 0
        ids = torch.tensor([encoded.ids + reply], device=device)
        seen = observe(self._model, ids, queries=queries, last_logits=True)
        labels = {}
        if self._recorded.labels:
            prompt = observe(self._model, ids[:, : len(encoded.ids)], queries=0, last_logits=True)
            labels = self._labels(encoded, Prefix.of(prompt))
        record = _record(sample, encoded, reply, index, self._recorded.grid)
        return self._traced(record, Prefix.of(seen), [seen.queries], labels)

    def _traced(
        self,
        record: SequenceRecord,
        held: Prefix,
        queries: Sequence[OnHost | tuple[Tensor, ...]],
        labels: dict[str, Tensor],
    ) -> Traced:
        """Begin the copies of what was recorded; `queries` are pieces of the sequence."""
        grids = {}
        if self._recorded.grid:
            whole = tuple(torch.cat(pieces, dim=2) for pieces in zip(*queries, strict=True))
            keys = tuple(layer.contiguous() for layer in held.keys)  # as they are in a store
            seen = _Seen(queries=whole, keys=keys)
            labelled = _grids(seen, record, self._recorded.grid_labels)
            grids = {label: self.host.start([grid]) for label, grid in labelled.items()}
        kept = queries if self._recorded.queries else ()
        return Traced(
            record=record,
            keys=self.host.start(held.keys),
            values=self.host.start(held.values),
            queries=[
                piece if isinstance(piece, OnHost) else self.host.start(piece) for piece in kept
            ],
            grids=grids,
            labels=labels,
        )

    @torch.no_grad()
    def _labels(self, encoded: Encoded, held: Prefix) -> dict[str, Tensor]:
        """Labels of a prompt of P tokens: name -> [L, H, P] float32 on the CPU.

        From passes over the cache of the prompt, whose tokens `held` begins with, in which the
        model repeats it. Raises ModelError for a model these passes do not know.
        """
        if not self._recorded.labels:
            return {}
        prompt = slice(len(encoded.ids))
        scorer_inputs = ScorerInputs(
            self._model,
            torch.tensor([encoded.ids], device=self._model.device),
            [keys[:, :, prompt] for keys in held.keys],
            [values[:, :, prompt] for values in held.values],
            others=held.others,
            tokenizer=self._tokenizer,
        )
        return {
            name: torch.cat(scorer_inputs.reconstruction(LABEL_PASSES[name])).float().cpu()
            for name in self._recorded.labels
        }


@torch.inference_mode()
def greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: tuple[int, ...],
    max_new_tokens: int,
) -> tuple[int, ...]:
    """The model's greedy continuation, without the end token.

    Penalties that the model's generation configuration sets are off: evaluation compares
    plain arg-max answers, and traces should show the same ones.
    """
    ends = end_tokens(model, tokenizer)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        temperature=1.0,
        top_p=1.0,
        top_k=50,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )
    ids = torch.tensor([prompt], device=model.device)
    made = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )
    answer = [int(token) for token in made[0, len(prompt) :]]
    return tuple(answer[:-1] if answer and answer[-1] in ends else answer)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a grid is computed from, per layer: queries [1, Q, T, D], keys [1, H, T, D]."""

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]


def _grids(seen: _Seen, record: SequenceRecord, labels: Sequence[str]) -> dict[str, Tensor]:
    """Label -> grid of all layers, [L, H, intervals, T], each layer computed where the model is."""
    layers = []
    for queries, keys in zip(seen.queries, seen.keys, strict=True):
        grouped = queries.reshape(*keys.shape[:2], -1, *keys.shape[2:])  # [1, H, G, T, D]
        layers.append(label_grids(grouped, keys, record, labels))
    return {label: torch.cat([layer[label] for layer in layers]) for label in layers[0]}


def _record(
    sample: Sample, encoded: Encoded, reply: tuple[int, ...], index: int, grid: int
) -> SequenceRecord:
    start = encoded.prompt_length
    edges, common_edges = (
        edges_of(start + len(reply), encoded.context_length, start, grid) if grid else ((), ())
    )
    spans = encoded.reply_spans + (((start, start + len(reply)),) if reply else ())
    return SequenceRecord(
        index=index,
        id=sample.id,
        task=sample.task,
        split=sample.split,
        length=start + len(reply),
        context_length=encoded.context_length,
        prompt_length=start,
        token_ids=encoded.ids + reply,
        reply_spans=spans,
        references=sample.references,
        max_new_tokens=sample.max_new_tokens,
        metric=sample.metric,
        edges=edges,
        common_edges=common_edges,
    )
