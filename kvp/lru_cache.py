"""A least-recently-used cache bounded by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class LruCache(Generic[ItemT]):
    """Items up to a number of bytes, one at least; the least recently used is forgotten first."""

    def __init__(self, bound_bytes: float) -> None:
        self._bound = bound_bytes
        self.used = 0
        """Bytes of all that is remembered."""
        self._items: OrderedDict[Hashable, tuple[ItemT, int]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self.used = 0

    def get(self, key: Hashable) -> ItemT | None:
        """The item, or None where it was never there or is forgotten."""
        if key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key][0]

    def put(self, key: Hashable, item: ItemT, nbytes: int) -> None:
        """Remember an item of so many bytes, unless its key is there."""
        if key in self._items:
            return
        self._items[key] = item, nbytes
        self.used += nbytes
        while self.used > self._bound and len(self._items) > 1:
            _, (_, forgotten) = self._items.popitem(last=False)
            self.used -= forgotten
