from __future__ import annotations

import gc
import queue
import threading
import weakref

import pytest

from tests.engine import builds
from tests.engine.drive import check_answer, mixed_requests
from tests.engine.fake import FakeRunner, limits, request
from tokenspeed.config import EngineConfig
from tokenspeed.engine.client import NO_STATS, Streams, ThreadEngine, check_request
from tokenspeed.types import EngineDead, EngineOutput, InvalidRequest, TokenDelta

CONFIG = EngineConfig()


def delta(name: str, *tokens: int, end: bool = False) -> TokenDelta:
    return TokenDelta(request_id=name, token_ids=tokens, finish_reason="stop" if end else None)


def test_streams_deliver_in_order_and_call_on_step_once() -> None:
    streams, told = Streams(), list[object]()
    streams.on_step = lambda: told.append("step")
    streams.open("a", told.append)
    streams.open("b", told.append)
    first, second, last = delta("b", 1), delta("a", 2), delta("a", 3, end=True)
    streams.deliver(EngineOutput([first, second, last, delta("unknown", 4)], NO_STATS))
    assert told == [first, second, last, "step"]
    assert len(streams) == 1
    streams.open("a", told.append)  # its id is free again


def test_streams_fail_ends_all_and_refuses_more() -> None:
    streams, told = Streams(), list[TokenDelta]()
    known: list[object] = []
    streams.open("a", lambda one: (told.append(one), known.append(streams.error)))
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        streams.open("a", told.append)
    cause = EngineDead("it burned")
    streams.fail(cause)
    assert [(one.request_id, one.finish_reason) for one in told] == [("a", "error")]
    assert known == [cause], "the cause is known before the stream ends"
    assert len(streams) == 0
    with pytest.raises(EngineDead, match="burned"):
        streams.open("b", told.append)
    streams.fail(EngineDead("later"))
    assert streams.error is cause


def test_stalled_only_while_someone_waits() -> None:
    streams = Streams()
    assert streams.stalled_seconds == 0.0
    streams.open("a", print)
    assert 0.0 < streams.stalled_seconds < 5.0
    streams.deliver(EngineOutput([delta("a", 1, end=True)], NO_STATS))
    assert streams.stalled_seconds == 0.0


@pytest.mark.parametrize(("length", "max_tokens", "fits"), [(0, 5, False), (1, 5, True), (95, 5, True), (96, 5, False)])
def test_check_request(length: int, max_tokens: int, fits: bool) -> None:
    one = request("a", [2] * length, max_tokens=max_tokens)
    if fits:
        check_request(one, limits())
    else:
        with pytest.raises(InvalidRequest):
            check_request(one, limits())


def test_a_prompt_to_score_may_fill_the_context() -> None:
    check_request(request("a", [2] * 96, max_tokens=0, prompt_logprobs=1), limits())
    with pytest.raises(InvalidRequest, match="97 input tokens") as caught:
        check_request(request("a", [2] * 97, max_tokens=0, prompt_logprobs=1), limits())
    assert caught.value.code == "context_length_exceeded"


def test_thread_engine_serves_requests_of_many_threads() -> None:
    client = ThreadEngine(FakeRunner(limits(num_pages=60)), CONFIG)
    requests = mixed_requests(32, 4, 96)
    streams = {one.request_id: queue.SimpleQueue[TokenDelta]() for one in requests}

    def add(some: slice) -> None:
        for one in requests[some]:
            client.add(one, streams[one.request_id].put)

    threads = [threading.Thread(target=add, args=(slice(k, None, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for one in requests:
        deltas = [streams[one.request_id].get(timeout=20)]
        while deltas[-1].finish_reason is None:
            deltas.append(streams[one.request_id].get(timeout=20))
        check_answer(one, deltas, 96)
    assert client.healthy
    assert client.num_unfinished == 0
    assert client.stats().num_steps > 0
    assert client.facts == {"device": "fake"}
    client.close()
    assert not client.healthy


def test_close_aborts_what_runs_and_drops_the_runner() -> None:
    runner = builds.SlowRunner(limits(num_pages=2001, max_model_len=8000))
    gone = weakref.ref(runner)
    client, stream = ThreadEngine(runner, CONFIG), queue.SimpleQueue[TokenDelta]()
    client.add(request("a", [2], max_tokens=5000, ignore_eos=True), stream.put)
    stream.get(timeout=20)
    client.close()
    client.close()
    while (last := stream.get(timeout=20)).finish_reason is None:
        pass
    assert last.finish_reason == "abort"
    with pytest.raises(EngineDead, match="closed"):
        client.add(request("b", [2]), stream.put)
    client.abort("a")
    del runner
    gc.collect()
    assert gone() is None


def test_an_engine_that_fails_tells_every_stream() -> None:
    client, stream = ThreadEngine(FakeRunner(limits(), fail_at=3), CONFIG), queue.SimpleQueue[TokenDelta]()
    client.add(request("a", [2], max_tokens=50, ignore_eos=True), stream.put)
    while (last := stream.get(timeout=20)).finish_reason is None:
        pass
    assert last.finish_reason == "error"
    assert "on fire" in str(client.error)
    assert not client.healthy
    client.close()
