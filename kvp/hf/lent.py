"""A full cache that a forward pass reads and never writes, layer by layer.

Layers that tokens are never evicted from go on from a copy of their own cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from kvp.hf.attention import StoredKeys
from kvp.hf.layer_kinds import OtherLayer, arranged, copies


class LentCache(Cache):
    """A full cache that a pass may read; its layers are `LentLayer`s that attend."""

    def __init__(
        self, lent: Sequence[LentLayer], others: Mapping[int, OtherLayer] | None = None
    ) -> None:
        """Lend layers that see every token; `others` are copied."""
        super().__init__(layers=arranged(lent, copies(others or {})))

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor] | tuple[StoredKeys, StoredKeys]:
        """Hand the pass's keys and values to their layer, and the layer to the attention."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, LentLayer):
            return super().update(key_states, value_states, layer_idx)
        layer.update(key_states, value_states)
        stored = StoredKeys(layer, layer_idx)
        return stored, stored


class LentLayer(DynamicLayer):
    """One layer's keys and values, lent; holds those of the pass only between two calls."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Lend keys and values [B, H, N, D]."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._of_pass: tuple[Tensor, Tensor] | None = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Tensor | None,
        options: Mapping[str, Any],
        *,
        first: bool,
    ) -> Tensor:
        """Attention of the pass, as `kvp.hf.attention.AttendingLayer`."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hold the pass's keys and values [B, H, T, D] until they are attended."""
        self._of_pass = key_states, value_states
        return key_states, value_states

    def taken(self) -> tuple[Tensor, Tensor]:
        """The pass's keys and values, which are held no longer."""
        assert self._of_pass is not None
        of_pass, self._of_pass = self._of_pass, None
        return of_pass
