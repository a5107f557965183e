from __future__ import annotations

import numpy as np
import pytest

from tests.engine.fake import EOS, limits, request, scores
from tokenspeed.engine.commit import commit
from tokenspeed.engine.lifecycle import Decoding, PutBack
from tokenspeed.engine.roster import Roster
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.types import NO_TOKEN, Request, ScoreArrays, StepResult, TokenDelta


class Bench:
    def __init__(self, *requests: Request) -> None:
        self.roster = Roster(limits(num_pages=60), share_prefixes=True, seed=0)
        self.scheduler = Scheduler(self.roster)
        for one in requests:
            self.roster.add(one, np.array(one.prompt_ids, np.int32))

    def schedule(self) -> None:
        assert self.scheduler.schedule() is not None

    def commit(self, *tokens: int, chosen: ScoreArrays | None = None) -> list[TokenDelta]:
        schedule = self.roster.in_flight[0].schedule
        asked = tuple(
            scores([(np.array([k]), int(token)) for k, token in enumerate(one.target_ids)])
            for one in schedule.prompt_scores
        )
        return commit(self.roster, StepResult(schedule.step_id, np.array(tokens, np.int32), chosen, asked))

    def put_back(self, name: str) -> None:
        sequence = self.roster.find(name)
        assert sequence is not None
        self.roster.put_back(sequence)
        assert isinstance(sequence.state, PutBack)

    def known(self, name: str) -> list[int]:
        sequence = self.roster.find(name)
        assert sequence is not None
        if isinstance(sequence.state, Decoding):
            return self.roster.slots.known(sequence.state.lease.slot).tolist()
        return sequence.ids.tolist()


def test_the_row_of_a_sequence_that_ended_meanwhile_is_dropped() -> None:
    bench = Bench(request("a", [2, 3]), request("b", [2, 3]))
    bench.schedule()
    bench.schedule()
    first = bench.commit(EOS, 8)
    assert [(one.request_id, one.token_ids, one.finish_reason) for one in first] == [
        ("a", (EOS,), "stop"),
        ("b", (8,), None),
    ]
    assert [(one.request_id, one.token_ids) for one in bench.commit(5, 9)] == [("b", (9,))]


def test_a_row_is_dropped_even_if_its_slot_has_a_new_sequence() -> None:
    bench = Bench(request("a", [2, 3]))
    bench.schedule()
    bench.schedule()
    bench.commit(EOS)
    bench.roster.add(request("b", [4, 5]), np.array([4, 5], np.int32))
    bench.schedule()
    assert bench.roster.in_flight[1].schedule.slots.tolist() == bench.roster.in_flight[0].schedule.slots.tolist()
    assert bench.commit(33) == []
    assert bench.known("b") == [4, 5]
    assert bench.commit(6)[0].token_ids == (6,)
    assert bench.known("b") == [4, 5, 6]


def test_the_token_of_a_sequence_put_back_meanwhile_counts() -> None:
    bench = Bench(request("a", [2, 3], logprobs=2))
    bench.schedule()
    bench.put_back("a")
    (delta,) = bench.commit(9, chosen=scores([(np.array([2, 3]), 9)]))
    assert (delta.token_ids, delta.finish_reason, delta.num_preemptions) == ((9,), None, 1)
    assert delta.logprobs is not None
    assert len(delta.logprobs[0].top_ids) == 2
    assert bench.known("a") == [2, 3, 9]
    bench.schedule()
    assert bench.roster.in_flight[0].schedule.token_ids.tolist() == [2, 3, 9]
    assert bench.roster.in_flight[0].schedule.output_positions.tolist() == [1]


def test_a_late_token_may_end_its_sequence() -> None:
    bench = Bench(request("a", [2, 3]))
    bench.schedule()
    bench.put_back("a")
    (delta,) = bench.commit(EOS)
    assert delta.finish_reason == "stop"
    assert bench.roster.num_live == 0
    assert bench.roster.head() is None


def test_a_late_token_of_an_aborted_sequence_is_dropped() -> None:
    bench = Bench(request("a", [2, 3]))
    bench.schedule()
    bench.put_back("a")
    sequence = bench.roster.find("a")
    assert sequence is not None
    bench.roster.finish(sequence, "abort")
    assert bench.commit(9) == []


@pytest.mark.parametrize("put_back", [False, True])
def test_scoring_alone_ends_with_the_prompt(put_back: bool) -> None:
    bench = Bench(request("a", list(range(2, 42)), max_tokens=0, prompt_logprobs=1))
    bench.schedule()
    bench.schedule()
    assert bench.commit(NO_TOKEN) == []
    if put_back:
        bench.put_back("a")
    (delta,) = bench.commit(NO_TOKEN)
    assert (delta.token_ids, delta.finish_reason) == ((), "length")
    assert len(delta.prompt_logprobs or ()) == 40
    assert bench.roster.num_live == 0


def test_a_late_chunk_that_is_not_the_last_ends_nothing() -> None:
    bench = Bench(request("a", list(range(2, 42)), max_tokens=0, prompt_logprobs=1))
    bench.schedule()
    bench.put_back("a")
    assert bench.commit(NO_TOKEN) == []
    assert bench.roster.num_waiting == 1
    bench.schedule()
    bench.schedule()
    again, rest = (step.schedule.prompt_scores for step in bench.roster.in_flight)
    assert again == (), "the first 32 were scored"
    assert [len(asked.target_ids) for asked in rest] == [7]


def test_pages_are_shared_when_the_step_that_fills_them_is_committed() -> None:
    prompt = list(range(2, 12))
    bench = Bench(request("a", prompt, max_tokens=30, ignore_eos=True))
    table, ids = bench.roster.table, np.array([*prompt, 7, 7, 7, 7], np.int32)
    bench.schedule()
    assert len(table.match(ids, None, 9)) == 0, "in flight"
    bench.commit(7)
    assert len(table.match(ids, None, 9)) == 2
    for _ in range(2):
        bench.schedule()
    bench.commit(7)  # 11 ids are in the cache
    assert len(table.match(ids, None, 9)) == 2
    bench.commit(7)  # 12
    assert len(table.match(ids, None, 9)) == 3


def test_results_come_in_order() -> None:
    bench = Bench(request("a", [2, 3]))
    bench.schedule()
    with pytest.raises(AssertionError, match="step 0 is next, not 1"):
        commit(bench.roster, StepResult(1, np.array([7], np.int32), None, ()))
