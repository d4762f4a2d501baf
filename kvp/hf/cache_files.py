"""Cache files: a compressed context written once and continued by any process.

One safetensors file holds the tensors of every layer; the text in its header says what they are,
which model they belong to, and their digest (`docs/formats.md`, "Cache files"). No pickle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, create_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.artifacts.files import foreign
from kvp.artifacts.manifest import Format, digest_json
from kvp.artifacts.tensors import sealed_safetensors, tensors_digest, write_sealed_safetensors
from kvp.contexts import same_buffers
from kvp.errors import CacheError, UsageError
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache import EvictingCache, Turn
from kvp.hf.cache_layers import EMPTY, EvictingLayer, LayerState, RaggedLayer
from kvp.hf.model_access import active_digest, layer_devices, made_by
from kvp.hf.model_config import geometry_of
from kvp.hf.prefill import unwrap_model
from kvp.version import __version__

FORMAT = Format("kvp-cache", 3)
_KINDS: Mapping[str, type[EvictingLayer]] = {"dense": EvictingLayer, "ragged": RaggedLayer}
_Count = Annotated[int, Field(ge=0, le=2**40)]
_LAYER: Any = create_model(
    "Layer", layer=_Count, kind=Literal["dense", "ragged"], seen=_Count, evicted=bool, gaps=bool
)
_HEADER: Any = create_model(
    "Header", model=dict[str, Any], turn=(Turn | None, ...), tensors=str,
    window=(Annotated[int, Field(ge=-1, le=2**40)] | None, ...), layers=(list[_LAYER], ...),
)  # fmt: skip


def save_cache(cache: EvictingCache, path: str | Path, model: nn.Module) -> None:
    """Write `cache`, made by `model`, to one file that `load_cache` reads.

    The file is new or whole after any crash; an existing one is replaced. `model` may be wrapped.
    Raises UsageError for a cache that is empty, of another class or of a model with layers that
    nothing is evicted from, CacheError where the file cannot be written.
    """
    path, inner = Path(path), unwrap_model(model)
    if not isinstance(cache, EvictingCache):
        raise UsageError(f"save_cache writes an EvictingCache, got a {type(cache).__name__}")
    if cache.get_seq_length() == 0:
        raise UsageError("this cache is empty: prefill a prompt before save_cache")
    if cache.others:
        raise UsageError("this model has layers of other kinds, whose caches have no file")
    names, tensors = {kind: name for name, kind in _KINDS.items()}, _tensors_of(cache)
    layers = [
        {"layer": index, "kind": names[type(layer)], "seen": layer.seen, "evicted": layer.evicted,
         "gaps": layer.state.gaps} for index, layer in cache.stored.items()
    ]  # fmt: skip
    header = {
        **FORMAT.head,
        "kvp": __version__,
        "model": _identity(inner),
        "turn": None if cache.turn is None else asdict(cache.turn),
        "window": None if cache.recorder is None else cache.recorder.window,
        "layers": layers,
        "tensors": tensors_digest(tensors),
    }
    with foreign(path, CacheError, "cannot hold this cache, and is not written", "written"):
        if path.is_dir():
            raise CacheError(f"{path} is a folder: give save_cache the path of a file")
        _check(cache, inner)
        write_sealed_safetensors(path, tensors, header)


def load_cache(path: str | Path, model: nn.Module) -> EvictingCache:
    """The cache of a file, on the devices where `model` attends, to be continued by it.

    Tensors have the dtype they were saved with. Raises CacheError, in one line that names the file,
    where it is missing, damaged, no cache file, or made by another model or in another dtype.
    """
    path, inner = Path(path), unwrap_model(model)
    ours, devices = _identity(inner), layer_devices(inner)
    with sealed_safetensors(path, CacheError, FORMAT, "save_cache") as (content, _, read_tensors):
        header = _HEADER.model_validate(content)
        _refuse_another_model(path, header.model, ours)
        if tensors_digest(tensors := read_tensors()) != header.tensors:
            raise CacheError(f"{path} is damaged: its checksum does not match its tensors")
        _check(cache := _cache_of(header, tensors), inner)
        if _tensors_of(cache).keys() != tensors.keys():
            raise ValueError("it has other tensors than a cache")
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(devices[int(name.partition(".")[0])], copy=True)
        return _cache_of(header, tensors)


def _tensors_of(cache: EvictingCache) -> dict[str, Tensor]:
    """All tensors of a cache, by their names in the file."""
    named = {index: dict(layer.state.tensors) for index, layer in cache.stored.items()}
    for index, queries in ({} if cache.recorder is None else cache.recorder.held).items():
        named[index]["queries"] = queries
    if cache.ids is not None:
        named[min(named)]["ids"] = cache.ids
    return {f"{index}.{name}": part for index, own in named.items() for name, part in own.items()}


def _cache_of(header: Any, tensors: Mapping[str, Tensor]) -> EvictingCache:  # noqa: ANN401
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, what = name.partition(".")
        states[int(layer)][what] = tensor
    if sorted(states) != [of.layer for of in header.layers]:
        raise ValueError("its tensors are of other layers")
    queries = {at: held.pop("queries") for at, held in states.items() if "queries" in held}
    ids = states[header.layers[0].layer].pop("ids", None)
    cache = EvictingCache([
        _KINDS[of.kind].of_state(LayerState(
            tensors=states[of.layer], seen=of.seen, evicted=of.evicted, gaps=of.gaps
        ))
        for of in header.layers
    ])  # fmt: skip
    cache.turn, cache.ids = header.turn, ids
    if header.window is not None:
        cache.recorder = QueryRecorder(header.window, queries)
    return cache


def _check(cache: EvictingCache, model: PreTrainedModel) -> None:
    """Raise ValueError unless this is a cache of such a model, of finite numbers."""
    layers, turn, batch = cache.stored, cache.turn, cache.batch
    size, wide = geometry_of(model.config), torch.promote_types(model.dtype, torch.float32)
    queries = {} if cache.recorder is None else cache.recorder.held
    (seen,) = {layer.seen for layer in layers.values()}
    newest = torch.tensor(cache.lengths)[:, None, None] - 1
    fits = [*layers] == [*size.model_layers] and len(newest) == batch
    fits &= turn is None or (len(turn.prompts) == batch and turn.shrunk_at <= seen)
    if not fits or (turn and min(*turn.prompts, turn.shrunk_at) < 0):
        raise ValueError("its layers or its turn are not those of one cache of the model")
    for index, layer in layers.items():
        for name, tensor in layer.state.tensors.items():
            fits = _fits(name, tensor, layer, wide)
            if not fits or (name == "newest" and tensor.shape != (batch,)):
                raise ValueError(f"{index}.{name} holds NaN, infinity or what it cannot hold")
        (keys, values), stored = layer.slots, layer.positions.shape[-1]
        shape = torch.Size((batch, size.kv_heads, stored, size.head_dim))
        fits = keys.shape == values.shape == shape and layer.positions.shape == shape[:3]
        fits &= bool(((layer.positions.cpu() <= newest) | (layer.positions.cpu() == EMPTY)).all())
        if not fits or stored > seen or not (layer.evicted or stored == seen):
            raise ValueError(f"layer {index} holds {[*keys.shape]} for {seen} tokens")
    ids = torch.zeros(batch, 0, dtype=torch.int64) if cache.ids is None else cache.ids
    if ids.dtype != torch.int64 or ids.ndim != 2 or len(ids) != batch or ids.shape[1] > seen:
        raise ValueError(f"ids are {[*ids.shape]} {ids.dtype}")
    for index, recent in queries.items():
        width = queries[min(queries)].shape[2]
        fits = recent.shape == (batch, size.query_heads, width, size.head_dim) and width <= seen
        if not (fits and [*queries] == [*layers] and _fits("queries", recent, layers[index], wide)):
            raise ValueError(f"queries are {[*recent.shape]} {recent.dtype}, or infinite")


def _fits(name: str, tensor: Tensor, layer: EvictingLayer, wide: torch.dtype) -> bool:
    """Whether a tensor of a layer holds finite numbers of its kind, floats no wider than `wide`."""
    if name.endswith(("keys", "values", "queries")):
        known = tensor.is_floating_point() and torch.promote_types(tensor.dtype, wide) == wide
        padding = tensor.isnan() & (name == "queries")
        return known and bool((tensor.isfinite() | padding).all())
    ragged = isinstance(layer, RaggedLayer)
    known = tensor.dtype == (torch.int32 if ragged and name == "positions" else torch.int64)
    whole = known and bool((tensor >= -(name == "newest")).all())
    if name.endswith("positions") and not layer.state.gaps:
        return whole and bool((tensor.long() < EMPTY).all())
    return whole and (name != "lengths" or sum(tensor.flatten().tolist()) == len(layer.keys))


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """What keys and values depend on; no digest of weights that are offloaded."""
    text = model.config.get_text_config(decoder=True)
    return {
        **made_by(model),
        "active": active_digest(model),
        "geometry": geometry_of(model.config).to_dict(),
        "rope": digest_json(getattr(text, "rope_parameters", None)),
    }


def _refuse_another_model(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise CacheError unless the model that made the cache continues it.

    Weights decide; names, where one side's weights are offloaded.
    """
    made = f"{path} was made by {theirs['id']!s:.200}"
    named = {
        "geometry": "geometry", "dtype": f"dtype ({theirs['dtype']!s:.9})",
        "rope": "RoPE (rope_parameters)", "active": "choice or scale of adapters",
    }  # fmt: skip
    for name, what in named.items():
        if theirs.get(name) != ours[name]:
            raise CacheError(f"{made} with another {what} than this model has")
    if not same_buffers(theirs, ours):
        raise CacheError(f"{made} with another RoPE (frequencies) or buffers than this model has")
    known = None not in (theirs["weights"], ours["weights"])
    if theirs["weights" if known else "id"] != ours["weights" if known else "id"]:
        same = " with other weights" if theirs["id"] == ours["id"] else ""
        raise CacheError(f"{made}, this model is {ours['id']}{same}")
