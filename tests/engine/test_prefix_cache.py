from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.engine.prefix_cache import PrefixCache

SIZE = 2
NUM_PAGES = 14
NONE = np.empty(0, np.int32)


def as_ids(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


def publish(cache: PrefixCache, ids: list[int], pages: list[int], salt: str | None = None) -> list[int]:
    """Publishes whole pages of ids as a sequence would; returns the pages it then holds."""
    held: list[int] = []
    for index, page in enumerate(pages):
        chunk = as_ids(ids[index * SIZE : (index + 1) * SIZE]).tobytes()
        held.append(cache.publish(held[-1] if held else None, salt, chunk, page))
    return held


def match(cache: PrefixCache, ids: list[int], salt: str | None = None, max_pages: int = 99) -> list[int]:
    return cache.match(as_ids(ids), salt, max_pages).tolist()


def test_match_is_the_longest_chain_of_full_pages() -> None:
    cache = PrefixCache(NUM_PAGES, SIZE)
    publish(cache, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert match(cache, [1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert match(cache, [1, 2, 3, 4, 5]) == [10, 11]
    assert match(cache, [1, 2, 3, 4, 5, 6], max_pages=1) == [10]
    assert match(cache, [1, 2, 9, 4, 5, 6]) == [10]
    assert match(cache, [3, 4, 5, 6]) == [], "a page counts only behind its prefix"
    assert match(cache, [1]) == match(cache, []) == []


def test_salts_do_not_see_each_other() -> None:
    cache = PrefixCache(NUM_PAGES, SIZE)
    publish(cache, [1, 2, 3, 4], [1, 2], salt="a")
    assert match(cache, [1, 2, 3, 4]) == match(cache, [1, 2, 3, 4], salt="b") == []
    assert match(cache, [1, 2, 3, 4], salt="a") == [1, 2]
    assert publish(cache, [1, 2, 3, 4], [3, 4]) == [3, 4]
    assert publish(cache, [1, 2, 3, 4], [5, 6], salt="a") == [1, 2], "the pages the tree has already"


def test_the_least_recently_released_leaves_first_and_a_child_before_its_parent() -> None:
    cache = PrefixCache(NUM_PAGES, SIZE)
    old, new = publish(cache, [1, 2, 3, 4], [1, 2]), publish(cache, [1, 2, 5, 6], [3, 4])
    assert new == [1, 4]
    cache.release(as_ids(old))
    assert cache.num_idle == 1, "the first page has another user"
    cache.release(as_ids(new))
    assert cache.num_idle == 3
    assert cache.evict(1).tolist() == [2]
    assert match(cache, [1, 2, 3, 4]) == [1]
    assert cache.evict(2).tolist() == [4, 1]
    assert len(cache) == cache.num_idle == 0


def test_pages_in_use_are_not_evicted() -> None:
    cache = PrefixCache(NUM_PAGES, SIZE)
    held = as_ids(publish(cache, [1, 2, 3, 4], [1, 2]))
    cache.release(held)
    cache.acquire(held[:1])
    assert cache.count_idle(held) == cache.num_idle == 1
    assert cache.evict(1).tolist() == [2]
    with pytest.raises(AssertionError, match="1 pages to evict, 0 idle"):
        cache.evict(1)


def test_use_makes_young() -> None:
    cache = PrefixCache(NUM_PAGES, SIZE)
    first, second = as_ids(publish(cache, [1, 2], [1])), as_ids(publish(cache, [3, 4], [2]))
    cache.release(first)
    cache.release(second)
    cache.acquire(first)
    cache.release(first)
    assert cache.evict(2).tolist() == [2, 1]


def test_memory_stays_bounded_without_eviction() -> None:
    cache = PrefixCache(NUM_PAGES, SIZE)
    held = as_ids(publish(cache, [1, 2, 3, 4], [1, 2]))
    cache.release(held)
    for _ in range(1000):
        cache.acquire(held)
        cache.release(held)
    assert cache._queue_len <= 2 * NUM_PAGES
    assert sum(len(pages) for _, pages in cache._queue) == cache._queue_len
    assert cache.evict(2).tolist() == [2, 1]


@dataclass
class Oracle:
    """The same cache, naively: every prefix in full, with its users and the time of its last release."""

    pages: dict[tuple[str | None, tuple[int, ...]], int] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    released: dict[int, tuple[int, int]] = field(default_factory=dict)
    clock: int = 0

    def match(self, salt: str | None, ids: list[int], max_pages: int) -> list[int]:
        found: list[int] = []
        for stop in range(SIZE, min(len(ids), max_pages * SIZE) + 1, SIZE):
            page = self.pages.get((salt, tuple(ids[:stop])))
            if page is None:
                break
            found.append(page)
        return found

    def release(self, pages: list[int]) -> None:
        self.clock += 1
        for depth, page in enumerate(pages):
            self.users[page] -= 1
            if not self.users[page]:
                self.released[page] = (self.clock, -depth)

    def evict(self, count: int) -> list[int]:
        idle = sorted((page for page, users in self.users.items() if not users), key=self.released.__getitem__)
        for page in idle[:count]:
            del self.users[page]
            self.pages = {key: value for key, value in self.pages.items() if value != page}
        return idle[:count]


@settings(max_examples=60, deadline=None, database=None)
@given(seed=st.integers(0, 10**6))
def test_against_a_naive_oracle_on_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    cache, oracle = PrefixCache(NUM_PAGES, SIZE), Oracle()
    free, running = list(range(1, NUM_PAGES)), list[list[int]]()
    for _ in range(120):
        action = rng.random()
        if action < 0.5:  # a sequence comes: matches, takes pages, and publishes all it fills
            ids, salt = [rng.randrange(2) for _ in range(rng.randrange(1, 11))], rng.choice([None, None, "s"])
            limit = rng.randrange(7)
            shared = match(cache, ids, salt, limit)
            assert shared == oracle.match(salt, ids, limit)
            cache.acquire(as_ids(shared))
            for page in shared:
                oracle.users[page] += 1
            held = list(shared)
            for index in range(len(shared), len(ids) // SIZE):
                if not free:
                    break
                page, key = free.pop(), (salt, tuple(ids[: (index + 1) * SIZE]))
                chunk = as_ids(ids[index * SIZE : (index + 1) * SIZE]).tobytes()
                owner = cache.publish(held[-1] if held else None, salt, chunk, page)
                assert owner == oracle.pages.setdefault(key, page)
                oracle.users[owner] = oracle.users.get(owner, 0) + 1
                if owner != page:
                    free.append(page)
                held.append(owner)
            running.append(held)
        elif action < 0.8 and running:
            held = running.pop(rng.randrange(len(running)))
            cache.release(as_ids(held))
            oracle.release(held)
        else:
            count = rng.randint(0, cache.num_idle)
            evicted = cache.evict(count).tolist()
            assert evicted == oracle.evict(count)
            free += evicted
        assert cache.num_idle == sum(not users for users in oracle.users.values())
        assert len(cache) == len(oracle.pages)


def test_lookup_of_a_long_prompt_is_fast_and_linear() -> None:
    size, times = 16, dict[int, float]()
    for num_pages in (2048, 8192):
        cache = PrefixCache(num_pages + 1, size)
        ids = np.arange(num_pages * size, dtype=np.int32)
        parent = None
        for page in range(num_pages):
            parent = cache.publish(parent, None, ids[page * size : (page + 1) * size].tobytes(), page + 1)
        seconds = list[float]()
        for _ in range(7):
            start = time.perf_counter()
            found = cache.match(ids, None, num_pages)
            seconds.append(time.perf_counter() - start)
            assert len(found) == num_pages
        times[num_pages] = min(seconds)
    # The bar is 5 ms for 128K tokens; benchmarks/host_overhead.py measures it, here a loaded machine may be slow.
    assert times[8192] < 0.025
    assert times[8192] < 12 * times[2048]
