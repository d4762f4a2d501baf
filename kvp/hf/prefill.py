"""Run a model: what one forward pass records, and the views that scorers read of it.

The one path from a model to scores: collection, eviction, evaluation and calibration run a prompt
to a `Prefill` and iterate over `Prefill.views`. Views hold no padding: `split_batch` splits a
padded batch. Hidden states become statistics as they pass, unless a scorer reads all (KVzap).

Before a prompt is answered, its last token is fed again (`fed_again`), so that its logits come
from the evicted cache. Scorers still see it, above all its query: views hold every token of the
prefill, as do the statistics and extra passes behind them. It is not ranked, and no cache keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, use_kvp_attention
from kvp.hf.cache import EvictingCache
from kvp.hf.cache_layers import UntouchedLayer, copy_layers, copy_without_padding
from kvp.hf.calls import refuse_inside_block
from kvp.hf.decoding import next_logits
from kvp.hf.hidden_states import HiddenRecord, HiddenRecorder
from kvp.hf.model_access import unwrap_model
from kvp.hf.model_checks import check_mode
from kvp.hf.scorer_inputs import ScorerInputs, whole_prompt_input
from kvp.scoring import ALL_QUERIES, Needs, View


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """What a forward pass over prompts of one length recorded, or what a trace holds of a prompt.

    T = N + `fed_again` tokens, of which a cache may keep the first N. Tensors stay valid when the
    cache grows afterwards.
    """

    keys: Sequence[Tensor]
    """Per layer [B, H, T, D], after RoPE: every key of the cache, earlier passes included."""
    values: Sequence[Tensor]
    """Per layer [B, H, T, D]."""
    queries: Sequence[Tensor] = ()
    """Per layer [B, Q, W, D], after RoPE, of the last W tokens; empty when none were recorded."""
    layers: Sequence[int] | None = None
    """[L] index in the model of each layer; None where they are its first ones."""
    cache: EvictingCache = field(default_factory=EvictingCache)
    """The cache, ready for the next tokens; an empty one for stored tensors."""
    hidden: HiddenRecord | None = None
    """Statistics of the states entering each attention block, of the tokens fed in this pass."""
    untouched: Mapping[int, UntouchedLayer] = field(default_factory=dict)
    """Index in the model -> cache of a layer that nothing is evicted from, after all tokens."""
    untouched_before_fed_again: Mapping[int, UntouchedLayer] = field(default_factory=dict)
    """The same caches before the tokens that are fed again, for going on from the tokens kept."""
    inputs: ScorerInputs | None = None
    """Inputs beyond keys, values and queries; None where no scorer reads them."""
    question_tokens: int = 0
    """Tokens of the question, the last of the first N; 0 without one, and where it is unknown."""
    fed_again: int = 0
    """Last tokens that are fed once more after the eviction."""

    @classmethod
    def of(cls, cache: EvictingCache, hidden: HiddenRecorder | None = None) -> Prefill:
        """What a pass left in `cache` (whose recorder has the queries) and in `hidden`."""
        layers = cache.stored.values()
        return cls(
            keys=tuple(layer.keys for layer in layers),
            values=tuple(layer.values for layer in layers),
            queries=() if cache.recorder is None else cache.recorder.queries,
            layers=tuple(cache.stored),
            cache=cache,
            hidden=None if hidden is None else hidden.record,
            untouched=cache.untouched,
        )

    def with_inputs(
        self, model: PreTrainedModel, input_ids: Tensor, tokenizer: PreTrainedTokenizerBase | None
    ) -> Prefill:
        """The same with new inputs, of `input_ids` [B, T] int64."""
        recorded = self.keys, self.values, self.hidden, self.untouched
        return replace(self, inputs=ScorerInputs(model, input_ids, *recorded, tokenizer))

    @property
    def tokens(self) -> int:
        """Tokens that a cache may keep, N."""
        return self.keys[0].shape[2] - self.fed_again

    def views(
        self, needs: Needs, budget: int, *, future: Sequence[Tensor] | None = None
    ) -> Iterator[View]:
        """Yield the view of every layer for a scorer with `needs` that keeps `budget` tokens.

        `future` is per layer [B, H, N] float32 importance, for `needs.future`; tokens that are fed
        again have none (0 in the view). What `whole_prompt_input` names comes from `inputs`.
        ValueError where fewer queries were recorded than it reads; else `ScorerInputs.for_needs`.
        """
        extras: list[dict[str, Any]] = [{}] * len(self.keys)
        if whole_prompt_input(needs):
            assert self.inputs is not None
            extras = self.inputs.for_needs(needs)
        layers = range(len(self.keys)) if self.layers is None else self.layers
        question = self.question_tokens + self.fed_again if self.question_tokens else 0
        future = future if needs.future else None
        if future is not None and self.fed_again:
            future = [F.pad(importance, (0, self.fed_again)) for importance in future]
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            batch, _, tokens, _ = keys.shape
            yield View(
                layer=layers[index], keys=keys, values=values, budget=budget,
                positions=torch.arange(tokens, device=keys.device).expand(batch, tokens),
                queries=self._recent_queries(index, needs), fed_again=self.fed_again,
                question_tokens=question if needs.question else 0,
                future=None if future is None else future[index], **extras[index],
            )  # fmt: skip

    def _recent_queries(self, layer: int, needs: Needs) -> Tensor | None:
        """[B, Q, W, D]: the last queries of a layer that a scorer with `needs` reads."""
        if needs.queries == 0:
            return None
        tokens = self.keys[layer].shape[2]
        window = tokens if needs.queries == ALL_QUERIES else min(needs.queries, tokens)
        recorded = self.queries[layer].shape[2] if self.queries else 0
        if recorded < window:
            raise ValueError(f"{window} queries are needed, {recorded} were recorded")
        return self.queries[layer][:, :, recorded - window :]


@torch.no_grad()
def run_and_record(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    cache: EvictingCache | None = None,
    queries: int = ALL_QUERIES,
    hidden_after: Sequence[int] = (),
    every_state: bool = False,
    fed_again: int = 0,
) -> Prefill:
    """Feed `input_ids` [B, T] int64 (no padding) after `cache` and record what every layer sees.

    It keeps the queries of the last `queries` tokens fed (0: none). For each number in
    `hidden_after` it records statistics of the hidden states without that many first tokens; with
    `every_state` also the states themselves. The caches of layers that nothing is evicted from
    cannot be rolled back, so they are also kept as they were before the last `fed_again` tokens; a
    model with such layers runs twice then. The model keeps the attention that is set on it. Raises
    UsageError when `cache` has already been shrunk, inside an `evicting` block of the same model
    and in training mode; ModelError where weights are offloaded.
    """
    model = unwrap_model(model)
    check_mode(model)
    refuse_inside_block(model)
    cache = EvictingCache.of(model.config) if cache is None else cache
    if cache.evicted:
        raise UsageError("run_and_record needs a cache that still holds every token it has seen")
    cache.recorder = QueryRecorder(queries) if queries else None
    states = HiddenRecorder(hidden_after, every=every_state) if hidden_after else None
    try:
        with use_kvp_attention(model), nullcontext() if states is None else states.recording(model):
            split = input_ids.shape[1] - fed_again if cache.untouched and fed_again else 0
            for part in (input_ids[:, :split], input_ids[:, split:]) if split else (input_ids,):
                before = copy_layers(cache.untouched)
                next_logits(model, part, cache, cache.get_seq_length(), keep=1)
            after = copy_layers(cache.untouched)
        result = Prefill.of(cache, states)
    finally:
        cache.recorder = None
    before = before if split else after
    return replace(result, untouched=after, untouched_before_fed_again=before, fed_again=fed_again)


def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    needs: Needs | Iterable[Needs] = (),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    fed_again: int = 0,
) -> Prefill:
    """Run the model once over `input_ids` [B, T] int64 (no padding) and record what `needs` lists.

    `needs` are those of one or of all scorers that will read the result; `fed_again` of the tokens
    are fed once more after the eviction. UsageError inside an `evicting` block of the same model
    or in training mode, ModelError where hidden states cannot be recorded or weights are offloaded.
    """
    all_needs = (needs,) if isinstance(needs, Needs) else tuple(needs)
    windows = [need.queries for need in all_needs]
    observed = run_and_record(
        model,
        input_ids,
        queries=ALL_QUERIES if ALL_QUERIES in windows else max(windows, default=0),
        hidden_after=recorded_hidden(all_needs),
        every_state=any(need.every_state for need in all_needs),
        fed_again=fed_again,
    )
    return observed.with_inputs(model, input_ids, tokenizer)


def recorded_hidden(needs: Iterable[Needs]) -> tuple[int, ...]:
    """The numbers of first tokens to leave out of hidden states, one record each."""
    return tuple(sorted({need.hidden_after for need in needs if need.hidden_after is not None}))


def split_batch(
    whole: Prefill, padding: Sequence[int], *, one_by_one: bool = False
) -> list[tuple[slice, Prefill]]:
    """Split a prefilled batch into parts of the batch without padding, each with its inputs.

    `padding` are the columns of left padding of each prompt, and the inputs of `whole` have them.
    There is one part where nothing is padded, unless `one_by_one`; else there is one per prompt.
    """
    inputs, together = whole.inputs, not any(padding) and not one_by_one
    assert inputs is not None
    size = max(len(padding), 1) if together else 1
    parts = []
    for start in range(0, len(padding), size):
        batch, pad, untouched = slice(start, start + size), padding[start], whole.untouched
        part = replace(
            whole,
            keys=tuple(keys[batch, :, pad:] for keys in whole.keys),
            values=tuple(values[batch, :, pad:] for values in whole.values),
            queries=tuple(queries[batch] for queries in whole.queries),
            hidden=None if whole.hidden is None else whole.hidden.batch(batch, pad),
            untouched=untouched if together else copy_without_padding(untouched, start, pad),
        )
        ids = inputs.token_ids[batch, pad:]
        parts.append((batch, part.with_inputs(inputs.model, ids, inputs.tokenizer)))
    return parts
