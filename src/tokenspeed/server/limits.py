"""Who may ask: API keys."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.server.errors import HttpError


class Guard:
    """An application behind API keys, of which any opens it.

    Both `Authorization: Bearer KEY` and `x-api-key: KEY` are read. Every key is compared, each in constant time, so
    that the time tells nothing. Without one of them HttpError 401 is raised.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check(Headers(scope=scope))
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "").encode("latin-1")]
        if scheme.lower() == "bearer":
            offered.append(bearer.strip().encode("latin-1"))
        # A list, not a generator: `any` must not stop at the first match.
        if not any([hmac.compare_digest(key, offer) for key in self._keys for offer in offered]):
            raise HttpError(
                401,
                "Incorrect or missing API key; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
