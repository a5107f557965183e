"""The application: its routes, who may use them, and what is answered where there is none."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.server.endpoint import Answer, PostEndpoint
from tokenspeed.server.errors import HttpError, error_response
from tokenspeed.server.limits import Guard
from tokenspeed.server.metrics import CONTENT_TYPE
from tokenspeed.server.openai.chat import answer_chat
from tokenspeed.server.openai.completions import answer_completion
from tokenspeed.server.openai.models import list_models, retrieve_model
from tokenspeed.server.openai.tokenize import answer_detokenize, answer_tokenize
from tokenspeed.server.state import ServerState
from tokenspeed.types import InvalidRequest, TokenspeedError

ABSENT: dict[str, str] = {
    "/v1/embeddings": "does not support embeddings",
    "/v1/rerank": "does not rerank",
    "/v1/score": "does not score pairs of texts",
    "/pooling": "does not pool",
    "/classify": "does not classify",
    "/v1/moderations": "does not moderate",
    "/v1/audio/speech": "does not speak",
    "/v1/audio/transcriptions": "does not transcribe",
    "/v1/audio/translations": "does not translate speech",
    "/v1/images/generations": "does not draw",
    "/v1/images/edits": "does not draw",
    "/v1/responses": "is not served over this API; use /v1/chat/completions",
    "/v1/messages": "is not served over this API; use /v1/chat/completions",
    "/v1/messages/count_tokens": "is not served over this API; use /tokenize",
}
"""Routes of other servers that are refused by name, and what the model here is said not to do."""

ANSWERS: dict[str, Answer] = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
    "/tokenize": answer_tokenize,
    "/v1/tokenize": answer_tokenize,
    "/detokenize": answer_detokenize,
    "/v1/detokenize": answer_detokenize,
}
"""What is posted where."""

Get = Callable[[ServerState, Request], Response]


def create_app(state: ServerState) -> ASGIApp:
    """The server as an ASGI application. It answers 503 until `state.serve` is called."""
    config = state.config
    app = Starlette(
        routes=_routes(state),
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
            )
        ],
        exception_handlers={TokenspeedError: _on_failure, HTTPException: _on_http_exception},
    )
    app.router.redirect_slashes = False
    return _RequestIds(app) if config.enable_request_id_headers else app


def _routes(state: ServerState) -> list[BaseRoute]:
    keys = state.config.api_keys

    def guarded(path: str, endpoint: ASGIApp, method: str) -> Route:
        return Route(path, Guard(endpoint, keys) if keys else endpoint, methods=[method])

    return [
        Route("/health", _Get(state, _health), methods=["GET"]),
        Route("/ping", _Get(state, _health), methods=["GET"]),
        Route("/version", _Get(state, _version), methods=["GET"]),
        Route("/metrics", _Get(state, _metrics), methods=["GET"]),
        guarded("/load", _Get(state, _load), "GET"),
        guarded("/v1/models", _Get(state, list_models), "GET"),
        guarded("/v1/models/{model:path}", _Get(state, retrieve_model), "GET"),
        *(guarded(path, PostEndpoint(state, answer), "POST") for path, answer in ANSWERS.items()),
        *(guarded(path, _Absent(state, what), "POST") for path, what in ABSENT.items()),
    ]


class _Get:
    """A route that only looks, as an ASGI application."""

    def __init__(self, state: ServerState, answer: Get) -> None:
        self._state = state
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(self._state, Request(scope))(scope, receive, send)


class _Absent:
    """A route of other servers that is refused by name, as an ASGI application."""

    def __init__(self, state: ServerState, what: str) -> None:
        self._sentence = f"The model `{state.names[0]}` {what}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise InvalidRequest(self._sentence, code="not_supported")


def _health(state: ServerState, request: Request) -> Response:
    state.check_health()
    return JSONResponse({"status": "ok"})


def _version(state: ServerState, request: Request) -> Response:
    return JSONResponse({"version": __version__})


def _load(state: ServerState, request: Request) -> Response:
    return JSONResponse({"server_load": state.engine.num_unfinished})


def _metrics(state: ServerState, request: Request) -> Response:
    metrics = state.metrics
    return Response(metrics.exposition() if metrics else b"", headers={"content-type": CONTENT_TYPE})


def _on_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenspeedError)
    return error_response(error)


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "Not found", 405: "Method not allowed"}.get(error.status_code, error.detail)
    message = f"{what}: {request.method} {request.url.path}"
    return error_response(HttpError(error.status_code, message, headers=error.headers))


class _RequestIds:
    """Names each request that has no `X-Request-Id`, and sends the name back, as an ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = Headers(scope=scope).get("x-request-id", "")
        if not name:
            name = uuid.uuid4().hex
            scope["headers"] = [*scope["headers"], (b"x-request-id", name.encode())]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, send_named)
