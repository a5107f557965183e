from __future__ import annotations

import numpy as np

from tests.engine.drive import Driver
from tests.engine.fake import limits, next_token, request
from tokenspeed.engine.commit import commit
from tokenspeed.engine.lifecycle import PutBack
from tokenspeed.engine.roster import Roster
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.types import NO_TOKEN, Request, RunnerLimits, Schedule, StepResult


class Bench:
    """A scheduler whose steps give token 7 at once."""

    def __init__(self, sizes: RunnerLimits) -> None:
        self.roster = Roster(sizes, share_prefixes=True, seed=0)
        self.scheduler = Scheduler(self.roster)

    def add(self, *requests: Request) -> None:
        for one in requests:
            self.roster.add(one, np.array(one.prompt_ids, np.int32))

    def schedule(self) -> Schedule:
        schedule = self.scheduler.schedule()
        assert schedule is not None
        return schedule

    def commit(self) -> None:
        schedule = self.roster.in_flight[0].schedule
        tokens = np.where(schedule.samples, np.int32(7), np.int32(NO_TOKEN))
        commit(self.roster, StepResult(schedule.step_id, tokens, None, ()))

    def step(self) -> Schedule:
        schedule = self.schedule()
        self.commit()
        return schedule

    def lens(self, schedule: Schedule) -> dict[str, int]:
        """Tokens of each row by request, as long as none has ended."""
        names = [self.roster.slots.sequences[slot] for slot in schedule.slots.tolist()]
        lens = np.diff(schedule.cu_q_lens).tolist()
        return {one.request.request_id: n for one, n in zip(names, lens, strict=True) if one is not None}


def long(name: str, length: int, **more: object) -> Request:
    """A prompt nobody shares, that goes on."""
    start = next_token(np.array([len(name), *name.encode()]), 0, 0, ())
    return request(name, [(start + 3 * k) % 60 + 1 for k in range(length)], max_tokens=40, ignore_eos=True, **more)


def test_decodes_come_first_and_prefill_fills_the_budget_in_order_of_arrival() -> None:
    bench = Bench(limits(max_num_batched_tokens=20))
    bench.add(long("a", 6), long("b", 30), long("c", 9))
    first = bench.step()
    assert bench.lens(first) == {"a": 6, "b": 14}
    assert first.samples.tolist() == [True, False]
    second = bench.step()
    assert bench.lens(second) == {"a": 1, "b": 16, "c": 3}
    assert second.token_ids[0] == NO_TOKEN
    assert second.samples.tolist() == [True, True, False]
    third = bench.step()
    assert bench.lens(third) == {"a": 1, "b": 1, "c": 6}
    assert third.output_positions.tolist() == [2, 1, 0]
    assert third.kv_lens.tolist() == [8, 31, 9]
    assert third.positions.tolist() == [7, 30, 3, 4, 5, 6, 7, 8]
    assert bench.step().decode_only


def test_a_lower_priority_number_goes_first() -> None:
    bench = Bench(limits(max_num_batched_tokens=20))
    bench.add(long("a", 50))
    bench.step()
    bench.add(long("later", 12), long("urgent", 12, priority=-1))
    schedule = bench.step()
    assert bench.lens(schedule) == {"urgent": 12, "a": 8}


def test_what_is_in_flight_counts_as_done() -> None:
    bench = Bench(limits())
    bench.add(request("a", [2, 3], max_tokens=2, ignore_eos=True))
    bench.schedule()
    second = bench.schedule()
    assert second.token_ids.tolist() == [NO_TOKEN]
    assert second.output_positions.tolist() == [1]
    bench.commit()
    assert bench.scheduler.schedule() is None, "its last token is in flight"
    bench.commit()
    assert bench.roster.num_live == 0


def test_slots_are_announced_once_with_what_the_sampler_needs() -> None:
    bench = Bench(limits())
    bench.add(request("a", [2, 3, 4], seed=-1, stop_token_ids=(9,), max_tokens=20))
    schedule = bench.step()
    (params,) = schedule.new_slots
    assert params.slot == schedule.slots[0]
    assert params.seed == 2**64 - 1
    assert params.stop_ids == (1, 9)
    assert params.prompt_ids.tolist() == [2, 3, 4]
    assert params.output_ids.tolist() == []
    assert bench.step().new_slots == ()


def test_the_last_rank_is_put_back_and_resumes_with_its_outputs() -> None:
    bench = Bench(limits(num_pages=25, max_num_seqs=3))
    bench.add(long("a", 30), long("b", 30), long("low", 20, priority=1))
    while bench.roster.counters.num_preemptions == 0:
        bench.step()
    head = bench.roster.head()
    assert head is not None
    assert head.request.request_id == "low"
    outputs = len(head.ids) - 20
    assert outputs > 0
    while isinstance(head.state, PutBack):
        schedule = bench.step()
    resumed = next(params for params in schedule.new_slots if len(params.prompt_ids) == 20)
    assert resumed.output_ids.tolist() == [7] * outputs
    row = schedule.slots.tolist().index(resumed.slot)
    assert schedule.output_positions[row] == outputs


