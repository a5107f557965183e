from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tokenspeed.server.errors import HttpError
from tokenspeed.server.sse import DONE, PING, EventStream, event

Source = Callable[[], AsyncGenerator[bytes]]


def run(source: Source, keep_alive: float = 0.0) -> list[dict[str, Any]]:
    """The messages that a stream sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(EventStream(source(), keep_alive)({}, receive, send))
    return sent


def bodies(sent: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in sent[1:]]


def test_events_then_done() -> None:
    async def source() -> AsyncGenerator[bytes]:
        yield event(b"1")
        yield b""
        yield event(b"2")

    sent = run(source)
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert bodies(sent) == [b"data: 1\n\n", b"data: 2\n\n", DONE]
    assert [message["more_body"] for message in sent[1:]] == [True, True, False]


def test_failure_before_the_first_event_is_raised() -> None:
    async def source() -> AsyncGenerator[bytes]:
        raise HttpError(400, "no")
        yield b""

    with pytest.raises(HttpError, match="no"):
        run(source)


def test_failure_after_it_is_an_event() -> None:
    async def source() -> AsyncGenerator[bytes]:
        yield event(b"1")
        raise HttpError(503, "the engine stopped", code="engine_dead")

    first, error, done = bodies(run(source))
    assert first == b"data: 1\n\n"
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    assert done == DONE


def test_a_bug_is_an_event_that_tells_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    async def source() -> AsyncGenerator[bytes]:
        yield event(b"1")
        raise KeyError("secret")

    error = bodies(run(source))[1]
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert b"secret" not in error
    assert "secret" in caplog.text


def test_silence_is_filled_with_comments() -> None:
    async def source() -> AsyncGenerator[bytes]:
        await asyncio.sleep(0.1)
        yield event(b"1")

    sent = bodies(run(source, keep_alive=0.03))
    assert sent[-2:] == [b"data: 1\n\n", DONE]
    assert 2 <= sent.count(PING) <= 3
    assert sent.index(b"data: 1\n\n") == sent.count(PING)


def test_no_comments_while_it_speaks() -> None:
    async def source() -> AsyncGenerator[bytes]:
        for _ in range(10):
            await asyncio.sleep(0.01)
            yield event(b"1")

    assert PING not in bodies(run(source, keep_alive=0.06))


def test_the_source_is_closed_when_the_client_leaves() -> None:
    closed = False

    async def source() -> AsyncGenerator[bytes]:
        nonlocal closed
        try:
            while True:
                yield event(b"1")
        finally:
            closed = True

    async def send(message: Any) -> None:
        await asyncio.sleep(0.01)

    async def main() -> None:
        task = asyncio.create_task(EventStream(source(), 0.0)({}, send, send))  # pyright: ignore[reportArgumentType]
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait((task,))
        assert closed

    asyncio.run(main())
