from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from itertools import repeat
from typing import Any

import pytest

from tests.server.fake import EOS, LIMITS, Script, ScriptEngine, ScriptTokenizer
from tokenspeed.server.generation import Delivery, Generation
from tokenspeed.server.metrics import Metrics
from tokenspeed.text.requests import make_requests
from tokenspeed.types import EngineDead, InvalidRequest, SamplingParams, TokenspeedError


class Bench:
    """An engine, and generations that run in it."""

    def __init__(self, engine: ScriptEngine, tokenizer: ScriptTokenizer) -> None:
        self.engine = engine
        self.steps = 0
        self._tokenizer = tokenizer
        self._metrics = Metrics(prefix="t", model_name="m", max_model_len=10, cache_config={}, stats=engine.stats)
        self._delivery = Delivery(engine, asyncio.get_running_loop(), self._count)

    def _count(self, stats: object) -> None:
        self.steps += 1

    def generation(self, *prompts: list[int], name: str = "r", **sampling: Any) -> Generation:
        params = SamplingParams(**{"max_tokens": 8, "seed": 0, **sampling})
        requests = [
            make_requests(f"{name}{k}", prompt, params, limits=LIMITS, eos_ids=(EOS,))
            for k, prompt in enumerate(prompts)
        ]
        tokenizer: Any = self._tokenizer
        return Generation(
            requests, params.n, tokenizer=tokenizer, delivery=self._delivery, metrics=self._metrics, bounded=True
        )


def run(script: Callable[[ScriptTokenizer], Script], test: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        tokenizer = ScriptTokenizer()
        engine = ScriptEngine(script(tokenizer), delay=0.002)
        try:
            await asyncio.wait_for(test(Bench(engine, tokenizer)), 5)
        finally:
            engine.close()

    asyncio.run(main())


async def read(generation: Generation) -> dict[int, str]:
    """Each choice's text."""
    texts: dict[int, str] = {}
    with generation:
        while pieces := await generation.pieces():
            for piece in pieces:
                texts[piece.choice] = texts.get(piece.choice, "") + piece.text.text
    return texts


def repeats_the_prompt(tokenizer: ScriptTokenizer) -> Script:
    return lambda request: [*request.prompt_ids, ord("0") + (request.sampling.seed or 0), EOS]


def endless(tokenizer: ScriptTokenizer) -> Script:
    return lambda request: repeat(ord("x"))


def test_choices_and_usage() -> None:
    async def test(bench: Bench) -> None:
        generation = bench.generation([97], [98, 99], n=2)
        assert await read(generation) == {0: "a0", 1: "a1", 2: "bc0", 3: "bc1"}
        assert generation.usage.prompt_tokens == 3
        assert generation.usage.completion_tokens == 3 + 3 + 4 + 4
        greedy = bench.generation([97], n=3, temperature=0.0, name="g")
        assert await read(greedy) == {0: "a0", 1: "a0", 2: "a0"}
        assert greedy.usage.completion_tokens == 9
        assert bench.steps > 0

    run(repeats_the_prompt, test)


def test_leaving_aborts_what_runs() -> None:
    async def test(bench: Bench) -> None:
        with bench.generation([97], [98], max_tokens=500) as generation:
            await generation.pieces()
        assert sorted(bench.engine.aborted) == ["r0", "r1"]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(bench.generation([97], max_tokens=500, name="c")), 0.05)
        assert "c0" in bench.engine.aborted

    run(endless, test)


def test_one_that_cannot_start_stops_the_others() -> None:
    async def test(bench: Bench) -> None:
        generation = bench.generation([97], [98], max_tokens=500)
        generation.prompts[1][0].request = generation.prompts[0][0].request
        with pytest.raises(InvalidRequest, match="in use"), generation:
            raise AssertionError
        assert bench.engine.aborted == ["r0"]

    run(endless, test)


def test_output_that_cannot_be_decoded_harms_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken(tokenizer: ScriptTokenizer) -> Script:
        tokenizer._bytes[999] = None  # type: ignore[assignment]
        return lambda request: [97, 999] if request.prompt_ids == (1,) else [97, 98, EOS]

    async def test(bench: Bench) -> None:
        good, bad = await asyncio.gather(
            read(bench.generation([2], name="g")), read(bench.generation([1], name="b")), return_exceptions=True
        )
        assert good == {0: "ab"}
        assert isinstance(bad, TokenspeedError)
        assert "cannot be decoded" in str(bad)
        assert bench.engine.aborted == ["b0"]

    run(broken, test)
    assert "b0 cannot be decoded" in caplog.text


def test_what_came_before_a_failure_is_read_first() -> None:
    async def test(bench: Bench) -> None:
        with bench.generation([97], max_tokens=500) as generation:
            first = await generation.pieces()
            bench.engine.streams.fail(EngineDead("on fire"))
            await asyncio.sleep(0.02)
            last = await _last(generation.pieces)
            assert first
            assert "on fire" in str(last)

    async def _last(pieces: Callable[[], Awaitable[list[Any]]]) -> TokenspeedError:
        while True:
            try:
                await pieces()
            except TokenspeedError as error:
                return error

    run(endless, test)
