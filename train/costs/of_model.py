"""Seconds of all ways to a policy of a model: measured here, or assumed for a named device."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from kvp.errors import KvpError, UsageError
from kvp.geometry import Geometry
from kvp.hf.loading import torch_device
from kvp.hf.model_rates import sequence_seconds
from kvp.progress import phase
from kvp.stopwatch import how_measured, one_thread, speedup
from kvp.store import StoreKind
from kvp.store.schema import GRIDS
from policies.ranker import products_per_token
from train.costs.measured import store_seconds, training_seconds
from train.costs.plan import Plan
from train.costs.sample import write_sample
from train.costs.ways import Seconds, StoreSeconds, TrainingSeconds
from train.data.compression_points import shortest_prefix
from train.distributed import ALONE
from train.job import Job, prepare
from train.labels.label import label_of
from train.online.settings import OnlineSettings

GRID_LABEL = "max_reply_attention"
"""Label that kvp-collect's grids hold by default."""
_STEP_FLOPS = {"cpu": 2e10, "cuda": 1e13}
"""Operations of a measured step, about."""
_SEQUENCE_BYTES = {"cpu": 2**24, "cuda": 2**27}
"""Bytes of a measured sequence with queries, about; at least one head."""
_MOST_TOKENS = 8192
"""Tokens of a measured sequence; longer ones are counted as proportionally longer."""
PartT = TypeVar("PartT", StoreSeconds, TrainingSeconds)


def seconds_of_model(plan: Plan, model_config: PreTrainedConfig) -> Seconds:
    """Measure layers of the model, and a training of some heads on random tokens, in some seconds.

    Raises UsageError where the device is not there, or where the model or the training cannot be
    tried.
    """
    device = torch_device(plan.config.device)
    phase(f"measuring the speed of {device}")
    with one_thread() as threads, tempfile.TemporaryDirectory() as folder:
        sequence = sequence_seconds(
            model_config,
            plan.model,
            plan.lengths,
            dtype=plan.dtype,
            batch=plan.batch,
            device=device,
        )
        try:
            stores, training = _measured(plan, device, Path(folder))
        except KvpError as error:
            raise UsageError(
                f"--rates measured: a training on random tokens ended with: {error}"
            ) from error
    faster = 1.0 if device.type != "cpu" else speedup(threads)
    prompt = plan.model.flops(plan.lengths.prompt) / plan.model.flops(plan.lengths.tokens)
    sequence *= 1 + 3 * prompt * len(plan.stored_labels)  # passes over the prompt
    return Seconds(
        source=f"measured: {how_measured(device, threads)}; some layers of made-up weights, some "
        "rankers on random tokens",
        accelerator=device.type != "cpu",
        sequence=sequence / faster,
        stores={store: _scaled(of, 1 / faster) for store, of in stores.items()},
        training=_scaled(training, 1 / faster),
    )


