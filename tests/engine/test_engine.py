from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.drive import Driver, check_answer, check_pages, mixed_requests, random_prefixes, random_request
from tests.engine.fake import EOS, FakeRunner, FakeStep, continuation, limits, request
from tokenspeed.config import EngineConfig
from tokenspeed.engine.engine import EngineCore
from tokenspeed.engine.lifecycle import Decoding, Prefilling, PutBack, Queued
from tokenspeed.types import EngineDead, EngineOutput, Request, Schedule, StepResult

TINY_POOL = 25
"""Pages of 4 that hold one sequence of 96 tokens, and scratch."""

quick = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_pages", [TINY_POOL, 400])
def test_a_batch_says_what_each_request_says_alone(overlap: bool, prefix_caching: bool, num_pages: int) -> None:
    sizes = limits(num_pages=num_pages)
    for seed in range(3):
        requests = mixed_requests(24, seed, sizes.max_model_len)
        driver = Driver(sizes, overlap=overlap, prefix_caching=prefix_caching, seed=seed)
        driver.run(requests, spread=30)
        driver.check(requests)
    # The oracle is no use where nothing was put to the test.
    assert (driver.stats[-1].num_preemptions > 0) == (num_pages == TINY_POOL)
    assert (driver.stats[-1].prefix_hits > 0) == prefix_caching


