from __future__ import annotations

import numpy as np
import pytest

from tests.engine.drive import check_pages
from tests.engine.fake import limits
from tokenspeed.engine.page_table import PageTable

NONE = np.empty(0, np.int32)
IDS = np.arange(40, dtype=np.int32)


def table(*, share: bool = True) -> PageTable:
    return PageTable(limits(num_pages=30), share_prefixes=share)


def test_a_lease_grows_and_ends() -> None:
    pages = table()
    lease = pages.open(NONE)
    pages.grow(lease, 3)
    pages.grow(lease, 3)
    assert (pages.num_used, pages.num_available, pages.num_free_slots) == (3, 26, 7)
    check_pages(pages, limits(num_pages=30))
    pages.close(lease)
    assert (pages.num_used, pages.num_available, pages.num_free_slots) == (0, 29, 8)


def test_an_ended_lease_is_refused() -> None:
    pages = table()
    lease = pages.open(NONE)
    pages.close(lease)
    again = pages.open(NONE)
    assert again.slot == lease.slot
    assert pages.is_open(np.array([lease.slot] * 2), np.array([lease.epoch, again.epoch])).tolist() == [False, True]
    for use in (lambda: pages.grow(lease, 1), lambda: pages.publish(lease, IDS[:4], None), lambda: pages.close(lease)):
        with pytest.raises(AssertionError, match="has ended"):
            use()


def test_updates_are_the_entries_that_changed() -> None:
    pages = table()
    one, two = pages.open(NONE), pages.open(NONE)
    pages.grow(one, 2)
    pages.grow_each(np.array([one.slot, two.slot], np.int32))
    expected = {(one.slot, 0), (one.slot, 1), (one.slot, 2), (two.slot, 0)}
    updates = pages.take_updates()
    assert updates.dtype == np.int32
    assert {(slot, index) for slot, index, _ in updates.tolist()} == expected
    assert all(pages.pages[slot, index] == page for slot, index, page in updates.tolist())
    assert pages.take_updates().shape == (0, 3)


def test_a_slot_that_changes_hands_between_schedules_has_one_page_an_entry() -> None:
    pages = table()
    lease = pages.open(NONE)
    pages.grow(lease, 2)
    pages.close(lease)
    other = pages.open(NONE)
    keeper = pages.open(NONE)
    pages.grow(keeper, 1)  # takes a page the first lease had
    pages.grow(other, 2)
    named: dict[tuple[int, int], int] = {}
    for slot, index, page in pages.take_updates().tolist():
        assert named.setdefault((slot, index), page) == page


def test_published_pages_are_shared_and_outlive_their_lease() -> None:
    pages = table()
    lease = pages.open(NONE)
    pages.grow(lease, 3)
    pages.publish(lease, IDS[:10], None)
    found = pages.match(IDS, None, 9)
    assert found.tolist() == pages.pages[lease.slot, :2].tolist()
    pages.close(lease)
    assert (pages.num_used, pages.pool.num_free, pages.cache.num_idle) == (0, 27, 2)
    again = pages.open(found)
    assert pages.num_used == 2
    assert pages.take_updates()[-2:, 2].tolist() == found.tolist()
    pages.close(again)


def test_a_double_is_swapped_for_the_cached_page_and_freed() -> None:
    pages = table()
    one, two = pages.open(NONE), pages.open(NONE)
    pages.grow(one, 2)
    pages.grow(two, 3)
    pages.publish(one, IDS[:8], None)
    pages.take_updates()
    pages.publish(two, IDS[:9], None)
    assert pages.pages[two.slot, :2].tolist() == pages.pages[one.slot, :2].tolist()
    assert pages.num_used == 3
    assert sorted(pages.take_updates().tolist()) == [[two.slot, k, pages.pages[one.slot, k]] for k in range(2)]
    check_pages(pages, limits(num_pages=30))


def test_reserve_evicts_idle_pages_only_and_all_or_nothing() -> None:
    pages = table()
    idle, held = pages.open(NONE), pages.open(NONE)
    pages.grow(idle, 10)
    pages.publish(idle, IDS, None)
    pages.close(idle)
    pages.grow(held, 12)
    assert (pages.pool.num_free, pages.cache.num_idle) == (7, 10)
    assert not pages.reserve(18)
    assert (pages.pool.num_free, pages.cache.num_idle) == (7, 10)
    assert pages.reserve(9)
    assert (pages.pool.num_free, pages.cache.num_idle) == (9, 8)
    assert len(pages.match(IDS, None, 10)) == 8


def test_without_sharing_nothing_is_found() -> None:
    pages = table(share=False)
    lease = pages.open(NONE)
    pages.grow(lease, 2)
    pages.publish(lease, IDS[:8], None)
    assert len(pages.match(IDS, None, 9)) == 0
    pages.close(lease)
    assert pages.pool.num_free == 29