def test_a_put_back_sequence_finds_its_pages_if_nobody_took_them() -> None:
    driver = Driver(limits(num_pages=40, max_num_seqs=2), overlap=False)
    requests = [long("a", 60), long("b", 60)]
    driver.run(requests)
    driver.check(requests)
    assert driver.deltas["b"][-1].num_preemptions >= 1
    assert driver.deltas["a"][-1].num_preemptions == 0, "the first always gets on"
    assert driver.deltas["b"][-1].num_cached_tokens == 0, "what it computed itself is not reuse of its prompt"


def test_admission_leaves_a_page_for_each_that_decodes() -> None:
    bench = Bench(limits(num_pages=25, max_num_seqs=4))
    bench.add(long("a", 57))
    for _ in range(2):
        bench.step()
    assert bench.roster.table.num_available == 9
    bench.add(long("b", 36), long("c", 4))
    assert set(bench.lens(bench.step())) == {"a"}, "b would fill the pool; c does not pass it"
    assert bench.roster.counters.num_preemptions == 0


def test_admission_counts_cached_pages_it_would_bring_into_use() -> None:
    bench = Bench(limits(num_pages=25, max_num_seqs=4))
    bench.add(request("first", list(range(2, 42)), max_tokens=1))
    for _ in range(2):
        bench.step()
    bench.add(long("a", 44))
    for _ in range(2):
        bench.step()
    table = bench.roster.table
    assert (table.num_available, table.cache.num_idle) == (13, 10)
    bench.add(request("again", list(range(2, 52)), max_tokens=9))
    assert set(bench.lens(bench.step())) == {"a"}, "10 idle pages and 3 more would leave none for a"


def test_a_chunk_may_put_back_a_row_of_its_own_step() -> None:
    bench = Bench(limits(num_pages=40, max_num_seqs=3, max_num_batched_tokens=10))
    bench.add(long("low", 6, priority=1))
    bench.step()
    bench.add(long("a", 40))
    bench.step()
    pool = bench.roster.table.pool
    hidden = pool.take(pool.num_free)
    assert bench.lens(bench.step()) == {"a": 9}, "in the pages of low, whose row is gone"
    pool.give(hidden)
    assert bench.roster.counters.num_preemptions == 1
    assert bench.lens(bench.step()) == {"a": 10}


def test_nobody_is_admitted_in_a_step_that_puts_back() -> None:
    bench = Bench(limits(num_pages=40, max_num_seqs=2))
    bench.add(long("a", 8), long("low", 8, priority=1))
    bench.step()
    bench.add(request("tiny", [2, 3]))
    pool = bench.roster.table.pool
    hidden = pool.take(pool.num_free - 1)  # both decode into a new page now
    assert bench.lens(bench.step()) == {"a": 1}
    assert bench.lens(bench.step()) == {"a": 1, "tiny": 2}
    pool.give(hidden)


def test_a_long_prompt_that_waits_for_room_is_not_looked_up_in_every_step() -> None:
    bench = Bench(limits(num_pages=25, max_num_seqs=4))
    calls: list[int] = []
    cache, lookup = bench.roster.table.cache, bench.roster.table.cache.match

    def counting(ids: np.ndarray, salt: str | None, max_pages: int) -> np.ndarray:
        calls.append(len(ids))
        return lookup(ids, salt, max_pages)

    cache.match = counting
    bench.add(long("a", 40), long("b", 80))
    for _ in range(20):
        bench.step()
    assert calls.count(80) == 2


def test_chunks_are_scored_where_asked() -> None:
    bench = Bench(limits(max_num_batched_tokens=10))
    prompt = list(range(2, 23))
    bench.add(request("a", prompt, prompt_logprobs=1, max_tokens=3))
    (first,), (second,), third = [bench.schedule().prompt_scores for _ in range(3)]
    assert (first.row, first.start, first.target_ids.tolist()) == (0, 0, prompt[1:11])
    assert (second.row, second.start, second.target_ids.tolist()) == (0, 0, prompt[11:21])
    assert third == (), "the last prompt id has no next one"


def test_log_probabilities_are_asked_for_only_when_a_sampling_row_wants_them() -> None:
    bench = Bench(limits(max_num_batched_tokens=10))
    bench.add(request("plain", [2, 3], max_tokens=30, ignore_eos=True), request("asks", [4] * 12, logprobs=0))
    assert [bench.schedule().wants_logprobs for _ in range(2)] == [False, True]
