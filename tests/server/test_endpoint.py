from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokenspeed.server.endpoint import until_disconnect


async def never() -> Any:
    await asyncio.sleep(60)


async def gone() -> Any:
    return {"type": "http.disconnect"}


class Work:
    """Something that takes a while, and is told when it is stopped."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self.stopped = self.finished = False
        self._seconds = seconds
        self._error = error

    async def run(self) -> None:
        try:
            await asyncio.sleep(self._seconds)
            if self._error is not None:
                raise self._error
            self.finished = True
        except asyncio.CancelledError:
            self.stopped = True
            raise


def test_work_that_ends() -> None:
    work = Work(0.01)
    asyncio.run(until_disconnect(never, work.run()))
    assert work.finished


def test_work_that_fails() -> None:
    with pytest.raises(KeyError):
        asyncio.run(until_disconnect(never, Work(0.01, KeyError("x")).run()))


def test_a_client_that_leaves() -> None:
    work = Work(60)
    asyncio.run(until_disconnect(gone, work.run()))
    assert work.stopped


def test_a_server_that_stops() -> None:
    work = Work(60)

    async def main() -> None:
        task = asyncio.create_task(until_disconnect(never, work.run()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,))
        assert work.stopped

    asyncio.run(main())
