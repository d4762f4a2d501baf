"""A transformers cache whose layers drop entries physically and still report the true length.

Layers that see every token are kvp's. All other layers are transformers' own and hold what they
would hold without kvp (`kvp.hf.model_config`). `get_seq_length` counts the tokens seen, padding
columns included, as transformers does. So positions stay true, and `generate` feeds exactly the new
tokens. `get_mask_sizes` counts what is stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from kvp.errors import UsageError
from kvp.hf.attention import QueryRecorder, StoredKeys
from kvp.hf.cache_layers import (
    EvictingLayer,
    UntouchedLayer,
    arrange_layers,
    copy_layers,
    gather_layer,
    untouched_layers,
)
from kvp.hf.model_config import evicted_layers

PADDING, UNKNOWN = -1, -2
"""Entries of `EvictingCache.ids` for columns of padding, and for tokens fed outside of blocks."""


class EvictingCache(Cache):
    """The layers of a model; empty until its first forward pass, like a `DynamicCache`."""

    def __init__(self, layers: Sequence[EvictingLayer | UntouchedLayer] = ()) -> None:
        """Take `layers`; the first pass adds an `EvictingLayer` for each layer that is missing."""
        super().__init__(layers=list(layers))
        self.recorder: QueryRecorder | None = None
        """Receives the queries of every forward pass while it is set."""
        self.prompt_tokens: tuple[int, ...] | None = None
        """Tokens of each entry up to the end of the latest prompt, earlier turns included; None
        before the first prompt that is read inside `evicting`."""
        self.shrunk_at = 0
        """Tokens seen when the cache was shrunk the last time."""
        self.begun_at: int | None = None
        """Tokens seen when the running pass began, -1 while all layers change, else None."""
        self.ids: Tensor | None = None
        """[B, N] int64: ids of the N tokens seen, `PADDING` or `UNKNOWN`; fewer columns after
        tokens were fed outside of `evicting`."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> EvictingCache:
        """An empty cache for a model with this config."""
        evicting = [EvictingLayer() for _ in evicted_layers(config)]
        return cls(arrange_layers(evicting, untouched_layers(config)))

    @classmethod
    def adopt(cls, cache: Cache, config: PreTrainedConfig) -> EvictingCache:
        """`cache` itself; an empty one of transformers becomes an evicting one.

        Raises UsageError for other kinds, and for a cache that was filled outside of `evicting`.
        """
        if isinstance(cache, EvictingCache) and (cache.ids is not None or not cache.evicted):
            return cache
        offloading = " with offloading" if getattr(cache, "offloading", False) else ""
        if type(cache) not in (DynamicCache, EvictingCache) or offloading:
            raise UsageError(
                f"evicting cannot shrink a {type(cache).__name__}{offloading}: pass neither "
                "past_key_values nor cache_implementation"
            )
        if cache.get_seq_length() > 0:
            raise UsageError(
                "past_key_values was filled outside of evicting(...): pass the whole prompt"
            )
        vars(cache).clear()  # in place: the caller keeps this object and passes it on
        vars(cache).update(vars(cls.of(config)))
        cache.__class__ = cls
        assert isinstance(cache, EvictingCache)
        return cache

    @classmethod
    def gather(
        cls,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        indices: Sequence[Tensor],
        seen: int,
        untouched: Mapping[int, UntouchedLayer] | None = None,
    ) -> EvictingCache:
        """Build a cache of R entries from a prefill, each entry and head with its own kept tokens.

        Per layer: keys and values [1 or R, H, N, D] (one serves all R), indices int64 [R, H, S]
        into the N tokens, whose positions are 0..N-1; -1 means no token. `seen` is the true length,
        N or more. `untouched` are the caches of the model's other layers after the `seen` tokens,
        of 1 or R entries; they are copied.
        """
        layers: list[EvictingLayer] = []
        for layer_keys, layer_values, layer_indices in zip(keys, values, indices, strict=True):
            positions = torch.arange(layer_keys.shape[2], device=layer_keys.device)[None, None]
            layers.append(gather_layer(layer_keys, layer_values, positions, layer_indices, seen))
        batch, entries = keys[0].shape[0], indices[0].shape[0]
        spread = None if batch == entries else torch.zeros(entries, dtype=torch.int64)
        return cls(arrange_layers(layers, copy_layers(untouched or {}, spread)))

    def fork(self, n: int = 1) -> EvictingCache:
        """An independent cache that goes on from here; this one stays as it is.

        With `n` above 1 every entry of the batch appears `n` times in a row, for `n` continuations
        in one batch. The fork also carries the recent queries that this cache carries (`every=` of
        `evicting`). Raises UsageError for `n` below 1.
        """
        if n < 1:
            raise UsageError(f"fork needs at least 1 row, got n={n}")
        self.refuse_unfinished()
        fork = copy.copy(self)
        copies = [copy.copy(layer) for layer in self.stored.values()]
        fork.layers = arrange_layers(copies, copy_layers(self.untouched))
        fork.recorder = copy.deepcopy(self.recorder)
        fork.batch_repeat_interleave(n)  # entries that are chosen are copies
        return fork

    def check_batch(self, batch: int) -> None:
        """UsageError unless the cache has `batch` entries and no pass ended in its middle."""
        self.refuse_unfinished()
        if self.batch not in (batch, 0):
            raise UsageError(
                f"the prompt has {batch} rows (num_return_sequences and num_beams count), "
                f"past_key_values has {self.batch}: cache.fork(n) gives n rows for each"
            )

    def end_prompt(self) -> None:
        """Note that a prompt ends with the tokens seen so far; the cache is shrunk after it."""
        self.prompt_tokens, self.shrunk_at = tuple(self.lengths), self.get_seq_length()

    def add_ids(self, fed: Tensor, real: Tensor) -> None:
        """Note the ids [B, T] that a pass has fed; `real` is the result of `mark_tokens`."""
        read = real.new_empty(len(real), 0) if self.ids is None else self.ids.to(real.device)
        new, ids = real[:, read.shape[1] :], fed.long()
        if ids.shape != new.shape:
            ids = torch.full_like(new, UNKNOWN, dtype=torch.int64)
        self.ids = torch.cat([read.long(), ids.masked_fill(~new, PADDING)], dim=1)

    def check_begins(self, fed: Tensor, mask: Tensor | None) -> None:
        """Raise UsageError unless a prompt begins with the N tokens seen, and has more tokens.

        `fed` are its ids [B, T], before they are repeated for beams; `mask` is [B, T] or None.
        """
        seen, (batch, tokens), held = self.get_seq_length(), fed.shape, self.ids
        if self.batch % batch:
            return  # refused by `check_batch`
        masked = mask is None or mask.shape == fed.shape
        if masked and held is not None and held.shape[1] == seen < tokens:
            read = fed.long() if mask is None else fed.long().masked_fill(mask == 0, PADDING)
            begin = read[:, :seen].repeat_interleave(self.batch // batch, dim=0).to(held.device)
            if bool(((begin == held) | (held == PADDING) & (mask is None)).all()):
                return
        raise UsageError(
            f"past_key_values has seen {seen} tokens, and this prompt of {tokens} is not known to "
            "begin with them and go on: pass all tokens, those first, or the new ones alone as "
            f"input_ids, with an attention_mask for all, as torch.ones({batch}, {seen + tokens})"
        )

    def mark_tokens(self, mask: Tensor | None, batch: int, tokens: int) -> Tensor:
        """[B, N + T] bool: which columns, of the N seen and the T fed next, hold no padding.

        `mask` covers the T columns or all N + T; None means that the T columns have no padding.
        Raises UsageError for a mask of another shape, or with other padding in the N columns.
        """
        seen, held = self.get_seq_length(), self.ids
        alone, every = (batch, tokens), (batch, seen + tokens)
        real: Any = torch.ones(alone) if mask is None else mask
        shape = tuple(getattr(real, "shape", ()))
        if shape in (alone, every):
            real = real.bool()
            before = first = real.new_ones(batch, seen)
            if known := held is not None and held.shape[1] == seen:
                before = first = (held != PADDING).to(real.device)
            if shape == every:
                first = real[:, :seen]
            unlike = known and not torch.equal(first, before)
            if not unlike and (known or not seen or first.sum(1).tolist() == self.lengths):
                return torch.cat([first, real[:, real.shape[1] - tokens :]], dim=1)
        raise UsageError(
            f"attention_mask {shape or type(mask).__name__} does not fit: pass one of {every}, a "
            f"column for every token, in which the {seen} seen have the padding that they were "
            f"read with, or one of the {tokens} tokens fed"
        )

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change all layers inside this block; an interrupted one leaves the cache unfinished."""
        self.begun_at = -1
        yield
        self.begun_at = None

    def refuse_unfinished(self) -> None:
        """Raise UsageError where a pass or a change ended in the middle, as after Ctrl-C."""
        layers = self.stored.values()
        counts = {self.begun_at, *(layer.seen for layer in layers)} - {None}
        if len(counts) > 1 or any(layer.unattended for layer in layers):
            raise UsageError(
                "past_key_values was left unfinished by an interrupted call, its layers have seen "
                "different tokens: read the prompt again with a new cache"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, padding columns included; UsageError after a pass ended in its middle."""
        if layer_idx == 0:  # as it is called before a pass
            self.refuse_unfinished()
        return int(super().get_seq_length(layer_idx))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor] | tuple[StoredKeys, StoredKeys]:
        """Append [B, H, T, D]; return a handle in kvp's own layers, keys and values in others."""
        while len(self.layers) <= layer_idx:
            self.layers.append(EvictingLayer())
        top = next(layer for layer in self.layers if isinstance(layer, EvictingLayer))
        layer, first = self.layers[layer_idx], self.layers.index(top)
        if layer_idx <= first:  # the first layer of a pass
            self.check_batch(len(key_states))
        if not isinstance(layer, EvictingLayer):
            return super().update(key_states, value_states, layer_idx)
        layer.is_first = layer_idx == first
        layer.update(key_states, value_states)
        if layer.seen != top.seen:  # of layers that appeared, the last had not yet
            self.refuse_unfinished()
        stored = StoredKeys(layer, layer_idx, self.recorder)
        return stored, stored

    @property
    def stored(self) -> dict[int, EvictingLayer]:
        """The layers that tokens are evicted from: index in the model -> layer."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, EvictingLayer)}

    @property
    def untouched(self) -> dict[int, UntouchedLayer]:
        """Caches of all other layers of the model, which kvp never changes: index -> cache."""
        layers = self.stored
        return {index: layer for index, layer in enumerate(self.layers) if index not in layers}

    @property
    def batch(self) -> int:
        """Entries of the batch, 0 while the cache is empty."""
        return next((layer.batch for layer in self.stored.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that may be evicted, spare capacity included."""
        return sum(self.entry_nbytes)

    @property
    def entry_nbytes(self) -> list[int]:
        """`nbytes` of each batch entry."""
        layers = zip(*(layer.entry_nbytes for layer in self.stored.values()), strict=True)
        return [sum(entry) for entry in layers]

    def reset(self) -> None:
        """Forget everything: the cache is as empty as a new one."""
        self.prompt_tokens = self.begun_at = self.ids = self.recorder = None
        self.shrunk_at = 0
        for index in self.stored:
            self.layers[index] = EvictingLayer()
        for layer in self.untouched.values():
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every entry of the batch `repeats` times."""
        self.batch_select_indices(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only entries `indices` [R] int64 of the batch."""
        with self.changing():
            for layer in self.layers:  # the one way to choose entries that every kind of layer has
                layer.reorder_cache(indices)  # type: ignore[arg-type]
            if self.recorder is not None:
                self.recorder.take(indices)
            if (counts := self.prompt_tokens) is not None:
                self.prompt_tokens = tuple(counts[entry] for entry in indices.tolist())
            if self.ids is not None:
                self.ids = self.ids[indices.to(self.ids.device)]

    @property
    def lengths(self) -> list[int]:
        """True tokens that each batch entry has seen, without padding."""
        newest = next(iter(self.stored.values())).newest
        assert newest is not None
        return (newest + 1).tolist()

    @property
    def evicted(self) -> bool:
        """True once any layer dropped or rearranged tokens."""
        return any(layer.evicted for layer in self.stored.values())
