"""One sequence: continue a prompt, then run all of it once and record queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence
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
from kvp.hf import Observation, observe
from kvp.hf.generation import end_tokens
from kvp.hf.limits import context_limit
from kvp.hf.scorer_inputs import ScorerInputs
from kvp.scoring import Reconstruction
from kvp.store import SequenceRecord, Trace
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


def collect(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    *,
    index: int,
    continuation: Literal["model", "reference"],
    max_new_tokens: int,
    queries: bool = True,
    grid: int = 0,
    grid_labels: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Trace:
    """The trace of a sample: prompt and continuation in one forward pass without a cache before it.

    The continuation is the model's greedy answer or the reference, up to `max_new_tokens` or the
    sample's own number, without its end token (which a model never reads while it answers). Tensors
    are on the CPU in the model's dtype; `index` is the sequence's index in the store. A grid of
    `grid` compression points, with `grid_labels` at all of them, is computed where the model is
    (`kvp.store.importance_grid`); `labels` are names of `LABEL_PASSES`.

    Raises UsageError when the reference is requested and the sample has none.
    """
    encoded = encode(sample, tokenizer)
    limit = min(max_new_tokens, sample.max_new_tokens)
    if continuation == "reference":
        if not encoded.reply_ids:
            raise UsageError(
                f"--answers reference: {sample.id} has no reference; use --answers model"
            )
        reply = encoded.reply_ids[:limit]
    else:
        reply = greedy(model, tokenizer, encoded.ids, limit)
    ids = encoded.ids + reply
    seen = observe(model, torch.tensor([ids], device=model.device), last_logits=True)
    keys = _stacked(seen.keys)
    record = _record(sample, encoded, reply, index, grid)
    return Trace(
        record=record,
        grids=_grids(seen, record, grid_labels) if grid else {},
        queries=_stacked(seen.queries, groups_of=keys.shape[1]) if queries else None,
        keys=keys,
        values=_stacked(seen.values),
        labels=prompt_labels(model, tokenizer, encoded.ids, labels),
    )


@torch.no_grad()
def prompt_labels(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: tuple[int, ...],
    names: Sequence[str],
) -> dict[str, Tensor]:
    """Labels of a prompt of P tokens: name -> [L, H, P] float32 on the CPU.

    From passes over the cache of the whole prompt, in which the model repeats it (`LABEL_PASSES`).
    Raises ModelError for a model these passes do not know.
    """
    if not names:
        return {}
    ids = torch.tensor([prompt], device=model.device)
    seen = observe(model, ids, queries=0, last_logits=True)
    scorer_inputs = ScorerInputs(
        model, ids, seen.keys, seen.values, others=seen.others, tokenizer=tokenizer
    )
    return {
        name: _stacked(scorer_inputs.reconstruction(LABEL_PASSES[name])).float() for name in names
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


def _stacked(layers: tuple[Tensor, ...], groups_of: int | None = None) -> Tensor:
    """Layers of [1, H, T, D] as [L, H, T, D]; queries [1, Q, T, D] as [L, H, G, T, D]."""
    if groups_of is not None:
        layers = tuple(layer.reshape(1, groups_of, -1, *layer.shape[2:]) for layer in layers)
    return torch.stack([layer[0].cpu() for layer in layers])


def _grids(seen: Observation, record: SequenceRecord, labels: Sequence[str]) -> dict[str, Tensor]:
    """Label -> grid of all layers, [L, H, intervals, T], each layer computed where the model is."""
    layers = []
    for queries, keys in zip(seen.queries, seen.keys, strict=True):
        grouped = queries.reshape(*keys.shape[:2], -1, *keys.shape[2:])  # [1, H, G, T, D]
        grids = label_grids(grouped, keys, record, labels)
        layers.append({label: grid.cpu() for label, grid in grids.items()})
    return {label: _stacked(tuple(layer[label] for layer in layers)) for label in layers[0]}


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
