"""An interpolated Kneser-Ney n-gram model over token ids: what counting alone can do.

One absolute discount per order, estimated from the counts of counts; lower orders count distinct
predecessors. Numpy and sorting only, so that tens of millions of tokens take seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint64]
BITS = 13
"""Bits of a token id. Five have 65: the highest bit of the first is lost, so two 5-grams that
differ in it alone count as one."""
SHIFT = np.uint64(BITS)


@dataclass(frozen=True)
class Order:
    """Counts of one order; histories are the n-grams without their last token."""

    grams: Codes
    """Sorted codes of the n-grams seen."""
    counts: NDArray[np.int64]
    """Occurrences of each, or below the highest order its distinct predecessors."""
    histories: Codes
    """Sorted codes of the histories seen."""
    totals: NDArray[np.int64]
    """Sum of the counts that follow each history."""
    kinds: NDArray[np.int64]
    """Distinct tokens that follow each history."""
    discount: float


class KneserNey:
    """Interpolated Kneser-Ney of order `order`, at most 5."""

    def __init__(self, ids: NDArray[np.integer], *, order: int, vocab_size: int) -> None:
        """Counts the n-grams of `ids` [tokens]; raises ValueError when codes would overflow."""
        if order > 5 or vocab_size > 1 << BITS:
            raise ValueError(f"order {order} over {vocab_size} ids does not fit into 64 bits")
        self.order, self.vocab_size = order, vocab_size
        grams, counts = np.unique(_codes(ids, order), return_counts=True)
        orders = [_order(grams, counts)]
        for length in range(order - 1, 0, -1):
            # Each distinct longer n-gram is one distinct predecessor of its own tail.
            tails = orders[-1].grams & np.uint64((1 << (BITS * length)) - 1)
            orders.append(_order(*np.unique(tails, return_counts=True)))
        self.orders = orders[::-1]

    def log_probability(self, ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """Natural log-probability of `ids[order - 1:]`, each given the `order - 1` before it."""
        codes = _codes(ids, self.order)
        share = np.full(len(codes), 1.0 / self.vocab_size)
        for length, counted in enumerate(self.orders, start=1):
            gram = codes & np.uint64((1 << min(64, BITS * length)) - 1)
            count = _look_up(counted.grams, counted.counts, gram)
            total = _look_up(counted.histories, counted.totals, gram >> SHIFT)
            kinds = _look_up(counted.histories, counted.kinds, gram >> SHIFT)
            seen = np.maximum(total, 1)
            mixed = np.maximum(count - counted.discount, 0) / seen
            mixed += counted.discount * kinds / seen * share
            share = np.where(total > 0, mixed, share)
        logs: NDArray[np.float64] = np.log(share)
        return logs


def _codes(ids: NDArray[np.integer], length: int) -> Codes:
    """Codes of all windows of `length` ids, first id in the highest bits."""
    wide = ids.astype(np.uint64)
    codes = np.zeros(len(wide) - length + 1, np.uint64)
    for offset in range(length):
        codes = (codes << SHIFT) | wide[offset : offset + len(codes)]
    return codes


def _order(grams: Codes, counts: NDArray[np.int64]) -> Order:
    histories, starts = np.unique(grams >> SHIFT, return_index=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Order(
        grams=grams,
        counts=counts,
        histories=histories,
        totals=np.add.reduceat(counts, starts),
        kinds=np.diff(np.append(starts, len(grams))),
        discount=once / max(1, once + 2 * twice),
    )


def _look_up(keys: Codes, values: NDArray[np.int64], wanted: Codes) -> NDArray[np.int64]:
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)
