"""Cache files: a compressed context written once and continued by any process.

One safetensors file holds the tensors of every layer; the text in its header says what they are,
which model they belong to, and their digest (`docs/formats.md`, "Cache files"). No pickle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvp.artifacts.files import foreign
from kvp.artifacts.manifest import Format, digest_json
from kvp.artifacts.tensors import (
    read_safetensors,
    read_sealed_header,
    tensors_digest,
    write_sealed_safetensors,
)
from kvp.errors import CacheError, UsageError
from kvp.hf.attention import QueryRecorder
from kvp.hf.cache import EvictingCache, Turn
from kvp.hf.cache_layers import EvictingLayer, LayerState, RaggedLayer
from kvp.hf.model_access import active_digest, layer_devices, name_of, on_meta, weights_digest
from kvp.hf.model_config import geometry_of
from kvp.hf.prefill import unwrap_model
from kvp.version import __version__

FORMAT = Format("kvp-cache", 3)
_KINDS: Mapping[str, type[EvictingLayer]] = {"dense": EvictingLayer, "ragged": RaggedLayer}


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
    if path.is_dir():
        raise CacheError(f"{path} is a folder: give save_cache the path of a file")
    names = {kind: name for name, kind in _KINDS.items()}
    layers, tensors = [], {}
    for index, layer in cache.stored.items():
        state = layer.state
        tensors.update({f"{index}.{name}": tensor for name, tensor in state.tensors.items()})
        facts = {"seen": state.seen, "evicted": state.evicted, "gaps": state.gaps}
        layers.append({"layer": index, "kind": names[type(layer)], **facts})
    if cache.recorder is not None:
        held = cache.recorder.held
        tensors.update({f"{index}.queries": queries for index, queries in held.items()})
    if cache.ids is not None:
        tensors[f"{layers[0]['layer']}.ids"] = cache.ids
    header = {
        **FORMAT.head,
        "kvp": __version__,
        "model": _identity(inner),
        "turn": None if cache.turn is None else asdict(cache.turn),
        "window": None if cache.recorder is None else cache.recorder.window,
        "layers": layers,
        "tensors": tensors_digest(tensors),
    }
    try:
        write_sealed_safetensors(path, tensors, header)
    except OSError as problem:
        raise CacheError(f"{path} cannot be written: {problem.strerror}") from None


def load_cache(path: str | Path, model: nn.Module) -> EvictingCache:
    """The cache of a file, on the devices where `model` attends, to be continued by it.

    Tensors have the dtype they were saved with. Raises CacheError, in one line that names the file,
    where it is missing, damaged, no cache file, or made by another model or in another dtype.
    """
    path, inner = Path(path), unwrap_model(model)
    header = read_sealed_header(path, CacheError, FORMAT, "save_cache")
    with foreign(path, CacheError):
        return _load(path, header, inner)


def _load(path: Path, header: Mapping[str, Any], inner: PreTrainedModel) -> EvictingCache:
    _refuse_another_model(path, header["model"], _identity(inner))
    tensors = read_safetensors(path, CacheError)
    if tensors_digest(tensors) != header["tensors"]:
        raise CacheError(f"{path} is damaged: its checksum does not match its tensors")
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, what = name.partition(".")
        states[int(layer)][what] = tensor
    devices = layer_devices(inner)
    layers: list[EvictingLayer] = []
    queries: dict[int, Tensor] = {}
    ids = None
    for facts in header["layers"]:
        index, kind = facts.pop("layer"), facts.pop("kind")
        held = {
            name: tensor.to(devices[index], copy=True) for name, tensor in states[index].items()
        }
        if "queries" in held:
            queries[index] = held.pop("queries")
        ids = held.pop("ids", ids)
        layers.append(_KINDS[kind].of_state(LayerState(tensors=held, **facts)))
    cache = EvictingCache(layers)
    cache.ids = ids
    if header["window"] is not None:
        cache.recorder = QueryRecorder(header["window"], queries)
    if (turn := header["turn"]) is not None:
        cache.turn = Turn(prompts=tuple(turn["prompts"]), shrunk_at=turn["shrunk_at"])
    return cache


def _identity(model: PreTrainedModel) -> dict[str, Any]:
    """What keys and values depend on; no digest of weights that are offloaded."""
    text = model.config.get_text_config(decoder=True)
    return {
        "id": name_of(model) or type(model).__name__,
        "weights": None if on_meta(model) else weights_digest(model),
        "active": active_digest(model),
        "geometry": geometry_of(model.config).to_dict(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rope": digest_json(getattr(text, "rope_parameters", None)),
    }


def _refuse_another_model(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise CacheError unless the model that made the cache continues it.

    Weights decide; names, where one side's weights are offloaded.
    """
    made = f"{path} was made by {theirs['id']}"
    named = {
        "geometry": "geometry", "dtype": f"dtype ({theirs['dtype']})",
        "rope": "RoPE (rope_parameters)", "active": "choice or scale of adapters",
    }  # fmt: skip
    for name, what in named.items():
        if theirs.get(name) != ours[name]:
            raise CacheError(f"{made} with another {what} than this model has")
    known = theirs["weights"] and ours["weights"]
    if theirs["weights" if known else "id"] != ours["weights" if known else "id"]:
        same = " with other weights" if theirs["id"] == ours["id"] else ""
        raise CacheError(f"{made}, this model is {ours['id']}{same}")
