"""How fast a model of some configuration runs here, from a few of its layers with made-up weights.

The time of a forward pass does not depend on the weights, and every layer costs the same; so the
difference between two depths is the time of a layer, and no weights are needed. A second or two.
What is left out: layers of several kinds (the first ones stand for all).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from kvp.costs import ModelSize, Plan
from kvp.ops.future_attention import max_future_attention
from kvp.quiet_logs import quiet_logs
from kvp.store import SequenceRecord
from kvp.store.importance_grid import edges_of, label_grids
from kvp.store.schema import GRIDS

_VOCABULARY = 16_384
"""Most rows of the output head that are measured; the others are counted by their share."""
_LARGE_LAYER = 10**8
"""Weights of a layer from which two of them, not four, are measured."""
_FLOPS = {"cpu": 4e10, "cuda": 2e13}
"""Operations of a measured prompt at most."""
_ROUNDS = 5
"""Calls of which the fastest counts, so that other work of the machine is left out; fewer where
they take more than `_SECONDS` together."""
_SECONDS = 1.0
_DECODED = 4
"""Tokens decoded in a call."""
_PAIRS = 2**22
"""Pairs of queries and keys in a measured label, about."""
_GRID_PAIRS = {"cpu": 2**25, "cuda": 2**31}
"""Pairs of queries and keys in a measured importance grid at most."""


@dataclass(frozen=True, kw_only=True)
class ModelRates:
    """Speeds as `kvp.costs.Rates` has them."""

    prompt_flops: float
    decode_layer_seconds: float
    decode_step_seconds: float
    pairs: float
    grid_pairs: float
    copy_bytes: float


def measured_model_rates(
    config: PreTrainedConfig,
    plan: Plan,
    *,
    device: torch.device,
    clock: Callable[[], float],
) -> ModelRates:
    """Measure layers of `config`, the plan's model, on its prompts and answers; see the module.

    `clock` gives seconds: wall time, or processor time.
    """
    timer = _Timer(device, clock)
    size, tokens, batch = plan.model, plan.lengths.prompt, plan.batch
    dtype: torch.dtype = getattr(torch, plan.dtype)
    deep = 2 if size.layer_parameters > _LARGE_LAYER else 4
    fits = _FLOPS[device.type] / (2 * size.layer_parameters * deep)
    prompt = max(min(tokens, int(fits)), min(tokens, 32))
    prompts, steps = [], []
    for layers in (1, deep):
        model = _made_up(config, layers, device, dtype)
        ids = torch.zeros(1, prompt, dtype=torch.int64, device=device)
        prompts.append(timer.fastest(partial(model, input_ids=ids, logits_to_keep=1)))
        steps.append(_step_seconds(model, timer, tokens, batch))
    layer_prompt = max(prompts[1] - prompts[0], 1e-9) / (deep - 1)
    layer = max(steps[1] - steps[0], 0.0) / (deep - 1)
    unmeasured = max(size.head_parameters - _VOCABULARY * size.hidden, 0)
    return ModelRates(
        prompt_flops=(2 * size.layer_parameters * prompt + size.attention_flops(prompt))
        / layer_prompt,
        decode_layer_seconds=layer,
        decode_step_seconds=max(steps[0] - layer, 0.0) + unmeasured / size.layer_parameters * layer,
        pairs=_pairs_per_second(size, timer, device, dtype, tokens),
        grid_pairs=_grid_pairs_per_second(plan, timer, device, dtype),
        copy_bytes=_copied_per_second(timer, device),
    )


class _Timer:
    """Seconds of a call: the fastest of some, after one that warms up."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock

    @torch.inference_mode()
    def fastest(self, call: Callable[[], object], rounds: int = _ROUNDS) -> float:
        """Seconds of `call`."""
        call()
        seconds: list[float] = []
        while len(seconds) < rounds and sum(seconds) < _SECONDS:
            seconds.append(self._seconds(call))
        return min(seconds)

    def _seconds(self, call: Callable[[], object]) -> float:
        self._wait()
        start = self._clock()
        call()
        self._wait()
        return self._clock() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _made_up(
    config: PreTrainedConfig, layers: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """The first layers of a model, every weight 0.01."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        kinds = list(text.layer_types)
        text.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
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


def _step_seconds(model: PreTrainedModel, timer: _Timer, tokens: int, batch: int) -> float:
    """Seconds of a decoded token of every answer, as `generate` decodes it, after `tokens`."""
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=_DECODED + 1, min_new_tokens=_DECODED + 1, pad_token_id=0
    )
    ids = torch.zeros(batch, tokens + 1, dtype=torch.int64, device=model.device)
    every = torch.ones_like(ids)
    caches = iter([_filled(model, tokens, batch) for _ in range(_ROUNDS + 1)])

    def decoded() -> Tensor:
        made: Tensor = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=every,
            past_key_values=next(caches),
            generation_config=settings,
        )
        return made

    return timer.fastest(decoded) / (_DECODED + 1)


def _filled(model: PreTrainedModel, tokens: int, batch: int) -> DynamicCache:
    """A cache of `tokens` tokens that nothing was computed for."""
    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = DynamicCache(config=model.config)
    for layer in range(text.num_hidden_layers):
        states = torch.full(
            (batch, heads, tokens, width), 0.01, device=model.device, dtype=model.dtype
        )
        cache.update(states, states.clone(), layer)
    return cache


def _pairs_per_second(
    size: ModelSize, timer: _Timer, device: torch.device, dtype: torch.dtype, tokens: int
) -> float:
    """Pairs of a query and a key per second of the label, for one KV head."""
    geometry = size.geometry
    future = max(1, min(128, tokens // 4))
    heads = max(1, _PAIRS // (geometry.group * future * tokens))
    shape = (heads, tokens, geometry.head_dim)
    keys = torch.randn(shape, device=device).to(dtype)
    queries = torch.randn(heads, geometry.group, *shape[1:], device=device).to(dtype)
    start = tokens - future
    seconds = timer.fastest(lambda: max_future_attention(queries, keys, start))
    return heads * geometry.group * future * tokens / max(seconds, 1e-9)


def _grid_pairs_per_second(
    plan: Plan, timer: _Timer, device: torch.device, dtype: torch.dtype
) -> float:
    """Pairs of a query and a key per second of all grids of a sequence, for some heads of a layer.

    Of a shorter sequence, with fewer points, where one head would take too many pairs.
    """
    size, geometry = plan.model, plan.model.geometry
    whole, most = plan.lengths.tokens, _GRID_PAIRS[device.type]
    tokens = min(whole, max(math.isqrt(most // geometry.group), 64))
    each = size.grid_pairs(tokens) / geometry.kv_heads
    heads = max(1, min(geometry.kv_heads, int(most / each)))
    shape = (heads, tokens, geometry.head_dim)
    keys = torch.randn(shape, device=device).to(dtype)
    queries = torch.randn(heads, geometry.group, *shape[1:], device=device).to(dtype)
    answer = max(1, min(plan.lengths.answer, tokens // 2))
    record = _record(tokens, tokens - answer, max(plan.grid * tokens // whole, 2))
    labels = tuple(GRIDS)[-plan.grid_labels :]
    return (
        each * heads / max(timer.fastest(lambda: label_grids(queries, keys, record, labels)), 1e-9)
    )


def _record(tokens: int, prompt: int, points: int) -> SequenceRecord:
    """A sequence with its grid's edges: a prompt and an answer."""
    edges, common_edges = edges_of(tokens, prompt, prompt, points)
    return SequenceRecord(
        index=0,
        id="0",
        task="random",
        split="train",
        length=tokens,
        context_length=prompt,
        prompt_length=prompt,
        token_ids=(0,) * tokens,
        reply_spans=((prompt, tokens),),
        edges=edges,
        common_edges=common_edges,
    )


def _copied_per_second(timer: _Timer, device: torch.device) -> float:
    """Bytes per second from the device into a new tensor in RAM."""
    block = torch.ones(2**24, device=device)
    return block.nbytes / max(timer.fastest(lambda: torch.stack([block.cpu()])), 1e-9)
