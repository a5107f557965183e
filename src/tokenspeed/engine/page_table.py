"""Which slot holds which pages: the host's copy of the device's page table, and who owns its entries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenspeed.engine.page_pool import PagePool
from tokenspeed.engine.prefix_cache import PrefixCache
from tokenspeed.types import RunnerLimits

_NO_UPDATES = np.empty((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot and the pages in its row, from `PageTable.open` to `PageTable.close`; using it after that is an error."""

    slot: int
    epoch: int


class PageTable:
    """Rows of pages, one a slot: first those shared through the prefix cache, then those the slot alone owns and writes.

    A page is shared once a committed step has filled it, and never written again. Steps run on the device in the
    order of their dispatch, so a page freed here may be handed out at once: whatever an earlier step still does to it
    comes before what a later one does.
    """

    def __init__(self, limits: RunnerLimits, *, share_prefixes: bool) -> None:
        slots, size = limits.max_num_seqs, limits.page_size
        self.page_size = size
        self.pages = np.zeros((slots, -(-limits.max_model_len // size)), np.int32)
        self.num_pages = np.zeros(slots, np.int32)
        self.num_shared = np.zeros(slots, np.int32)
        self.epochs = np.zeros(slots, np.int64)
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(limits.num_pages, size)
        self._share_prefixes = share_prefixes
        self._free_slots = list(range(slots - 1, -1, -1))
        self._changed: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def num_available(self) -> int:
        """Pages that can be had without taking them from a slot."""
        return self.pool.num_free + self.cache.num_idle

    @property
    def num_used(self) -> int:
        """Pages held by slots, shared ones counted once."""
        return self.pool.capacity - self.num_available

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def match(self, ids: np.ndarray, salt: str | None, max_pages: int) -> np.ndarray:
        """Shareable pages, int32, that hold the longest prefix of `ids`."""
        if not self._share_prefixes:
            return np.empty(0, np.int32)
        return self.cache.match(ids, salt, max_pages)

    def open(self, shared: np.ndarray) -> Lease:
        """Leases a free slot whose row starts with matched pages."""
        self.cache.acquire(shared)
        slot = self._free_slots.pop()
        self.pages[slot, : len(shared)] = shared
        self.num_pages[slot] = self.num_shared[slot] = len(shared)
        self._note(slot, 0, len(shared))
        return Lease(slot, int(self.epochs[slot]))

    def close(self, lease: Lease) -> None:
        """Ends a lease: shared pages stay in the cache, the rest are free."""
        slot = self._check(lease)
        row, shared = self.pages[slot, : self.num_pages[slot]], self.num_shared[slot]
        self.cache.release(row[:shared])
        self.pool.give(row[shared:])
        self.num_pages[slot] = self.num_shared[slot] = 0
        self.epochs[slot] += 1
        self._free_slots.append(slot)

    def reserve(self, count: int) -> bool:
        """Makes `count` pages free, evicting cached ones; False (and nothing done) if there are not as many."""
        short = count - self.pool.num_free
        if short > self.cache.num_idle:
            return False
        if short > 0:
            self.pool.give(self.cache.evict(short))
        return True

    def grow(self, lease: Lease, num_pages: int) -> None:
        """Extends a row to `num_pages` pages; the new ones must be reserved."""
        slot = self._check(lease)
        held = int(self.num_pages[slot])
        if num_pages > held:
            self.pages[slot, held:num_pages] = self.pool.take(num_pages - held)
            self.num_pages[slot] = num_pages
            self._note(slot, held, num_pages)

    def grow_each(self, slots: np.ndarray) -> None:
        """Extends the row of each of these open slots by one page; they must be reserved."""
        if len(slots):
            held = self.num_pages[slots]
            self.pages[slots, held] = self.pool.take(len(slots))
            self.num_pages[slots] = held + 1
            self._changed.append((slots, held))

    def publish(self, lease: Lease, ids: np.ndarray, salt: str | None) -> None:
        """Shares the pages that a committed step has filled.

        A page whose content the cache has already is swapped for the cache's, so that equal prompts that ran side by
        side end up on the same pages.

        Args:
          ids: int32, all ids of the sequence whose keys and values are in the cache.
        """
        if not self._share_prefixes:
            return
        slot, size = self._check(lease), self.page_size
        row, first, stop = self.pages[slot], int(self.num_shared[slot]), len(ids) // size
        parent = int(row[first - 1]) if first else None
        doubles: list[int] = []
        contents = self.cache.split(ids[first * size :])
        for index, (page, content) in enumerate(zip(row[first:stop].tolist(), contents, strict=True), first):
            parent = self.cache.publish(parent, salt, content, page)
            if parent != page:
                row[index] = parent
                self._note(slot, index, index + 1)
                doubles.append(page)
        self.num_shared[slot] = stop
        if doubles:
            self.pool.give(np.array(doubles, np.int32))

    def take_updates(self) -> np.ndarray:
        """Entries that changed since the last call, int32 [U, 3] of (slot, index, page); equal pairs have equal pages."""
        if not self._changed:
            return _NO_UPDATES
        slots = np.concatenate([slots for slots, _ in self._changed])
        indices = np.concatenate([indices for _, indices in self._changed])
        self._changed.clear()
        return np.stack([slots, indices, self.pages[slots, indices]], axis=1).astype(np.int32)

    def is_open(self, slots: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Whether each (slot, epoch) is still leased, bool."""
        return self.epochs[slots] == epochs

    def _check(self, lease: Lease) -> int:
        assert self.epochs[lease.slot] == lease.epoch, f"{lease} has ended; the slot is at {self.epochs[lease.slot]}"
        return lease.slot

    def _note(self, slot: int, start: int, stop: int) -> None:
        if stop > start:
            self._changed.append((np.full(stop - start, slot, np.int32), np.arange(start, stop, dtype=np.int32)))
