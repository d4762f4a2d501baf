"""How long a model of some configuration takes for a sequence here; no weights are needed.

Time does not depend on the weights, so some of its layers are made up and run as a collection runs
them (`kvp.hf.observe`, `kvp.hf.decoding_batch`); operations say what all layers take. A few
seconds. What is left out: layers of several kinds (the first ones stand for all).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from textwrap import shorten

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kvp.costs import Lengths, ModelSize
from kvp.errors import UsageError
from kvp.hf.decoding_batch import DecodingBatch, Prefix
from kvp.hf.host_copies import HostCopies
from kvp.hf.observe import observe
from kvp.hf.traced import Traced
from kvp.quiet_logs import quiet_logs
from kvp.stopwatch import seconds_of
from kvp.store import SequenceRecord, Trace

_VOCABULARY = 16_384
"""Most rows of the output head that are made up; the others are counted."""
_FLOPS = {"cpu": 5e10, "cuda": 2e13}
"""Operations of a measured prompt, about; at least one layer and some tokens."""
_FEWEST_TOKENS = 32


def sequence_seconds(
    config: PreTrainedConfig,
    size: ModelSize,
    lengths: Lengths,
    *,
    dtype: str,
    batch: int,
    device: torch.device,
) -> float:
    """Seconds of the model of `config` for one sequence with queries, keys and values.

    A prompt is read once, its answer decoded beside those of `batch` prompts in all and read once
    more; a reference is read with its prompt. Raises UsageError for a model that does not run in
    parts.
    """
    reads = lengths.prompt if lengths.answers == "model" else lengths.tokens
    one = replace(size, layers=1)
    tokens = reads
    while tokens > _FEWEST_TOKENS and one.flops(tokens) > _FLOPS[device.type]:
        tokens //= 2
    layers = max(1, min(size.layers, int(_FLOPS[device.type] / one.flops(tokens))))
    head = min(size.head_parameters, _VOCABULARY * size.hidden)
    part = replace(size, layers=layers, head_parameters=head)
    try:
        model = _made_up(config, layers, device, getattr(torch, dtype))
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        seen = observe(model, ids, last_logits=True)
        read = seconds_of(lambda: _traced(model, ids), device, rounds=3)
        read *= size.flops(reads) / part.flops(tokens)
        if lengths.answers == "reference":
            return read
        together = DecodingBatch(model)
        together.arrange((), [Prefix.of(seen)] * batch)
        token = seconds_of(lambda: together.step([0] * batch), device, rounds=5)
    except (ValueError, IndexError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"--rates measured: layers of model type {config.model_type!r} do not run by "
            f"themselves here ({shorten(str(error), 80)}); use the data sheet of a device, "
            "--rates h100"
        ) from error
    token *= size.flops(1, logits=1) / part.flops(1, logits=1)
    again = size.flops(lengths.answer, lengths.prompt, lengths.answer) / size.flops(reads)
    return read * (1 + again) + lengths.answer * token / batch


def _traced(model: PreTrainedModel, ids: Tensor) -> Trace:
    """A sequence as a collection records it."""
    seen, host, tokens = observe(model, ids, last_logits=True), HostCopies(ids.device), ids.shape[1]
    record = SequenceRecord(
        index=0,
        id="0",
        task="random",
        split="train",
        length=tokens,
        context_length=tokens,
        prompt_length=tokens,
        token_ids=(0,) * tokens,
    )
    copies = [host.start(tensors) for tensors in (seen.keys, seen.values, seen.queries)]
    return Traced(record=record, keys=copies[0], values=copies[1], queries=copies[2:]).trace()


def _made_up(
    config: PreTrainedConfig, layers: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """The first layers of a model, every weight 0.01."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:layers]
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    with torch.device("meta"), no_init_weights(), quiet_logs():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.to_empty(device=device)
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.requires_grad_(False).fill_(0.01)
    model.train(False)
    return model
