"""Which layers of a model tokens are evicted from, and the caches of all others.

Evicted are layers that see every earlier token. Layers with a sliding window, with chunks, with a
recurrent or convolution state, and those without a cache keep the cache that transformers gives
them, and kvp never touches it. Why so: `docs/decisions.md#hybrid-models`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from kvp.errors import ModelError

FULL = "full_attention"
SLIDING = "sliding_attention"
LEFT_ALONE = frozenset({SLIDING, "chunked_attention", "linear_attention", "conv", "dummy"})
"""Kinds of layers whose caches kvp can copy and leave alone, as transformers names them."""

OtherLayer = Any
"""A cache layer of transformers' own (its classes share no base class)."""
LayerT = TypeVar("LayerT")


def layer_kinds(config: PreTrainedConfig) -> tuple[str, ...]:
    """The kind of every layer of a model, `dummy` for those that own no cache.

    Raises ModelError where transformers cannot tell.
    """
    text = config.get_text_config(decoder=True)
    try:
        kinds, _ = get_layer_types_and_kwargs(text)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"model type {config.model_type!r} does not tell the kinds of its layers ({error})"
        ) from error
    return tuple(kinds)


def evicted_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the layers that see every token; empty where a model has none.

    Where every layer has the same sliding window, all layers count: they see every token of a
    prompt that is shorter than the window (`kvp.hf.limits.attention_window`).
    """
    kinds = layer_kinds(config)
    if set(kinds) == {SLIDING}:
        return tuple(range(len(kinds)))
    return tuple(index for index, kind in enumerate(kinds) if kind == FULL)


def other_layers(config: PreTrainedConfig) -> dict[int, OtherLayer]:
    """Empty caches of all other layers, as transformers makes them: index in the model -> cache."""
    evicted = set(evicted_layers(config))
    layers = DynamicCache(config=config).layers
    return {index: layer for index, layer in enumerate(layers) if index not in evicted}


def copies(
    others: Mapping[int, OtherLayer], entries: Tensor | None = None
) -> dict[int, OtherLayer]:
    """Caches that can go on without changing `others`.

    `entries` [R] int64 are the batch entries they hold, None for all as they are.
    """
    twins = {index: _copy(layer) for index, layer in others.items()}
    if entries is not None:
        for twin in twins.values():
            twin.reorder_cache(entries)
    return twins


def without_padding(others: Mapping[int, OtherLayer], entry: int, padding: int) -> dict[int, Any]:
    """Copies for one batch entry, without its `padding` columns on the left."""
    alone = copies(others, torch.tensor([entry]))
    for layer in alone.values():
        if isinstance(layer, DynamicSlidingWindowLayer) and padding:
            assert layer.keys is not None
            assert layer.values is not None
            layer.cumulative_length -= padding
            held = min(layer.cumulative_length, layer.sliding_window - 1)
            first = layer.keys.shape[2] - held
            layer.keys, layer.values = layer.keys[:, :, first:], layer.values[:, :, first:]
    return alone


def arranged(own: Sequence[LayerT], others: Mapping[int, OtherLayer]) -> list[LayerT]:
    """All layers of a model in order: `others` at their indices, `own` in the places between."""
    places: Iterator[LayerT] = iter(own)
    count = len(own) + len(others)
    return [others[index] if index in others else next(places) for index in range(count)]


def other_nbytes(others: Mapping[int, OtherLayer]) -> int:
    """Bytes of all tensors that these caches hold."""
    return sum(tensor.nbytes for layer in others.values() for tensor in _tensors(layer))


@dataclass(frozen=True, kw_only=True)
class OtherState:
    """Everything a cache of another layer holds, in parts that can be written to a file."""

    kind: str
    """Name of its class in transformers."""
    tensors: Mapping[str, Tensor]
    """By attribute, or `ATTRIBUTE.KEY` for an entry of one that is a dictionary."""
    numbers: Mapping[str, Any]
    """All else, named likewise: numbers, truth values and None."""

    @classmethod
    def of(cls, layer: OtherLayer) -> OtherState:
        """Read a cache; devices and dtypes are those of its tensors."""
        tensors, numbers = {}, {}
        for name, value in vars(layer).items():
            inner = value.items() if isinstance(value, dict) else ((None, value),)
            for key, item in inner:
                place = name if key is None else f"{name}.{key}"
                if isinstance(item, Tensor):
                    tensors[place] = item
                elif not isinstance(item, torch.device | torch.dtype):
                    numbers[place] = item
        return cls(kind=type(layer).__name__, tensors=tensors, numbers=numbers)

    def restore(self, layer: OtherLayer, device: torch.device) -> None:
        """Fill `layer`, empty and of the same model, with this content on `device`.

        Raises ModelError where it is of another class, or has other attributes: one of another
        version of transformers.
        """
        places = {place.partition(".")[0] for place in (*self.tensors, *self.numbers)}
        if type(layer).__name__ != self.kind or not places <= vars(layer).keys():
            raise ModelError(
                f"a layer's cache is a {self.kind} of another transformers, here it is a "
                f"{type(layer).__name__}"
            )
        on_device = {name: tensor.to(device, copy=True) for name, tensor in self.tensors.items()}
        for place, value in {**self.numbers, **on_device}.items():
            name, dot, key = place.partition(".")
            if dot:
                getattr(layer, name)[int(key)] = value
            else:
                setattr(layer, name, value)
        states = [tensor for tensor in on_device.values() if tensor.ndim > 1]
        if states:
            layer.device, layer.dtype = states[0].device, states[0].dtype


def _copy(layer: OtherLayer) -> OtherLayer:
    # Not deepcopy: a window is a view, whose whole storage that would copy.
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, Tensor):
            setattr(twin, name, value.clone())
        elif isinstance(value, dict):
            cloned = {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
            setattr(twin, name, cloned)
    return twin


def _tensors(layer: OtherLayer) -> Iterator[Tensor]:
    for value in vars(layer).values():
        for item in value.values() if isinstance(value, dict) else (value,):
            if isinstance(item, Tensor) and item.ndim > 1:
                yield item
