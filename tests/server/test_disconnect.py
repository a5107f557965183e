"""A client that goes away stops its work within a second, whatever state it is in."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from itertools import repeat

import pytest

from tests.server.fake import LIMITS, Script, ScriptTokenizer
from tests.server.serving import Server, eventually, serving
from tokenspeed.server import generation

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hi", "max_tokens": 100_000, "seed": 1}
ROOMY = LIMITS._replace(max_model_len=1_000_000, num_pages=1_000_000)


def endless(tokenizer: ScriptTokenizer) -> Script:
    return lambda request: repeat(ord("x"))


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(script=endless, delay=0.002, limits=ROOMY) as running:
        yield running


def gone(server: Server, count: int = 1) -> None:
    """Waits until the engine holds nothing and `count` aborts are counted."""
    eventually(lambda: server.engine.num_unfinished == 0)
    eventually(lambda: server.metric("request_success_total", finished_reason="abort") == count)
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0
    assert len(server.engine.aborted) == count


def added(server: Server, count: int = 1) -> None:
    eventually(lambda: len(server.engine.requests) == count)


@pytest.mark.parametrize("stream", [True, False])
def test_queued(server: Server, stream: bool) -> None:
    server.engine.open.clear()
    connection = server.connect(COMPLETIONS, {**LONG, "stream": stream})
    added(server)
    connection.close()
    gone(server)


def test_streaming(server: Server) -> None:
    connection = server.connect(COMPLETIONS, {**LONG, "stream": True})
    received = b""
    while received.count(b"data: ") < 5:
        received += connection.recv(1000)
    connection.close()
    gone(server)


def test_generating_a_whole_answer(server: Server) -> None:
    connection = server.connect(COMPLETIONS, LONG)
    eventually(lambda: server.metric("generation_tokens_total") > 5)
    connection.close()
    gone(server)


@pytest.mark.parametrize("stream", [True, False])
def test_several_samples_and_prompts(server: Server, stream: bool) -> None:
    connection = server.connect(COMPLETIONS, {**LONG, "prompt": ["a", "b"], "n": 4, "stream": stream})
    added(server, 8)
    connection.close()
    gone(server, 8)


def stalled(server: Server) -> socket.socket:
    """A connection whose client reads nothing of a stream that soon fills all buffers."""
    connection = server.connect(COMPLETIONS, {**LONG, "stream": True, "logprobs": 1}, receive_buffer=4096)
    added(server)
    return connection


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(generation, "MAX_UNREAD_TOKENS", 2000)
    with serving(script=endless, group=50, delay=0.002, limits=ROOMY, send_buffer=16384) as running:
        yield running


def test_a_stalled_reader_leaves(fast: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []

    def put(self: generation.Generation, pieces: list[generation.Piece]) -> None:
        keep(self, pieces)
        waiting.append(len(self._pieces))

    keep = generation.Generation.put
    monkeypatch.setattr(generation.Generation, "put", put)
    connection = stalled(fast)
    eventually(lambda: waiting[-1:] > [10], 5)
    connection.close()
    gone(fast)


def test_a_reader_that_only_stalls_is_bounded(fast: Server) -> None:
    connection = stalled(fast)
    eventually(lambda: fast.engine.num_unfinished == 0, 10)
    assert len(fast.engine.aborted) == 1
    received = b""
    with connection:
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
    assert b'"code":"slow_reader"' in received[-1000:]
    assert b"data: [DONE]" in received[-100:]


def test_while_it_sends_its_request(server: Server) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    connection.close()
    assert server.complete(max_tokens=1)


def test_many_leave_nothing_behind(server: Server) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    server.complete(max_tokens=1)
    before, threads = files(), threading.active_count()
    for k in range(100):
        with server.connect(COMPLETIONS, {**LONG, "stream": bool(k % 2)}) as connection:
            if k % 4 == 1:
                connection.recv(1)
    eventually(lambda: server.engine.num_unfinished == 0)
    eventually(lambda: files() <= before)
    assert threading.active_count() <= threads
