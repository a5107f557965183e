"""Running requests: deltas move from the engine's thread to the event loop, become text, and wait for their reader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple

from tokenspeed.engine.client import EngineClient
from tokenspeed.server.errors import HttpError
from tokenspeed.server.metrics import Metrics, RequestRecord
from tokenspeed.text.assembler import OutputAssembler, TextDelta
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import (
    EngineDead,
    FinishReason,
    Request,
    StepStats,
    TokenDelta,
    TokenLogprobs,
    TokenspeedError,
    Usage,
)

MAX_UNREAD_TOKENS = 16_384
"""A stream whose reader lets more tokens than this pile up is ended, so that its memory stays bounded."""

logger = logging.getLogger(__name__)


class Delivery:
    """Moves deltas to the event loop, with one wake-up a step.

    Args:
      engine: its `on_step` hook is taken.
      loop: where deltas are delivered.
      on_step: called there with the engine's state after each step.
    """

    def __init__(
        self, engine: EngineClient, loop: asyncio.AbstractEventLoop, on_step: Callable[[StepStats], None]
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._on_step = on_step
        self._arrived: list[tuple[LiveSample, TokenDelta]] = []
        engine.on_step = self._hand_over

    def add(self, sample: LiveSample) -> None:
        """Starts a sample in the engine. Raises what `EngineClient.add` raises."""
        self._engine.add(sample.request, lambda delta: self._arrived.append((sample, delta)))
        sample.finished = False

    def abort(self, sample: LiveSample) -> None:
        """Stops a sample; what it still sends is dropped."""
        self._engine.abort(sample.request.request_id)

    @property
    def cause_of_death(self) -> TokenspeedError:
        """Why the engine stopped."""
        return self._engine.error or EngineDead("it gave no reason")

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            self._loop.call_soon_threadsafe(self._deliver, arrived, self._engine.stats())

    def _deliver(self, arrived: list[tuple[LiveSample, TokenDelta]], stats: StepStats) -> None:
        now = time.time()
        self._on_step(stats)
        for sample, delta in arrived:
            sample.take(delta, now)


class Piece(NamedTuple):
    """What one step added to one choice of a response.

    Attributes:
      prompt_logprobs: one a prompt token, where they were asked for, on a choice's first piece.
    """

    choice: int
    text: TextDelta
    prompt_logprobs: Sequence[TokenLogprobs | None] | None


class LiveSample:
    """One engine request, and the choices it stands for: several where greedy samples would all be alike.

    Attributes:
      finished: whether it is not running: not started yet, aborted, or its last delta has come.
    """

    def __init__(
        self, request: Request, choices: tuple[int, ...], tokenizer: Tokenizer, generation: Generation
    ) -> None:
        self.request = request
        self.choices = choices
        self.finished = True
        self.record = RequestRecord(generation.metrics, request)
        self._assembler = OutputAssembler(tokenizer, request.sampling)
        self._generation = generation

    def take(self, delta: TokenDelta, now: float) -> None:
        """Takes what one step added; `now` is `time.time()`, seconds."""
        if self.finished:
            return
        if delta.finish_reason in ("error", "abort"):
            self.finish(delta.finish_reason, now)
            self._generation.interrupted(delta.finish_reason)
            return
        try:
            text = self._assembler.push(delta)
        except Exception:  # one stream's failure must not take the others of this step with it
            logger.exception("the output of request %s cannot be decoded", self.request.request_id)
            self._generation.fail(HttpError(500, "The output cannot be decoded", code="internal_error"))
            return
        self.record.advance(delta, len(text.token_ids), now)
        if text.finish_reason is not None:
            self.finish(text.finish_reason, now)
            if delta.finish_reason is None:
                self._generation.delivery.abort(self)
        self._generation.put([Piece(choice, text, delta.prompt_logprobs) for choice in self.choices])

    def finish(self, reason: FinishReason, now: float) -> None:
        """Ends the sample's account."""
        self.finished = True
        self.record.finish(reason, now)


class Generation:
    """The samples of one HTTP request. Entering it starts them, leaving it aborts what still runs.

    Args:
      prompts: for each prompt the requests that serve its samples; one request stands for all `n` if they are alike.
      n: choices a prompt; choice k of prompt p has the index p * n + k.
      bounded: whether its reader may stall; then it is ended once MAX_UNREAD_TOKENS wait for it.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[Request]],
        n: int,
        *,
        tokenizer: Tokenizer,
        delivery: Delivery,
        metrics: Metrics,
        bounded: bool,
    ) -> None:
        self.delivery = delivery
        self.metrics = metrics
        self.prompts = [
            [LiveSample(request, choices, tokenizer, self) for request, choices in _choices(requests, p * n, n)]
            for p, requests in enumerate(prompts)
        ]
        self._n = n
        self._bounded = bounded
        self._pieces: list[Piece] = []
        self._unread = 0
        self._failure: TokenspeedError | None = None
        self._wake = asyncio.Event()

    @property
    def samples(self) -> Iterable[LiveSample]:
        return (sample for samples in self.prompts for sample in samples)

    def __enter__(self) -> Generation:
        try:
            for sample in self.samples:
                self.delivery.add(sample)
        except TokenspeedError:
            self._abort()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._abort()
        for samples in self.prompts:
            self.metrics.request_params_n.observe(self._n)
            self.metrics.request_max_num_generation_tokens.observe(max(s.record.output_tokens for s in samples))

    def _abort(self) -> None:
        now = time.time()
        for sample in self.samples:
            if not sample.finished:
                sample.finish("abort", now)
                self.delivery.abort(sample)

    async def pieces(self) -> list[Piece]:
        """Waits for output and takes all that has come; an empty list means that every sample has finished.

        Raises:
          TokenspeedError: the engine died, the server stops, or the reader was too slow.
        """
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if all(sample.finished for sample in self.samples):
                return []
            self._wake.clear()
            await self._wake.wait()
        pieces, self._pieces = self._pieces, []
        self._unread = 0
        return pieces

    @property
    def usage(self) -> Usage:
        """Tokens so far: each prompt once, the outputs of all choices."""
        return Usage(
            prompt_tokens=sum(len(samples[0].request.prompt_ids) for samples in self.prompts),
            completion_tokens=sum(sample.record.output_tokens * len(sample.choices) for sample in self.samples),
            cached_tokens=sum(samples[0].record.cached_tokens for samples in self.prompts),
        )

    def put(self, pieces: list[Piece]) -> None:
        """Adds output for the reader."""
        self._pieces += pieces
        self._unread += sum(len(piece.text.token_ids) for piece in pieces)
        if self._bounded and self._unread > MAX_UNREAD_TOKENS:
            self.fail(HttpError(503, f"The stream was not read while {self._unread} tokens came", code="slow_reader"))
        self._wake.set()

    def interrupted(self, reason: FinishReason) -> None:
        """Ends all samples because the engine ended one that nobody had asked it to."""
        stopped = HttpError(503, "The server is shutting down", code="shutting_down", headers={"Retry-After": "1"})
        self.fail(self.delivery.cause_of_death if reason == "error" else stopped)

    def fail(self, error: TokenspeedError) -> None:
        """Ends all samples; the reader gets `error` after what has come so far."""
        self._failure = self._failure or error
        self._abort()
        self._wake.set()


def _choices(requests: Sequence[Request], first: int, n: int) -> Iterable[tuple[Request, tuple[int, ...]]]:
    """Which choices each request of a prompt stands for."""
    if len(requests) == 1:
        return [(requests[0], tuple(range(first, first + n)))]
    return [(request, (first + k,)) for k, request in enumerate(requests)]
