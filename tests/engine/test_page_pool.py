from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.engine.page_pool import PagePool


def test_every_page_but_scratch_is_handed_out_once() -> None:
    pool = PagePool(10)
    assert pool.capacity == pool.num_free == 9
    taken = np.concatenate([pool.take(4), pool.take(5)])
    assert sorted(taken.tolist()) == list(range(1, 10))
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.take(1)


def test_what_was_taken_does_not_change_when_others_give_and_take() -> None:
    pool = PagePool(10)
    first, second = pool.take(3), pool.take(3)
    kept = second.tolist()
    pool.give(first)
    again = pool.take(6)
    assert second.tolist() == kept
    assert not set(again.tolist()) & set(kept)


def test_a_page_cannot_be_given_twice() -> None:
    pool = PagePool(10)
    pages = pool.take(3)
    pool.give(pages[:2])
    with pytest.raises(AssertionError, match="free already"):
        pool.give(pages[1:])
