"""Traces of sequences: prompts, continuations, and the queries, keys and values of both."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvp.data.encode import Encoded, encode
from kvp.data.task import Sample
from kvp.errors import UsageError
from kvp.hf.cache_layers import untouched_layers
from kvp.hf.decoding import end_tokens
from kvp.hf.model_config import context_limit, geometry_of, rope_switch
from kvp.hf.prefill import prefill, run_and_record
from kvp.scoring import ALL_QUERIES, Needs, Reconstruction
from kvp.store import SequenceRecord, Trace, planned_bytes

LABEL_PASSES = {"kvzip": Reconstruction(), "kvzip_plus": Reconstruction(weighted=True)}
"""Labels that are the attention a token receives while the model repeats its prompt."""
_IN_FLIGHT_BYTES = 4 * 2**30
"""Queries, keys and values of the sequences that are decoded together."""
_MOST_TOGETHER = 16
"""Sequences that are decoded together if they are small."""


def default_batch_size(config: PreTrainedConfig, *, dtype: str, max_tokens: int) -> int:
    """Prompts of at most `max_tokens` that are answered together."""
    largest = planned_bytes(geometry_of(config), dtype=dtype, tokens=max_tokens)
    return max(1, min(_MOST_TOGETHER, _IN_FLIGHT_BYTES // largest))


def check_reach(config: PreTrainedConfig, name: str, length: int, max_new_tokens: int) -> None:
    """Raise UsageError when prompts of `length` tokens and their continuations may not fit."""
    reach = context_limit(config)
    if reach is not None and length + max_new_tokens > reach:
        raise UsageError(
            f"--length {length} with --max_new_tokens {max_new_tokens} exceeds the context of "
            f"{name}, {reach} tokens"
        )


@dataclass(frozen=True, kw_only=True)
class RecordingSettings:
    """What is recorded of every sequence."""

    continuation: Literal["model", "reference"]
    """What follows the prompt: the model's greedy answer, or the data's."""
    max_new_tokens: int
    """Most tokens that follow the prompt; a sample's own number may be smaller."""
    labels: Sequence[str] = ()
    """Names of `LABEL_PASSES`."""


def collect_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    samples: Iterable[tuple[int, Sample]], recorded: RecordingSettings, *, batch_size: int,
) -> Iterator[Trace]:  # fmt: skip
    """Traces of samples, in their order; each sample comes with its index in the store.

    Answers of the model are generated for `batch_size` prompts together, without their end token.
    One pass of the sequence alone then records prompt and answer, so a trace depends on the batch
    by rounding only: where two tokens are equally likely up to rounding, answers may differ. Models
    whose layers or RoPE depend on a batch's padding answer one prompt at a time.

    Raises UsageError when references are requested and a sample has none.
    """
    if untouched_layers(model.config) or rope_switch(model.config) is not None:
        batch_size = 1
    source = iter(samples)
    while batch := list(islice(source, batch_size)):
        prompts = [encode(sample, tokenizer) for _, sample in batch]
        limits = [min(recorded.max_new_tokens, sample.max_new_tokens) for _, sample in batch]
        if recorded.continuation == "reference":
            replies = [prompt.reply_ids for prompt in prompts]
            for (_, sample), reply in zip(batch, replies, strict=True):
                if not reply:
                    raise UsageError(
                        f"--answers reference: {sample.id} has no reference answer "
                        "(Sample.reply); use --answers model"
                    )
        else:
            ids = [prompt.ids for prompt in prompts]
            replies = continuations(model, tokenizer, ids, max(limits))
        answered = zip(batch, prompts, replies, limits, strict=True)
        for (index, sample), prompt, reply, limit in answered:
            record = sequence_record(sample, prompt, reply[:limit], index)
            yield _trace_sequence(model, tokenizer, record, recorded)


@torch.no_grad()
def _trace_sequence(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, record: SequenceRecord,
    recorded: RecordingSettings,
) -> Trace:  # fmt: skip
    """Queries, keys, values and labels of one sequence, on the CPU."""
    ids = torch.tensor([record.token_ids], device=model.device)
    labels: dict[str, Tensor] = {}
    if recorded.labels:  # from passes over the prompt's cache in which the model repeats it
        prompt, reply = ids[:, : record.prompt_length], ids[:, record.prompt_length :]
        parts = [prefill(model, prompt, Needs(queries=ALL_QUERIES), tokenizer=tokenizer)]
        inputs, cache = parts[0].inputs, parts[0].cache
        assert inputs is not None
        for name in recorded.labels:
            labels[name] = _on_cpu(inputs.reconstruction(LABEL_PASSES[name])).float()
        if reply.shape[1]:
            parts.append(run_and_record(model, reply, cache=cache, queries=ALL_QUERIES))
    else:
        parts = [run_and_record(model, ids, queries=ALL_QUERIES)]
    last = parts[-1]  # its cache holds the keys and values of every part
    heads = last.keys[0].shape[1]
    queries = torch.cat([_on_cpu(part.queries) for part in parts], dim=2)  # [L, Q, T, D]
    queries = queries.view(len(queries), heads, -1, *queries.shape[2:])
    keys, values = _on_cpu(last.keys), _on_cpu(last.values)
    return Trace(record=record, queries=queries, keys=keys, values=values, labels=labels)


def _on_cpu(layers: Sequence[Tensor]) -> Tensor:
    """Layers of [1, ...] as [L, ...]."""
    return torch.cat([layer.cpu() for layer in layers])


@torch.inference_mode()
def continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[tuple[int, ...]]:
    """The model's greedy continuations of prompts, padded on the left, without the end token.

    The model's generation configuration, which may change logits, is put aside: evaluation
    compares plain arg-max answers, and traces should show the same ones.
    """
    ends = end_tokens(model, tokenizer)
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
    )
    tokens = [torch.tensor(prompt) for prompt in prompts]
    real = [torch.ones_like(ids) for ids in tokens]
    ids, mask = (pad_sequence(x, batch_first=True, padding_side="left") for x in (tokens, real))
    # Both: `generate` takes from the model's what another configuration leaves open.
    own, model.generation_config = model.generation_config, settings
    try:
        generated = model.generate(  # type: ignore[operator]
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
        )
    finally:
        model.generation_config = own
    answers = generated[:, ids.shape[1] :].tolist()
    return [tuple(takewhile(lambda token: token not in ends, answer)) for answer in answers]


def sequence_record(
    sample: Sample, encoded: Encoded, reply: tuple[int, ...], index: int
) -> SequenceRecord:
    """Record of an encoded prompt and the tokens that follow it."""
    start = encoded.prompt_length
    spans = encoded.reply_spans + (((start, start + len(reply)),) if reply else ())
    return SequenceRecord(
        index=index, id=sample.id, task=sample.task, split=sample.split, length=start + len(reply),
        context_length=encoded.context_length, prompt_length=start, token_ids=encoded.ids + reply,
        reply_spans=spans,
    )  # fmt: skip
