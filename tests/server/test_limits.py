from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenspeed.server.errors import HttpError
from tokenspeed.server.limits import Guard


def opens(*headers: tuple[bytes, bytes]) -> bool:
    """Whether these headers open a server of two keys."""
    served = False

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal served
        served = True

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    try:
        asyncio.run(Guard(app, ("key-one", "schl\u00fcssel"))({"type": "http", "headers": headers}, nothing, nothing))
    except HttpError as error:
        return error.status != 401
    return served


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", b"Bearer key-one"),
        (b"authorization", b"bearer  key-one "),
        (b"authorization", "Bearer schl\u00fcssel".encode()),
        (b"x-api-key", b"key-one"),
    ],
)
def test_opens(header: tuple[bytes, bytes]) -> None:
    assert opens(header)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer key")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"key-one")],
        [(b"authorization", b"Basic key-one")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer key-one")],
    ],
)
def test_stays_closed(headers: list[tuple[bytes, bytes]]) -> None:
    assert not opens(*headers)


def test_one_right_key_is_enough() -> None:
    assert opens((b"authorization", b"Bearer wrong"), (b"x-api-key", b"key-one"))
