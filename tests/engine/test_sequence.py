from __future__ import annotations

import numpy as np
import pytest

from tests.engine.fake import EOS, limits, request, scores
from tokenspeed.engine.sequence import Sequence, SlotArrays, token_logprobs
from tokenspeed.types import Request


def sequence(one: Request, max_model_len: int = 96) -> Sequence:
    return Sequence(one, np.array(one.prompt_ids, np.int32), 0, 1, max_model_len)


def test_outputs_are_bounded_by_the_context() -> None:
    assert sequence(request("a", [2] * 90, max_tokens=4)).max_outputs == 4
    assert sequence(request("a", [2] * 90, max_tokens=40)).max_outputs == 6
    assert sequence(request("a", [2] * 90, max_tokens=None)).max_outputs == 6


def test_stop_ids_are_end_of_sequence_unless_ignored_and_the_users() -> None:
    assert sequence(request("a", [2], stop_token_ids=(5,))).stop_ids == (EOS, 5)
    assert sequence(request("a", [2], stop_token_ids=(5,), ignore_eos=True)).stop_ids == (5,)


@pytest.mark.parametrize(
    ("token", "outputs", "reason"),
    [(EOS, 2, None), (EOS, 3, "stop"), (7, 3, None), (7, 12, "length"), (EOS, 12, "stop")],
)
def test_finish_reason(token: int, outputs: int, reason: str | None) -> None:
    assert sequence(request("a", [2], max_tokens=12, min_tokens=3)).finish_reason(token, outputs) == reason


def test_what_may_come_from_the_prefix_cache() -> None:
    plain, scored = sequence(request("a", [2] * 9)), sequence(request("a", [2] * 9, prompt_logprobs=1))
    assert plain.num_reusable == 8
    assert scored.num_reusable == 0
    scored.num_scored = 5
    assert scored.num_reusable == 5, "a resumed one may skip what has been scored"
    scored.num_scored = 8
    scored.ids = np.full(20, 2, np.int32)
    assert scored.num_reusable == 19


def test_prompt_scores_go_with_the_first_delta() -> None:
    one = sequence(request("a", [2, 3, 4], prompt_logprobs=2))
    pairs = [(np.array([2]), 3), (np.array([2, 3]), 4)]
    one.add_prompt_scores(scores(pairs[:1]))
    one.add_prompt_scores(scores(pairs[1:]))
    told = one.delta((5,), None).prompt_logprobs
    assert told is not None
    assert [None if row is None else len(row.top_ids) for row in told] == [None, 2, 2]
    assert one.delta((6,), None).prompt_logprobs is None


def test_token_logprobs_are_trimmed() -> None:
    (row,) = token_logprobs(scores([(np.array([2]), 3)]), 0)
    assert row.top_ids == row.top_logprobs == ()
    assert row.rank >= 1
    assert isinstance(row.logprob, float)


def test_slot_arrays_tell_which_outputs_end_what() -> None:
    slots = SlotArrays(limits())
    slots.take(2, sequence(request("a", [2] * 5, max_tokens=2, min_tokens=2)), 0)
    slots.take(5, sequence(request("b", [2] * 9, stop_token_ids=(9, 10, 11, 12, 13, 14))), 4)
    both = np.array([2, 5], np.int32)
    stops, full = slots.append(both, np.array([EOS, 14], np.int32))
    assert stops.tolist() == [False, True], "min_tokens shields the first"
    assert full.tolist() == [False, False]
    stops, full = slots.append(both[:1], np.array([EOS], np.int32))
    assert (stops.tolist(), full.tolist()) == ([True], [True])
    assert slots.known(2).tolist() == [2] * 5 + [EOS, EOS]
    slots.take(5, sequence(request("c", [2] * 3)), 0)
    stops, _ = slots.append(both[1:], np.array([14], np.int32))
    assert stops.tolist() == [False], "the stop ids of the slot's last sequence are gone"
