"""KVzap (arXiv 2601.07891): scores that a small network predicts from hidden states.

Networks and files: docs/methods/kvzap.md. They compute in the dtype of the model. Tested on files
that kvpress writes, not on the published weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvp.artifacts.manifest import read_json
from kvp.artifacts.tensors import read_safetensors, tensors_digest
from kvp.errors import PolicyError, UsageError
from kvp.hub import HubName, download, is_path
from kvp.names import KVZAP
from kvp.scoring import Needs, View

CONFIG = "config.json"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class KVzap:
    """Networks of all layers as a scorer."""

    source: str
    """Folder or hub name they were read from."""
    layers: Sequence[Sequence[tuple[Tensor, Tensor]]]
    """Per layer of the model, weight [out, in] and bias [out] of each of its linear maps."""
    digest: str
    """SHA-256 of all tensors."""

    @property
    def name(self) -> str:
        """`kvzap:SOURCE`."""
        return f"{KVZAP}:{self.source}"

    def __repr__(self) -> str:
        return self.name

    needs = Needs(hidden_after=0, every_state=True)

    @torch.no_grad()
    def score(self, view: View) -> Tensor:
        """Predicted log importance: [B, H, N] float32; UsageError where the model is another."""
        assert view.hidden is not None
        states = view.hidden.states
        assert states is not None
        width, heads = states.shape[-1], view.keys.shape[1]
        if view.layer >= len(self.layers):
            raise UsageError(
                f"method {self.name} has networks for {len(self.layers)} layers, the model has more"
            )
        maps = self.layers[view.layer]
        expected = maps[0][0].shape[1], maps[-1][0].shape[0]
        if (width, heads) != expected:
            raise UsageError(
                f"method {self.name} is for models of width {expected[0]} with {expected[1]} KV "
                f"heads, this one has {width} and {heads}"
            )
        for index, (weight, bias) in enumerate(maps):
            states = F.gelu(states) if index else states
            states = F.linear(states, weight.to(states), bias.to(states))
        return states.transpose(1, 2).float()


def load_kvzap(source: str | None, options: Mapping[str, str]) -> KVzap:
    """Read the networks of a folder or a repository of the hub.

    Raises UsageError without a source or with options, PolicyError where the files are wrong.
    """
    if not source or options:
        raise UsageError(
            f"method {KVZAP} is written {KVZAP}:FOLDER or {KVZAP}:org/name, without options: for "
            f"instance {KVZAP}:nvidia/KVzap-mlp-Qwen3-8B"
        )
    folder, hub_name = Path(source), HubName.parse(source)
    if hub_name is not None and not folder.exists() and not is_path(source):
        files = (CONFIG, WEIGHTS)
        folder = download(hub_name, files, error=UsageError, what=f"method {KVZAP}:{source}")
    config = read_json(folder / CONFIG, PolicyError)
    tensors = read_safetensors(folder / WEIGHTS, PolicyError)
    return KVzap(source, _layers(folder, config, tensors), tensors_digest(tensors))


def _layers(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[list[tuple[Tensor, Tensor]]]:
    if config.get("model_type") != KVZAP:
        raise PolicyError(f"{folder / CONFIG} is not of KVzap: its model_type is another")
    width, heads, count = (config.get(name) for name in ("input_dim", "output_dim", "n_modules"))
    hidden = config.get("hidden_dim")
    if not all(type(size) is int and size > 0 for size in (width, heads, count, hidden or 1)):
        raise PolicyError(f"{folder / CONFIG} is damaged: sizes are no positive whole numbers")
    maps = {"0.": (hidden, width), "2.": (heads, hidden)} if hidden else {"": (heads, width)}
    names = [[f"layers.{layer}.{part}" for part in maps] for layer in range(count or 0)]
    shapes: dict[str, tuple[Any, ...]] = {}
    for parts in names:
        for name, shape in zip(parts, maps.values(), strict=True):
            shapes |= {f"{name}weight": shape, f"{name}bias": shape[:1]}
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != shapes:
        raise PolicyError(f"{folder / WEIGHTS} does not hold the tensors that {CONFIG} describes")
    return [[(tensors[f"{n}weight"], tensors[f"{n}bias"]) for n in parts] for parts in names]