@quick
@given(
    seed=st.integers(0, 10**6),
    num_pages=st.integers(TINY_POOL, 80),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(9, 40),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
    eagerness=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_sizes_give_the_same_tokens(
    seed: int, num_pages: int, max_num_seqs: int, budget: int, overlap: bool, prefix_caching: bool, eagerness: float
) -> None:
    sizes = limits(num_pages=num_pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    requests = mixed_requests(12, seed, sizes.max_model_len)
    driver = Driver(sizes, overlap=overlap, prefix_caching=prefix_caching, eagerness=eagerness, seed=seed)
    driver.run(requests, spread=20)
    driver.check(requests)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, are aborted and end in any order, in a pool too small for them."""

    @initialize(seed=st.integers(0, 10**6), num_pages=st.integers(TINY_POOL, 60), overlap=st.booleans())
    def start(self, seed: int, num_pages: int, overlap: bool) -> None:
        self.rng = random.Random(seed)
        self.prefixes = random_prefixes(self.rng)
        self.driver = Driver(limits(num_pages=num_pages), overlap=overlap, seed=seed)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @precondition(lambda self: len(self.requests) < 20)
    @rule()
    def add(self) -> None:
        one = random_request(f"r{len(self.requests)}", self.rng, self.prefixes, 96)
        self.requests[one.request_id] = one
        self.driver.add(one)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.driver.core.abort(name)

    @precondition(lambda self: self.driver.roster.num_running)
    @rule()
    def put_back_the_last(self) -> None:
        self.driver.roster.put_back(self.driver.roster.lowest())

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.core.step()

    @invariant()
    def pages_have_one_owner(self) -> None:
        check_pages(self.driver.roster.table, self.driver.limits)

    def teardown(self) -> None:
        self.driver.finish()
        self.driver.check_empty()
        for name, one in self.requests.items():
            deltas = self.driver.deltas[name]
            if deltas[-1].finish_reason != "abort":
                check_answer(one, deltas, 96)
            else:
                assert name in self.aborted
                assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
                told = self.driver.tokens(name)
                assert told == continuation(one, 96)[0][: len(told)]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(quick, max_examples=30, stateful_step_count=40)


def state_of(driver: Driver, name: str) -> object:
    sequence = driver.roster.find(name)
    return None if sequence is None else sequence.state


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("state", [Queued, Prefilling, Decoding, PutBack])
def test_abort_in_every_state_releases_everything(state: type, overlap: bool) -> None:
    sizes = limits(num_pages=TINY_POOL, max_num_seqs=3)
    driver = Driver(sizes, overlap=overlap, eagerness=0.0)
    requests = [request(f"r{k}", [k + 2] * 33, max_tokens=50, ignore_eos=True) for k in range(4)]
    for one in requests:
        driver.add(one)
    for _ in range(200):
        victims = [one.request_id for one in requests if isinstance(state_of(driver, one.request_id), state)]
        if victims:
            break
        driver.core.step()
    assert victims
    driver.core.abort(victims[-1])
    driver.core.step()
    last = driver.deltas[victims[-1]][-1]
    assert (last.finish_reason, last.token_ids) == ("abort", ())
    assert state_of(driver, victims[-1]) is None
    driver.finish()
    driver.check_empty()
    for one in requests:
        if one.request_id != victims[-1]:
            check_answer(one, driver.deltas[one.request_id], sizes.max_model_len)


def test_abort_of_an_unknown_or_finished_request_says_nothing() -> None:
    driver = Driver(limits())
    driver.run([request("a", [2, 3])])
    told = len(driver.deltas["a"])
    driver.core.abort("a")
    driver.core.abort("nobody")
    driver.core.step()
    assert len(driver.deltas["a"]) == told


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_put_back_at_any_point_changes_nothing(overlap: bool, prefix_caching: bool) -> None:
    sizes = limits(max_num_batched_tokens=8, max_num_seqs=4)
    requests = [
        request("scored", list(range(2, 45)), max_tokens=0, prompt_logprobs=2),
        request("continued", list(range(3, 45)), max_tokens=9, prompt_logprobs=0, logprobs=1, ignore_eos=True),
        request("plain", list(range(4, 45)), max_tokens=9, min_tokens=4),
    ]
    for when in range(1, 20, 3):
        for victim in requests:
            driver = Driver(sizes, overlap=overlap, prefix_caching=prefix_caching)
            for one in requests:
                driver.add(one)
            for _ in range(when):
                driver.core.step()
            sequence = driver.roster.find(victim.request_id)
            if sequence is not None and isinstance(sequence.state, Prefilling | Decoding):
                driver.roster.put_back(sequence)
            driver.finish()
            driver.check(requests)


@pytest.mark.parametrize("overlap", [True, False])
def test_ends_are_exact(overlap: bool) -> None:
    """Length at max_tokens and at the context's end, a stop id from min_tokens on, and its id told."""
    sizes = limits()
    free = request("free", [7, 8, 9], max_tokens=30, ignore_eos=True)
    outputs, _ = continuation(free, sizes.max_model_len)
    stop_id = outputs[9]
    first = outputs.index(stop_id)
    requests = [
        free,
        request("stop", [7, 8, 9], max_tokens=30, ignore_eos=True, stop_token_ids=(stop_id,)),
        request("stop at the last", [7, 8, 9], max_tokens=first + 1, ignore_eos=True, stop_token_ids=(stop_id,)),
        request("min", [7, 8, 9], max_tokens=30, min_tokens=first + 2, stop_token_ids=(stop_id,)),
        request("context", [5] * 90, max_tokens=None, ignore_eos=True),
        request("last place", [5] * 95, max_tokens=None, ignore_eos=True),
        request("eos as a stop id", [7, 8, 9], max_tokens=60, stop_token_ids=(EOS,)),
        request("eos ignored as a stop id", [7, 8, 9], max_tokens=60, ignore_eos=True, stop_token_ids=(EOS,)),
    ]
    driver = Driver(sizes, overlap=overlap)
    driver.run(requests)
    driver.check(requests)
    told = {one.request_id: driver.deltas[one.request_id][-1] for one in requests}
    assert len(driver.tokens("free")) == 30
    assert (told["stop"].finish_reason, told["stop"].stop_token_id) == ("stop", stop_id)
    assert driver.tokens("stop") == outputs[: first + 1]
    assert told["stop at the last"].finish_reason == "stop"
    assert len(driver.tokens("min")) >= first + 2
    assert len(driver.tokens("context")) == 6
    assert len(driver.tokens("last place")) == 1
    assert told["context"].finish_reason == told["last place"].finish_reason == "length"
    assert driver.tokens("eos as a stop id")[-1] == EOS
    assert told["eos as a stop id"].stop_token_id is None
    assert told["eos ignored as a stop id"].stop_token_id == EOS


def test_a_returning_conversation_reuses_prompt_and_output() -> None:
    sizes = limits()
    driver = Driver(sizes)
    first = request("first", list(range(2, 23)), max_tokens=14, ignore_eos=True)
    driver.run([first])
    history = [*first.prompt_ids, *driver.tokens("first")]
    assert len(history) == 35
    again = request("again", [*history, 9, 9], max_tokens=3)
    same = request("same", history[:32], max_tokens=3)
    salted = request("salted", history, max_tokens=3, salt="tenant")
    driver.run([again])
    driver.run([same, salted])
    driver.check([first, again, same, salted])
    # The keys and values of the last output were never computed: 34 of 35 tokens are in the cache, 8 full pages.
    assert driver.deltas["again"][0].num_cached_tokens == 32
    assert driver.deltas["same"][0].num_cached_tokens == 28, "the last prompt token is always computed again"
    assert driver.deltas["salted"][0].num_cached_tokens == 0
    assert driver.stats[-1].prefix_hits == 60
    assert driver.stats[-1].prefix_queries == 21 + 37 + 32 + 35


def test_prompt_scores_do_not_read_the_cache_but_fill_it() -> None:
    driver = Driver(limits())
    prompt = list(range(2, 42))
    requests = [
        request("fill", prompt, max_tokens=2),
        request("scored", prompt, max_tokens=0, prompt_logprobs=3),
        request("scored and continued", prompt, max_tokens=4, prompt_logprobs=0, logprobs=2),
        request("one token", [3], max_tokens=0, prompt_logprobs=1),
    ]
    for one in requests:
        driver.run([one])
    driver.check(requests)
    assert driver.deltas["scored"][0].num_cached_tokens == 0
    assert driver.tokens("scored") == []
    assert len(driver.deltas["scored"][0].prompt_logprobs or ()) == 40
    assert driver.deltas["one token"][0].prompt_logprobs == (None,)


def test_equal_prompts_side_by_side_share_pages_once_committed() -> None:
    sizes = limits(num_pages=200, max_num_batched_tokens=64)
    driver = Driver(sizes, overlap=False)
    requests = [request(f"r{k}", list(range(2, 18)), max_tokens=8, seed=k, ignore_eos=True) for k in range(4)]
    for one in requests:
        driver.add(one)
    driver.core.step()
    # Each computed its own 4 pages in the same step; after the commit one copy is left.
    assert driver.runner.schedules[0].num_tokens == 64
    assert driver.stats[-1].num_pages_used == 4
    check_pages(driver.roster.table, sizes)
    driver.finish()
    driver.check(requests)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_stalls_no_stream(overlap: bool) -> None:
    sizes = limits(num_pages=400, max_num_batched_tokens=16, max_model_len=400)
    driver = Driver(sizes, overlap=overlap)
    stream = request("stream", [2, 3, 4], max_tokens=60, ignore_eos=True)
    driver.add(stream)
    for _ in range(3):
        driver.core.step()
    told, before = len(driver.tokens("stream")), len(driver.runner.schedules)
    driver.add(request("long", list(range(2, 52)) * 6, max_tokens=1))
    driver.finish()
    chunks = [step for step in driver.runner.schedules[before:] if step.num_tokens > step.num_rows]
    assert len(chunks) == 20
    assert all(step.num_tokens == 16 and step.token_ids[0] == -1 for step in chunks), "each holds the stream's token"
    per_step = [delta for delta in driver.deltas["stream"][told:]]
    assert all(len(delta.token_ids) == 1 for delta in per_step)


class Recorder:
    """A runner that notes when steps are dispatched and read."""

    def __init__(self) -> None:
        self.inner = FakeRunner(limits(), eagerness=0.0)
        self.events: list[tuple[str, int]] = []
        self.limits, self.facts, self.num_compiles = self.inner.limits, {}, 0

    def dispatch(self, schedule: Schedule) -> RecordedStep:
        self.events.append(("dispatch", schedule.step_id))
        return RecordedStep(self, self.inner.dispatch(schedule))

    def padded_tokens(self, schedule: Schedule) -> int:
        return schedule.num_tokens


class RecordedStep:
    def __init__(self, runner: Recorder, step: FakeStep) -> None:
        self.runner, self.step = runner, step

    def result(self) -> StepResult:
        self.runner.events.append(("read", self.step.schedule.step_id))
        return self.step.result()


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_step_is_dispatched_before_the_last_is_read(overlap: bool) -> None:
    runner = Recorder()
    outputs: list[EngineOutput] = []
    core = EngineCore(runner, EngineConfig(overlap=overlap), outputs.append)
    core.add(request("a", [2, 3], max_tokens=3, ignore_eos=True), np.array([2, 3], np.int32))
    while not core.idle or not outputs:
        core.step()
    d, r = "dispatch", "read"
    if overlap:  # and none is dispatched after the one that reaches max_tokens
        assert runner.events == [(d, 0), (d, 1), (r, 0), (d, 2), (r, 1), (r, 2)]
    else:
        assert runner.events == [(d, 0), (r, 0), (d, 1), (r, 1), (d, 2), (r, 2)]
    assert [len(output.deltas) for output in outputs] == [1, 1, 1], "one message a step"


def test_stopping_leaves_no_step_in_flight() -> None:
    runner = Recorder()
    core = EngineCore(runner, EngineConfig(), lambda output: None)
    core.add(request("a", [2, 3], max_tokens=9, ignore_eos=True), np.array([2, 3], np.int32))
    assert core.step()
    core.stop()
    assert not core.step()
    assert runner.events == [("dispatch", 0), ("read", 0)]


def test_stats_tell_the_state() -> None:
    driver = Driver(limits(max_num_seqs=2), overlap=False)
    for k in range(3):
        driver.add(request(f"r{k}", [k + 2] * 9, max_tokens=3, ignore_eos=True))
    driver.core.step()
    stats = driver.stats[-1]
    assert (stats.num_running, stats.num_waiting, stats.num_pages, stats.num_pages_used) == (2, 1, 199, 6)
    assert (stats.num_steps, stats.step_tokens, stats.step_padding) == (1, 18, 14)
    assert stats.step_seconds > 0
    assert abs(stats.time - time.time()) < 60
    driver.finish()
    stats = driver.stats[-1]
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


def test_seeds_are_drawn_for_requests_without_one() -> None:
    driver = Driver(limits())
    for name in "ab":
        driver.add(request(name, [4, 5, 6], max_tokens=20, seed=None, ignore_eos=True))
    driver.finish()
    assert driver.tokens("a") != driver.tokens("b")
    again = Driver(limits())
    again.add(request("c", [4, 5, 6], max_tokens=20, seed=None, ignore_eos=True))
    again.finish()
    assert again.tokens("c") == driver.tokens("a"), "drawn from the engine's seed"


class Running:
    """An EngineCore in a thread."""

    def __init__(self, runner: FakeRunner) -> None:
        self.outputs: list[EngineOutput] = []
        self.error: EngineDead | None = None
        self.core = EngineCore(runner, EngineConfig(), self.outputs.append)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.core.run()
        except EngineDead as error:
            self.error = error

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(self.outputs) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_idle_waits_without_spinning_and_stop_aborts_what_runs() -> None:
    running = Running(FakeRunner(limits(max_model_len=790, num_pages=400)))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    assert running.outputs == []
    running.core.add(request("a", [2, 3], max_tokens=700, ignore_eos=True), np.array([2, 3], np.int32))
    running.wait_for(3)
    running.core.stop()
    running.thread.join(20)
    assert not running.thread.is_alive()
    assert running.error is None
    last = running.outputs[-1].deltas[-1]
    assert (last.request_id, last.finish_reason) == ("a", "abort")


def test_a_failing_step_ends_the_engine_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    running = Running(FakeRunner(limits(), fail_at=2))
    running.core.add(request("a", [2, 3], ignore_eos=True), np.array([2, 3], np.int32))
    running.thread.join(20)
    assert not running.thread.is_alive()
    assert isinstance(running.error, EngineDead)
    assert "RuntimeError: the fake device is on fire" in str(running.error)
    assert isinstance(running.error.__cause__, RuntimeError)
    assert "the engine stopped" in caplog.text