def _measured(
    plan: Plan, device: torch.device, folder: Path
) -> tuple[dict[StoreKind, StoreSeconds], TrainingSeconds]:
    """Seconds of one thread of each store, and of training on that with queries."""
    answer = min(plan.lengths.answer, _MOST_TOKENS // 2)
    prompt = min(plan.lengths.tokens, _MOST_TOKENS) - answer
    tokens = max(prompt, shortest_prefix(plan.recipe) + 1) + answer
    geometry = _sample(plan, tokens, device)
    longer = plan.lengths.tokens / tokens
    more = longer * plan.geometry.total_kv_heads / geometry.total_kv_heads
    stores: dict[StoreKind, StoreSeconds] = {}
    for store in plan.stores:
        label = plan.recipe.label
        in_grid = label_of(label).in_grid
        if store == "importance" and in_grid is None and not plan.stored_labels:
            label = GRID_LABEL
        grid, write = write_sample(
            folder / store,
            geometry=geometry,
            dtype=plan.dtype,
            prompt=tokens - answer,
            answer=answer,
            store=store,
            grid_label=in_grid if in_grid in GRIDS else GRID_LABEL,
            labels=plan.stored_labels,
            device=device,
        )
        job = _job(plan, folder, store, label)
        of = replace(store_seconds(job), grid=grid * longer, write=write)
        stores[store] = _scaled(of, more)
        if store == "qkv":
            training = _scaled(training_seconds(job), more)
    return stores, training


def _sample(plan: Plan, tokens: int, device: torch.device) -> Geometry:
    """As many heads as are measured: whole layers, or some heads of one."""
    size = plan.geometry
    step = 6 * products_per_token(plan.spec) * plan.recipe.contexts * min(plan.prefix, tokens)
    each = plan.raw_bytes("qkv", tokens) / size.total_kv_heads
    heads = int(min(_STEP_FLOPS[device.type] / step, _SEQUENCE_BYTES[device.type] / each))
    layers = max(1, min(size.layers, heads // size.kv_heads))
    kv_heads = max(1, min(size.kv_heads, heads))
    return Geometry(
        layers=layers,
        query_heads=kv_heads * size.group,
        kv_heads=kv_heads,
        head_dim=size.head_dim,
    )


def _job(plan: Plan, folder: Path, store: str, label: str) -> Job:
    """A training of the configuration's recipe on the sample."""
    online: dict[str, Any] = {one.name: one.default for one in fields(OnlineSettings)}
    config = replace(
        plan.config,
        **online,
        source="traces",
        traces=str(folder / store),
        out=str(folder / "policy"),
        label=label,
        sequences=0,
        init_from=None,
        heads=None,
        devices=1,
    )
    return prepare(config, ALONE, None)


def _scaled(part: PartT, factor: float) -> PartT:
    return type(part)(**{name: value * factor for name, value in vars(part).items()})


DEVICES = {
    "a100": (312e12, 19.5e12, 2.04e12, 80e9),
    "h100": (989e12, 67e12, 3.35e12, 80e9),
    "h200": (989e12, 67e12, 4.8e12, 141e9),
}
"""NVIDIA's data sheets, SXM forms: operations of 16-bit products per second without sparsity,
those of float32 without tensor cores (as kvp-train computes), bytes of memory per second, bytes of
memory."""
_FLOPS, _BANDWIDTH = 0.4, 0.6
"""Shares of the peaks of products and of memory that are assumed to be reached."""
_LAUNCH, _TOKEN = 8e-4, 2e-3
"""Assumed seconds in which Python starts the kernels of a layer, and of a token beside them."""
_CODEC = 4e8
"""Assumed bytes per second that one thread packs or unpacks."""
_COPY = 8e9
"""Assumed bytes per second between device and ordinary RAM."""


def assumed_seconds(plan: Plan, name: str) -> Seconds:
    """Seconds on a device in `DEVICES`, from counted operations and bytes; not measured."""
    size, tokens = plan.model, plan.lengths.tokens
    half, single, bandwidth, memory = DEVICES[name]
    flops = half if plan.itemsize < 4 else single
    products, moved = _FLOPS * flops, _BANDWIDTH * bandwidth
    layer: float = size.layer_parameters * plan.itemsize
    layer += plan.batch * plan.raw_bytes("kv", tokens) / size.layers
    token = size.layers * max(layer / moved, _LAUNCH) + _TOKEN
    token += size.head_parameters * plan.itemsize / moved
    prompt, answer = plan.lengths.prompt, plan.lengths.answer
    once = size.flops(prompt) + size.flops(answer, prompt, answer)
    sequence = once + 3 * len(plan.stored_labels) * size.flops(prompt)
    heads = size.geometry.layers * size.geometry.query_heads
    pair = heads * 4 * size.geometry.head_dim / products  # logits are computed twice
    window = plan.recipe.future_max or tokens
    network: float = plan.geometry.total_kv_heads * plan.prefix * 2 * products_per_token(plan.spec)
    network /= _FLOPS * single
    contexts = plan.recipe.contexts
    passes = 4 if plan.activation_bytes > plan.config.activation_gb * 1e9 else 3  # once more
    step = contexts * (passes * network + plan.raw_bytes("kv", plan.prefix) / _COPY)
    decoded = answer * token / plan.batch if plan.lengths.answers == "model" else 0.0
    shared = StoreSeconds(
        read=plan.raw_bytes("kv", tokens) / _CODEC,
        exact=pair * min(answer, window) * (prompt + answer / 2),
        anywhere=pair * min(window, tokens / 2) * tokens * 2 / 3,
    )
    importance = plan.raw_bytes("importance", tokens) / _CODEC
    looked_up = importance - shared.read
    return Seconds(
        source=f"assumed, not measured: {name}, {_FLOPS:.0%} of the peak of products "
        f"({flops / 1e12:g} TFLOP/s of the model, {single / 1e12:g} of rankers) and "
        f"{_BANDWIDTH:.0%} of {bandwidth / 1e12:g} TB/s, {_LAUNCH * 1e3:g} ms per layer and "
        f"decoded token, stores at {_CODEC / 1e9:g} GB/s",
        accelerator=True,
        device_bytes=memory,
        sequence=sequence / products + decoded,
        stores={
            "qkv": replace(
                shared,
                read=plan.raw_bytes("qkv", tokens) / _CODEC,
                write=plan.raw_bytes("qkv", tokens) / _CODEC,
            ),
            "importance": replace(
                shared,
                grid=pair * 1.75 * tokens**2 / 2,  # all maxima, and sums from the middle on
                write=importance,
                exact=looked_up,
                anywhere=looked_up,
            ),
        },
        training=TrainingSeconds(step=step, evaluated=network, compared=network),
    )
