"""Which pages of KV cache are free."""

from __future__ import annotations

import numpy as np


class PagePool:
    """A stack of free page ids. Page 0 is scratch for padding and is never handed out.

    A page is in the pool, or owned by exactly one holder: a slot of the PageTable, or the PrefixCache.
    """

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages - 1
        self.num_free = self.capacity
        self._stack = np.arange(self.capacity, 0, -1, dtype=np.int32)
        self._free = np.ones(num_pages, np.bool_)
        self._free[0] = False

    def take(self, count: int) -> np.ndarray:
        """Hands out `count` pages, int32 [count]; there must be as many."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count].copy()
        self._free[pages] = False
        return pages

    def give(self, pages: np.ndarray) -> None:
        """Takes pages back. Their former holder must not write them in any step dispatched from now on."""
        assert not self._free[pages].any(), f"pages {pages[self._free[pages]]} are free already"
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self._free[pages] = True
        self.num_free += len(pages)
