"""What an evicting cache holds and what that saves, read from the cache when it is asked for."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from rich.filesize import decimal

from kvp.budgets import Budget
from kvp.errors import UsageError
from kvp.hf.cache import EvictingCache
from kvp.hf.visibility import EMPTY

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Kept:
    """What the cache of the latest call of the model holds; `print` says it in three lines.

    After `generate` it is the answer's cache. Shapes: B entries of the batch (each beam is one), L
    layers that tokens are evicted from, H KV heads. Numbers follow the cache while it grows and
    shrinks, answers included; nothing is copied. UsageError before a call and after a broken one.
    """

    def __init__(self, cache: EvictingCache | None = None, budget: Budget | None = None) -> None:
        """Read `cache`, which `evicting` sets at every call; `budget` is what was asked for."""
        self.cache, self.budget = cache, budget

    @property
    def seen(self) -> np.ndarray:
        """[B] int64: tokens that each entry has read and written, without padding."""
        return np.array(self._filled.lengths)

    @property
    def tokens(self) -> np.ndarray:
        """[B, L, H] int64: how many of them each head holds."""
        counts = [(layer.positions < EMPTY).sum(-1).cpu() for layer in self._filled.stored.values()]
        return np.stack(counts, axis=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the held keys and values; `cache.nbytes` has the room for new ones, too."""
        return self._bytes(self.tokens)

    @property
    def full_nbytes(self) -> int:
        """Bytes that the keys and values of all tokens would take in the same layers."""
        return self._bytes(np.broadcast_to(self.seen[:, None, None], self.tokens.shape))

    def positions(self, layer: int, head: int, entry: int = 0) -> np.ndarray:
        """[n] int64: ascending positions, from 0, that a head of the model's `layer` holds.

        Raises UsageError for a layer of which nothing is evicted.
        """
        stored = self._filled.stored
        if layer not in stored:
            raise UsageError(
                f"no tokens are evicted from layer {layer}: choose from {list(stored)}"
            )
        positions = stored[layer].positions[entry, head]
        return positions[positions < EMPTY].cpu().numpy()

    def draw(self, entry: int = 0) -> Figure:
        """Share of the tokens that each head holds, and which ones, of one entry of the batch."""
        from matplotlib import pyplot  # takes a while; notebooks then know how to show figures

        counts, seen, layers = self.tokens[entry], int(self.seen[entry]), list(self._filled.stored)
        heads = range(counts.shape[1])
        mask = np.zeros((counts.size, seen))
        for row, (layer, head) in zip(mask, product(layers, heads), strict=True):
            row[self.positions(layer, head, entry)] = 1
        figure = pyplot.figure(figsize=(11, 4.5), layout="constrained")
        pyplot.close(figure)  # the caller's alone: not shown a second time
        left, right = figure.subplots(1, 2, width_ratios=(1, 3))
        shares = left.imshow(100 * counts / seen, aspect="auto", vmin=0, interpolation="nearest")
        left.set(title="tokens kept, %", xlabel="KV head", ylabel="layer", xticks=heads)
        left.set_yticks(range(len(layers)), layers, fontsize="x-small")
        figure.colorbar(shares, ax=left)
        right.imshow(mask, aspect="auto", cmap="Greys", interpolation="nearest")
        right.set(title=f"which of {seen:,} tokens (dark: kept)", xlabel="position")
        right.set_yticks(range(0, counts.size, len(heads)), layers, fontsize="x-small")
        return figure

    def __repr__(self) -> str:
        try:
            seen, tokens = self.seen, self.tokens
        except UsageError as error:
            return str(error)
        batch, layers, heads = tokens.shape
        request = "" if self.budget is None else f"; asked for: {self.budget}"
        return (
            f"{f'{batch} entries of ' if batch > 1 else ''}{_range(seen)} tokens; each of {layers} "
            f"layers x {heads} KV heads keeps {_range(tokens)}, {tokens.mean() / seen.mean():.1%} "
            f"on average, answers included{request}\n"
            f"{decimal(self.nbytes)} of keys and values instead of {decimal(self.full_nbytes)} "
            f"({self.nbytes / self.full_nbytes:.1%})\n"
            "more: seen, tokens, nbytes, full_nbytes, positions(layer, head), draw()"
        )

    def _bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the keys and values of `tokens` [B, L, H]."""
        pairs = [(layer.keys, layer.values) for layer in self._filled.stored.values()]
        sizes = [sum(side.shape[-1] * side.element_size() for side in pair) for pair in pairs]
        return int(tokens.sum((0, 2)) @ sizes)

    @property
    def _filled(self) -> EvictingCache:
        if self.cache is None or self.cache.get_seq_length() == 0:
            raise UsageError("the model was not called inside evicting(...) yet")
        return self.cache


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
