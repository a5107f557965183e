"""Server-sent events: framing, headers, keep-alive, and errors before and after the first event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

from tokenspeed.server.errors import HttpError, error_json
from tokenspeed.types import TokenspeedError

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

logger = logging.getLogger(__name__)


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """A response of server-sent events, ended by `[DONE]`.

    The status is sent with the first event, so what fails before it is raised and answered with a status of its own.
    What fails later becomes a last event that holds the error. A reader that stalls stops `events` from being asked
    for more.

    Args:
      events: whole events, any number an item.
      keep_alive: seconds of silence after which a comment is sent (the first sends the status too); 0: never.
    """

    def __init__(self, events: AsyncGenerator[bytes], keep_alive: float) -> None:
        self._events = events
        self._keep_alive = keep_alive
        self._started = False
        self._sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            try:
                async with self._pings(send):
                    async for data in events:
                        if data:
                            await self._send(send, data)
            except TokenspeedError as error:
                await self._fail(send, error)
            except Exception:
                logger.exception("a stream failed")
                await self._fail(send, HttpError(500, "The server failed while it answered", code="internal_error"))
        await self._start(send)
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _fail(self, send: Send, error: TokenspeedError) -> None:
        if not self._started:
            raise error
        await self._send(send, event(error_json(error)))

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent = True
        await self._start(send)
        await send({"type": "http.response.body", "body": data, "more_body": True})

    @contextlib.asynccontextmanager
    async def _pings(self, send: Send) -> AsyncGenerator[None]:
        if not self._keep_alive:
            yield
            return
        task = asyncio.create_task(self._ping_when_idle(send))
        try:
            yield
        finally:
            task.cancel()

    async def _ping_when_idle(self, send: Send) -> None:
        while True:
            self._sent = False
            await asyncio.sleep(self._keep_alive)
            if not self._sent:
                await self._send(send, PING)
