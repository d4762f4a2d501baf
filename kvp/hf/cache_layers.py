"""Layers of the evicting cache: for equal numbers of tokens per head, and for uneven numbers.

An entry is one prompt of the batch, a slot the place of one token in a head. Every slot remembers
the position of its token; an empty one carries `EMPTY`, which no query ever sees. The caches of
layers without eviction are transformers' own (`UntouchedLayer`). No crop, offloading, gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from kvp.errors import ModelError, UsageError
from kvp.hf import visibility
from kvp.hf.attention import grouped_attention, plain_attention
from kvp.hf.model_config import evicted_layers
from kvp.ops.ragged_attention import RaggedLayout, StoredTokens, ragged_attention

GROWTH = 8
"""A full dense layer grows by 1/GROWTH of its slots: decoding does not copy it at every token."""
_PARTS = ("keys", "values", "positions")
TAIL_GROWTH = 32
"""The full tail of a ragged layer grows by this many slots, for the same reason."""


class EvictingLayer(DynamicLayer):
    """A layer whose heads store equally many tokens: keys, values [B, H, S, D].

    Tokens are written to a storage [B, H, capacity, D] whose first slots are used; it grows.
    """

    keys: Tensor
    values: Tensor
    _storage: tuple[Tensor, Tensor, Tensor]
    """Keys, values, and positions [B, H, capacity] int64, [B, 1, capacity] while heads agree."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        """Tokens fed so far, padding columns included."""
        self.evicted = False
        """True once slots are no longer all columns seen, in order."""
        self.is_first = False
        """True for the first layer of its cache, which keeps `newest`; other layers keep it only
        where the model passes no positions."""
        self.unattended = False
        """True between `update` and `attend`, which brings the positions."""
        self._stored = 0  # slots of the storage that are used
        self._has_empty = False  # True once some slot may be EMPTY
        self.newest: Tensor | None = None
        """[B] int64: position of the newest token fed to each entry; None before the first one."""

    @property
    def batch(self) -> int:
        """Entries of the batch, B; 0 before the first tokens."""
        return self._storage[0].shape[0] if self.is_initialized else 0

    @property
    def positions(self) -> Tensor:
        """[B, H, S] int64: true position of every slot's token, `EMPTY` where there is none."""
        return self._used[2].expand(-1, self._storage[0].shape[1], -1)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] of all slots."""
        return self.keys, self.values

    @property
    def entry_nbytes(self) -> list[int]:
        """Bytes of keys and values held for each batch entry, spare capacity included."""
        if not self.batch:
            return []
        keys, values, _ = self._storage
        return [(keys.nbytes + values.nbytes) // self.batch] * self.batch

    def gather(self, indices: Tensor, fed_again: int = 0) -> EvictingLayer:
        """A new layer with the slots `indices` [B, H, S] (-1 = none) of this one, in that order.

        The last `fed_again` tokens seen are not among them, and count as not seen.
        """
        layer = gather_layer(*self.slots, self.positions, indices, self.seen)
        layer.seen -= fed_again
        layer.newest = None if self.newest is None else self.newest - fed_again
        return layer

    @classmethod
    def of_kept(cls, tensors: Mapping[str, Tensor], seen: int) -> Self:
        """A layer of what an eviction kept of `seen` tokens; it holds and changes these tensors.

        `keys` and `values` are [B, H, S, D], `positions` [B, 1 or H, S] int64. A `RaggedLayer`
        takes its flat part, [M, D] and [M] int32, and `lengths` [B, H] int64.
        """
        layer = cls()
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer._take_tensors(tensors)
        layer._stored = layer._storage[0].shape[2]
        layer.newest = torch.full((layer.batch,), seen - 1, device=tensors["keys"].device)
        layer.seen, layer.evicted = seen, True
        return layer

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As `kvp.hf.visibility.mask_columns` for `query_length` more tokens."""
        return visibility.mask_columns(query_length, self.seen, self.evicted)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [B, H, T, D] keys and values; UsageError with gradients and under autocast."""
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise UsageError(
                "an EvictingCache holds no gradients: call the model in torch.no_grad()"
            )
        if torch.is_autocast_enabled(key_states.device.type):
            raise UsageError("an EvictingCache holds one dtype: load the model in it, no autocast")
        batch, _, tokens, _ = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            positions = key_states.new_empty(batch, 1, 0, dtype=torch.int64)
            self._storage = key_states[:, :, :0], value_states[:, :, :0], positions
        keys, values, positions = self._storage
        stored, stop = self._stored, self._stored + tokens
        if stop > keys.shape[2]:
            capacity = stored + max(tokens, self._growth)
            keys, values, positions = (_grow_storage(x, stored, capacity) for x in self._storage)
            self._storage = keys, values, positions
            positions[:, :, stored:] = visibility.EMPTY  # until `attend` brings them
        keys[:, :, stored:stop], values[:, :, stored:stop] = key_states, value_states
        self._stored = stop
        self.seen += tokens
        self.unattended = True
        return self.keys, self.values

    def attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of the newest tokens over the stored slots: [B, Q, T, D] -> [B, T, Q, D].

        `options` carries the true positions, `position_ids` [B or 1, T], next to scaling and
        dropout; `mask` is a bool [B, 1, T, S] that shows padding among the new tokens, S as
        in `get_mask_sizes`. Raises ModelError when the model passes no positions, UsageError on a
        mask of another shape and on tokens the cache already holds.
        """
        if options.get("position_bias") is not None:
            raise ModelError(f"{type(module).__name__} adds a position bias, which kvp cannot keep")
        tokens = query.shape[2]
        real = None
        if mask is not None:
            visibility.check_mask(mask, tokens, self.seen, self.evicted)
            real = visibility.is_real(mask, tokens)
        position_ids = options.get("position_ids")
        if position_ids is None:  # Llama 4, Granite 4: tokens are counted, padding is not
            counted = query.new_ones(query.shape[0], tokens) if real is None else real
            position_ids = visibility.continue_positions(self.newest, counted)
            options = {**options, "position_ids": position_ids}
            if not self.is_first:
                self.newest = position_ids[:, -1]
        elif position_ids.ndim != 2:
            raise ModelError(
                f"{type(module).__name__} passes no plain token positions to its attention, "
                "which eviction needs"
            )
        new_positions = position_ids.expand(query.shape[0], tokens)
        if real is not None:
            new_positions = new_positions.masked_fill(~real, visibility.EMPTY)
        if self.is_first:
            self._check_tokens(module, new_positions)
        self._has_empty |= mask is not None
        self._storage[2][:, :, self._stored - tokens : self._stored] = new_positions[:, None]
        self.unattended = False
        return self._attend(module, query, mask, options)

    def _visible_slots(self, tokens: int, options: Mapping[str, Any]) -> Tensor | None:
        """[B, H or 1, T, S] bool: used slots that each new token sees; None where each sees all."""
        if tokens == 1 and not self._has_empty:
            return None
        return visibility.see_slots(self._used[2], options["position_ids"])

    def _check_tokens(self, module: nn.Module, new_positions: Tensor) -> None:
        """UsageError for tokens fed twice, keys that do not fit, or untouched layers missing."""
        config, before = getattr(module, "config", None), self.seen - new_positions.shape[1]
        latest = new_positions.masked_fill(new_positions == visibility.EMPTY, -1).amax(dim=1)
        if self.newest is not None:
            if bool((new_positions <= self.newest[:, None]).any()):
                raise UsageError(
                    "the tokens fed are already in past_key_values: leave at least one prompt "
                    f"token out of the cache (it has seen {before}), and let an attention_mask "
                    "cover all tokens"
                )
            latest = torch.maximum(latest, self.newest)
        self.newest = latest
        index = getattr(module, "layer_idx", 0)
        if before == 0 and config is not None and index != evicted_layers(config)[0]:
            raise UsageError(
                "this model has layers that nothing is evicted from: make its cache by "
                "EvictingCache.of(model.config)"
            )
        visibility.check_keys_fit(config, before, latest)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the entries `beam_idx` [R] int64 as the batch, in this order."""
        if self.is_initialized:
            entries = beam_idx.to(self.keys.device)
            self._take_entries(entries)
            self.newest = None if self.newest is None else self.newest[entries]

    @property
    def _growth(self) -> int:
        return self._stored // GROWTH

    @property
    def _used(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions of the used slots of the storage."""
        keys, values, positions = (part[:, :, : self._stored] for part in self._storage)
        return keys, values, positions

    def _attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        self.keys, self.values, _ = self._used
        if not self.evicted:
            return plain_attention(module, query, self.keys, self.values, mask, options)
        visible = self._visible_slots(query.shape[2], options)
        return grouped_attention(query, self.keys, self.values, visible, options)

    def _take_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.values, positions = (tensors[part] for part in _PARTS)
        self._storage = self.keys, self.values, positions

    def _take_entries(self, entries: Tensor) -> None:
        keys, values, positions = (part[entries] for part in self._storage)
        self._storage = keys, values, positions
        self.keys, self.values, _ = self._used

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted cannot come back. Raises UsageError unless 0 tokens go."""
        if tokens_to_remove != 0:
            raise UsageError(
                "an EvictingCache cannot be rolled back: assisted and speculative decoding, and "
                "crop(), need a DynamicCache"
            )


def _grow_storage(storage: Tensor, stored: int, capacity: int) -> Tensor:
    """The first `stored` slots of `storage` [B, H, S, ...] in a tensor of `capacity` slots."""
    larger = storage.new_empty(*storage.shape[:2], capacity, *storage.shape[3:])
    larger[:, :, :stored] = storage[:, :, :stored]
    return larger


class RaggedLayer(EvictingLayer):  # type: ignore[no-untyped-call]
    """A layer whose heads store different numbers of tokens (docs/decisions.md#ragged-heads).

    `keys` and `values` [M, D] are the flat part, what an eviction kept: entry after entry, head
    after head, token after token, with lengths [B, H]; absent tokens take no memory. Tokens fed
    afterwards are equally many in every head and lie in a dense tail, the storage [B, H, T, D].
    """

    _layout: RaggedLayout
    _flat_positions: Tensor  # [M] int32

    @property
    def lengths(self) -> Tensor:
        """[B, H] int64, tokens of each head in the flat part."""
        return self._layout.lengths

    @property
    def positions(self) -> Tensor:
        """As in `EvictingLayer`; slots are those of the longest flat head, then the tail."""
        present = self._present_slots()  # [B, H, longest]
        flat = torch.full(present.shape, visibility.EMPTY, device=present.device)
        flat[present] = self._flat_positions.long()
        return torch.cat([flat, super().positions], dim=-1)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, S, D] of all slots, zeros where none is."""
        present, (keys, values, _) = self._present_slots(), self._used

        def pad_heads(flat: Tensor, tail: Tensor) -> Tensor:
            slots = flat.new_zeros(*present.shape, flat.shape[1])
            slots[present] = flat
            return torch.cat([slots, tail], dim=2)

        return pad_heads(self.keys, keys), pad_heads(self.values, values)

    @property
    def entry_nbytes(self) -> list[int]:
        """Bytes of keys and values held for each batch entry, spare capacity included."""
        token = (self.keys.shape[1] + self.values.shape[1]) * self.keys.element_size()
        tail = self._storage[0].shape[1:3].numel()
        counts: list[int] = self.lengths.sum(dim=1).tolist()
        return [(count + tail) * token for count in counts]

    def _present_slots(self) -> Tensor:
        """[B, H, longest] bool: which slots of the padded flat part hold a token."""
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        return torch.arange(longest, device=self.lengths.device) < self.lengths[..., None]

    @property
    def _growth(self) -> int:
        return TAIL_GROWTH

    def _attend(
        self, module: nn.Module, query: Tensor, mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        if options.get("dropout", 0.0):
            raise UsageError("heads of different lengths have no dropout: call model.eval() first")
        visible = self._visible_slots(query.shape[2], options)  # [B, 1, T, tail]
        shown = None if visible is None else visible[:, 0]
        attended = ragged_attention(
            query,
            StoredTokens(self.keys, self.values, self._layout, *self._used[:2], shown),
            scaling=options.get("scaling"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        return attended.transpose(1, 2).contiguous()

    def _take_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.keys, self.values, self._flat_positions = (tensors[part] for part in _PARTS)
        self._layout = RaggedLayout(tensors["lengths"])
        batch, heads = tensors["lengths"].shape
        keys = self.keys.new_empty(batch, heads, 0, self.keys.shape[1])
        values = self.values.new_empty(batch, heads, 0, self.values.shape[1])
        self._storage = keys, values, tensors["lengths"].new_empty(batch, 1, 0)

    def _take_entries(self, entries: Tensor) -> None:
        spans = self.lengths.sum(dim=1).tolist()  # tokens of each entry, one stretch of memory
        taken = entries.tolist()

        def take(flat: Tensor) -> Tensor:
            parts = flat.split(spans)  # type: ignore[no-untyped-call]
            return torch.cat([parts[entry] for entry in taken]) if taken else flat[:0]

        flat = take(self.keys), take(self.values), take(self._flat_positions)
        self._layout = RaggedLayout(self.lengths[entries])
        super()._take_entries(entries)
        self.keys, self.values, self._flat_positions = flat


def gather_layer(
    keys: Tensor, values: Tensor, positions: Tensor, indices: Tensor, seen: int
) -> EvictingLayer:
    """Gather slots `indices` [R, H, S] (-1 = none) of keys and values [1 or R, H, N, D].

    `positions` [1 or R, 1 or H, N] int64 are the slots' positions, `seen` the true length. The
    layer is ragged as soon as one head has no token in one of the S slots.
    """
    batch, heads, tokens, _ = keys.shape
    indices = indices.to(keys.device)
    entries = torch.arange(len(indices), device=keys.device)
    slot: tuple[Tensor, ...] = (  # indexes [R, H, S] of [batch, heads, tokens]
        (entries if batch > 1 else torch.zeros_like(entries))[:, None, None],
        torch.arange(heads, device=keys.device)[None, :, None],
        indices.clamp_min(0),
    )
    kept = positions.expand(batch, heads, tokens)[slot]  # [R, H, S]
    kept = kept.masked_fill(indices < 0, visibility.EMPTY)
    present = kept < visibility.EMPTY
    kind: type[EvictingLayer] = EvictingLayer
    more = {"positions": kept}
    if not bool(present.all()):
        kind = RaggedLayer
        slot = tuple(part.expand(kept.shape)[present] for part in slot)
        more = {"positions": kept[present].int(), "lengths": present.sum(dim=-1)}
    return kind.of_kept({"keys": keys[slot], "values": values[slot], **more}, seen)


UntouchedLayer = Any
"""A cache layer of transformers' own (they share no base class): nothing is evicted from it."""
LayerT = TypeVar("LayerT")


def untouched_layers(config: PreTrainedConfig) -> dict[int, UntouchedLayer]:
    """Empty transformers caches for the layers that nothing is evicted from, by their index."""
    evicted = set(evicted_layers(config))
    layers = DynamicCache(config=config).layers
    return {index: layer for index, layer in enumerate(layers) if index not in evicted}


def copy_layers(
    untouched: Mapping[int, UntouchedLayer], entries: Tensor | None = None
) -> dict[int, UntouchedLayer]:
    """Independent copies of `untouched`, with all batch entries or with `entries` [R] int64."""
    # Not deepcopy: a window is a view, whose whole storage that would copy.
    twins = {index: copy.copy(layer) for index, layer in untouched.items()}
    for twin in twins.values():
        vars(twin).update({name: _clone_item(value) for name, value in vars(twin).items()})
        if entries is not None:
            twin.reorder_cache(entries)
    return twins


def _clone_item(item: object) -> object:
    if isinstance(item, dict):
        return {key: _clone_item(value) for key, value in item.items()}
    return item.clone() if isinstance(item, Tensor) else item


def copy_without_padding(untouched: Mapping[int, Any], entry: int, padding: int) -> dict[int, Any]:
    """Copies for one batch entry, without its `padding` columns on the left."""
    alone = copy_layers(untouched, torch.tensor([entry]))
    for layer in alone.values():
        visibility.cut_padding(layer, padding)
    return alone


def arrange_layers(own: Sequence[LayerT], untouched: Mapping[int, UntouchedLayer]) -> list[LayerT]:
    """All layers of a model in order: `untouched` at their indices, `own` in the places between."""
    places: Iterator[LayerT] = iter(own)
    count = len(own) + len(untouched)
    return [untouched[index] if index in untouched else next(places) for index in range(count)]
