"""A POST route: reads and decodes the body, answers it, and stops all work the moment its client goes away."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.server.body import ClientDisconnect, JsonBody, read_body
from tokenspeed.server.errors import HttpError, error_response
from tokenspeed.server.state import ServerState
from tokenspeed.types import TokenspeedError

MAX_NAMED_FIELDS = 32
"""Most unknown fields that a response names."""

MAX_FIELD_NAME = 64
"""As much of an unknown field's name is told, in characters."""

MAX_REQUEST_ID = 256
"""Longest `X-Request-Id` that is taken over, in characters."""

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """One request for an answer.

    Attributes:
      body: its JSON.
      client_id: the client's `X-Request-Id`. Two calls that live at the same time may bring the same.
      own_id: this call's own, unique.
      arrival_time: `time.time()`, seconds.
    """

    body: JsonBody
    client_id: str | None
    own_id: str
    arrival_time: float


Answer = Callable[[ServerState, Call], ASGIApp]
"""Turns a call into something that sends the response. It computes and does not wait, for it may run in a thread."""


def json_response(value: msgspec.Struct) -> Response:
    """A struct as a whole response."""
    return Response(msgspec.json.encode(value), media_type="application/json")


class PostEndpoint:
    """A route that takes JSON, as an ASGI application."""

    def __init__(self, state: ServerState, answer: Answer) -> None:
        self._state = state
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except ClientDisconnect:
            return
        except TokenspeedError as error:
            await error_response(error)(scope, receive, send)
        except Exception:
            logger.exception("%s failed", scope["path"])
            failure = HttpError(500, "The server failed to answer; its log says why", code="internal_error")
            await error_response(failure)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_time = time.time()
        headers = Headers(scope=scope)
        _check_content_type(headers.get("content-type", ""))
        data = await read_body(receive, headers, self._state.config.max_body_bytes)
        client_id = headers.get("x-request-id", "")[:MAX_REQUEST_ID] or None

        async def work() -> None:
            app, ignored = await self._state.run_text(len(data), lambda: self._prepare(data, client_id, arrival_time))
            self._state.note_ignored(ignored)
            await app(scope, receive, _naming(ignored, send) if ignored else send)

        await until_disconnect(receive, work())

    def _prepare(self, data: bytes, client_id: str | None, arrival_time: float) -> tuple[ASGIApp, list[str]]:
        body = JsonBody(data)
        app = self._answer(self._state, Call(body, client_id, uuid.uuid4().hex, arrival_time))
        return app, body.ignored


def _check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise HttpError(400, f"Content-Type must be application/json, got {kind}")


def _naming(ignored: list[str], send: Send) -> Send:
    """`send`, with the header that names the fields nobody knew."""
    # A name may hold anything, line breaks too: what is no plain character is escaped as in a URL.
    names = [quote(name[:MAX_FIELD_NAME]) for name in ignored[:MAX_NAMED_FIELDS]]
    value = ", ".join(names).encode()

    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-ignored-fields", value)]
        await send(message)

    return send_with_header


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it if the client goes away first; returns when it has ended."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
