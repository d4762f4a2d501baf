"""RAM and memory of the device, counted from what programs hold at the same time.

On a processor alone both are RAM. What is left out: the imports of the programs (about 1 GB).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvp.store import StoreKind
from policies.ranker import parameters_per_head
from train.costs.plan import GRID, Plan

COPIES = 6
"""Tensors as large as a ranker's weights: weight, gradient, two moments, average, best."""
_AT_WORK = 1e8
"""What a program loads and its allocators keep once it works, next to what is counted (measured on
models of 6 and 29 million weights)."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of a program."""

    ram_bytes: float
    device_bytes: float = 0.0
    """Of an accelerator; 0 where there is none."""

    @classmethod
    def of(cls, host: float, device: float, accelerator: bool) -> Memory:
        """What lies in RAM and on the device, both in RAM without an accelerator."""
        if accelerator:
            return cls(ram_bytes=host + _AT_WORK, device_bytes=device)
        return cls(ram_bytes=host + device + _AT_WORK)

    def larger(self, other: Memory) -> Memory:
        """The peaks of two programs that run one after the other."""
        return Memory(
            ram_bytes=max(self.ram_bytes, other.ram_bytes),
            device_bytes=max(self.device_bytes, other.device_bytes),
        )


def collecting_memory(plan: Plan, accelerator: bool, store: StoreKind) -> Memory:
    """Peak of kvp-collect: the model, what is decoded together, and a sequence on its way to disk.

    Queries of prompts that are being answered wait in RAM, on the device where a grid needs them.
    """
    tokens = plan.lengths.tokens
    kept, waiting = plan.raw_bytes(store, tokens), _waiting_bytes(plan)
    if store != "importance":
        return Memory.of(2 * kept + waiting, _forward_bytes(plan), accelerator)
    grid = 4 * plan.geometry.total_kv_heads * (GRID + 4) * tokens
    return Memory.of(2 * kept, _forward_bytes(plan) + waiting + grid, accelerator)


def training_memory(plan: Plan, accelerator: bool, store: StoreKind) -> Memory:
    """Peak of kvp-train on a store: what it remembers, and a step."""
    tokens, sequences = plan.lengths.tokens, plan.train + plan.validation
    each = plan.raw_bytes("qkv" if store == "qkv" else "kv", tokens)
    remembered = min(sequences * each, 0.75 * plan.memory_bytes)
    points = plan.train * sum(plan.points(plan.draws / plan.train))
    labels = 4 * plan.geometry.total_kv_heads * tokens * points
    host = remembered + min(labels, plan.memory_bytes / 4) + plan.raw_bytes(store, tokens)
    return Memory.of(host, _step_bytes(plan), accelerator)


def online_memory(plan: Plan, accelerator: bool) -> Memory:
    """Peak of `kvp-train --source model`: its buffer, the model and a forward pass, and a step."""
    tokens, points = plan.lengths.tokens, sum(plan.points(plan.draws / plan.traced))
    host = plan.buffer_bytes(plan.buffer, tokens, points) + plan.raw_bytes("qkv", tokens)
    device = _forward_bytes(plan) + _step_bytes(plan)
    return Memory.of(host + _waiting_bytes(plan), device, accelerator)


def _forward_bytes(plan: Plan) -> float:
    """Bytes of the model, of one layer's activations and of a sequence's queries, keys and values.

    And keys and values of what is decoded together, twice while one answer takes another's place.
    """
    size, tokens = plan.model, plan.lengths.tokens
    activations = tokens * (4 * size.hidden + 3 * size.intermediate) * plan.itemsize
    together = 2 * plan.batch * plan.raw_bytes("kv", tokens) if _decodes(plan) else 0
    return plan.weight_bytes + activations + plan.raw_bytes("qkv", tokens) + together


def _waiting_bytes(plan: Plan) -> float:
    """Bytes of the queries of prompts that are answered together."""
    tokens = plan.lengths.tokens
    each = plan.raw_bytes("qkv", tokens) - plan.raw_bytes("kv", tokens)
    return plan.batch * each if _decodes(plan) else 0


def _decodes(plan: Plan) -> bool:
    """Whether the model writes the answers."""
    return plan.lengths.answers == "model"


def _step_bytes(plan: Plan) -> float:
    """Bytes of a training step.

    Rankers with optimiser, the contexts of this step and the next one in float32, those of this
    step once more in a row, and activations.
    """
    heads, tokens = plan.geometry.total_kv_heads, plan.recipe.contexts * plan.prefix
    vectors = heads * tokens * 2 * plan.geometry.head_dim * 4
    weights = COPIES * 4 * heads * parameters_per_head(plan.spec)
    return weights + 3 * vectors + min(plan.activation_bytes, plan.config.activation_gb * 1e9)
