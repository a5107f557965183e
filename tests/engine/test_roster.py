from __future__ import annotations

import numpy as np
import pytest

from tests.engine.fake import limits, request
from tokenspeed.engine.lifecycle import Decoding, PutBack
from tokenspeed.engine.roster import Roster
from tokenspeed.types import Request, RunnerLimits

NONE = np.empty(0, np.int32)


def roster(sizes: RunnerLimits | None = None) -> Roster:
    return Roster(sizes or limits(), share_prefixes=True, seed=0)


def add(one: Roster, *requests: Request) -> None:
    for item in requests:
        one.add(item, np.array(item.prompt_ids, np.int32))


def test_waiting_go_by_priority_then_arrival() -> None:
    one = roster()
    add(one, request("a", [2]), request("b", [2]), request("urgent", [2], priority=-5))
    order = [one.admit_head(NONE).request.request_id for _ in range(3)]
    assert order == ["urgent", "a", "b"]
    assert one.lowest().request.request_id == "b"
    assert (one.num_live, one.num_running, one.num_waiting) == (3, 3, 0)


def test_a_put_back_sequence_is_the_head_and_finished_ones_are_passed_over() -> None:
    one = roster()
    add(one, request("a", [2]), request("b", [2]), request("c", [2]))
    first = one.admit_head(NONE)
    one.put_back(first)
    assert isinstance(first.state, PutBack)
    assert one.head() is first
    one.finish(first, "abort")
    head = one.head()
    assert head is not None
    assert head.request.request_id == "b"
    assert (one.num_running, one.num_waiting) == (0, 2)
    assert one.find("a") is None
    assert one.live_ids == ["b", "c"]


def test_illegal_transitions_are_refused() -> None:
    one = roster()
    add(one, request("a", [2]))
    sequence = one.admit_head(NONE)
    one.complete(sequence)
    assert isinstance(sequence.state, Decoding)
    with pytest.raises(AssertionError):
        one.complete(sequence)
    one.finish(sequence, "stop")
    with pytest.raises(AssertionError):
        one.finish(sequence, "stop")
    with pytest.raises(AssertionError):
        one.put_back(sequence)


def test_a_pool_must_hold_one_sequence_and_a_step_all() -> None:
    with pytest.raises(AssertionError, match="24 pages of 4 cannot hold one sequence of 96"):
        roster(limits(num_pages=24))
    with pytest.raises(AssertionError, match="every running sequence"):
        roster(limits(max_num_seqs=9, max_num_batched_tokens=8))


def test_request_ids_are_unique() -> None:
    one = roster()
    add(one, request("a", [2]))
    with pytest.raises(AssertionError, match="in use"):
        add(one, request("a", [2]))
