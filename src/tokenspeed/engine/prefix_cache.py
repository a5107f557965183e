"""Which full pages hold the keys and values of which tokens, so that a prompt that begins the same reuses them."""

from __future__ import annotations

from collections import deque

import numpy as np

_UNSALTED = -1
"""Stands for the parent of a first page; a salted first page has its salt there."""


class PrefixCache:
    """A tree of full pages, keyed by (parent page, the page's ids); equal keys mean equal prefixes, with no hash to trust.

    A page's parent cannot leave before the page does, so its number names the whole prefix before it. Pages in use by
    sequences are counted (`_users`); pages without users are evicted least recently used first. Users of a page also
    use its parent, so in order of release, the deepest first, a child always leaves before its parent.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_idle = 0
        """Pages in the tree that nobody uses."""
        self._page_size = page_size
        self._content = np.dtype((np.void, page_size * np.dtype(np.int32).itemsize))
        self._index: dict[tuple[int | str, bytes], int] = {}
        self._keys: list[tuple[int | str, bytes] | None] = [None] * num_pages
        self._users = np.zeros(num_pages, np.int32)
        self._released = np.zeros(num_pages, np.int64)
        self._clock = 0
        self._queue: deque[tuple[int, np.ndarray]] = deque()
        self._queue_len = 0

    def __len__(self) -> int:
        return len(self._index)

    def split(self, ids: np.ndarray) -> list[bytes]:
        """The content of each full page of int32 ids, contiguous."""
        return ids[: len(ids) // self._page_size * self._page_size].view(self._content).tolist()

    def match(self, ids: np.ndarray, salt: str | None, max_pages: int) -> np.ndarray:
        """The pages of the longest known prefix, int32, at most `max_pages`; linear in the prefix.

        Args:
          ids: int32 [n], contiguous.
        """
        find = self._index.get
        parent: int | str = _UNSALTED if salt is None else salt
        pages: list[int] = []
        for content in self.split(ids[: max_pages * self._page_size]):
            page = find((parent, content))
            if page is None:
                break
            pages.append(page)
            parent = page
        return np.array(pages, np.int32)

    def count_idle(self, pages: np.ndarray) -> int:
        """How many of these pages of the tree nobody uses."""
        return len(pages) - int(np.count_nonzero(self._users[pages]))

    def acquire(self, pages: np.ndarray) -> None:
        """Adds a user to each page of a matched prefix."""
        self.num_idle -= self.count_idle(pages)
        self._users[pages] += 1

    def publish(self, parent: int | None, salt: str | None, content: bytes, page: int) -> int:
        """Gives a full page to the tree, its giver being its first user.

        Args:
          parent: the published page before it; None if it is a prompt's first.
          content: the page's int32 ids.

        Returns:
          The page that now holds these ids for its giver: another than `page` if the tree has one already, in which
          case `page` stays the giver's.
        """
        root: int | str = _UNSALTED if salt is None else salt
        key = (root if parent is None else parent, content)
        known = self._index.setdefault(key, page)
        if known == page:
            self._keys[page] = key
            self._users[page] = 1
        else:
            self.num_idle -= int(self._users[known] == 0)
            self._users[known] += 1
        return known

    def release(self, pages: np.ndarray) -> None:
        """Takes one user from each page of a prefix, in the order of the prefix."""
        self._users[pages] -= 1
        idle = pages[self._users[pages] == 0][::-1].copy()
        if len(idle) == 0:
            return
        self._clock += 1
        self._released[idle] = self._clock
        self._queue.append((self._clock, idle))
        self._queue_len += len(idle)
        self.num_idle += len(idle)
        if self._queue_len > 2 * len(self._keys):
            self._compact()

    def evict(self, count: int) -> np.ndarray:
        """Forgets the `count` pages, int32, that were released longest ago; there must be as many without users."""
        assert count <= self.num_idle, f"{count} pages to evict, {self.num_idle} idle"
        evicted: list[np.ndarray] = []
        left = count
        while left:
            clock, pages = self._queue.popleft()
            self._queue_len -= len(pages)
            pages = self._still_idle(clock, pages)
            if len(pages) > left:
                self._queue.appendleft((clock, pages[left:]))
                self._queue_len += len(pages) - left
                pages = pages[:left]
            evicted.append(pages)
            left -= len(pages)
        gone = np.concatenate(evicted) if evicted else np.empty(0, np.int32)
        for page in gone.tolist():
            key = self._keys[page]
            assert key is not None
            del self._index[key]
            self._keys[page] = None
        self.num_idle -= count
        return gone

    def _still_idle(self, clock: int, pages: np.ndarray) -> np.ndarray:
        return pages[(self._released[pages] == clock) & (self._users[pages] == 0)]

    def _compact(self) -> None:
        """Drops queue entries of pages that were used again since, which eviction would skip."""
        kept = [(clock, self._still_idle(clock, pages)) for clock, pages in self._queue]
        self._queue = deque((clock, pages) for clock, pages in kept if len(pages))
        self._queue_len = self.num_idle
