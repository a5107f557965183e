"""How a front end talks to an engine: add, abort, read its state, wherever the engine runs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np

from tokenspeed.config import EngineConfig
from tokenspeed.engine.engine import EngineCore, Runner
from tokenspeed.types import EngineDead, EngineOutput, InvalidRequest, Request, RunnerLimits, StepStats, TokenDelta

Sink = Callable[[TokenDelta], None]
"""Takes the deltas of one request, in order. Called on the client's receiving thread: it must be quick (put the
delta in a queue) and must not raise."""

NO_STATS = StepStats(
    time=0.0,
    num_running=0,
    num_waiting=0,
    num_pages=0,
    num_pages_used=0,
    prefix_queries=0,
    prefix_hits=0,
    num_preemptions=0,
    num_steps=0,
    step_tokens=0,
    step_padding=0,
    step_seconds=0.0,
    num_compiles=0,
)
"""The state of an engine that has not made a step."""


def check_request(request: Request, limits: RunnerLimits) -> None:
    """Raises InvalidRequest if an engine of these limits could not serve the request; constant time in the prompt."""
    length = len(request.prompt_ids)
    if length == 0:
        raise InvalidRequest("the prompt must hold at least one token", param="prompt")
    room = limits.max_model_len - (0 if request.sampling.max_tokens == 0 else 1)
    if length > room:
        raise InvalidRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{length} input tokens; at most {room} leave room for the output. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )


class Streams:
    """Who waits for which request's deltas, and what the engine last said. Safe to use from any thread."""

    def __init__(self) -> None:
        self.on_step: Callable[[], None] = lambda: None
        self.stats: StepStats = NO_STATS
        self.error: EngineDead | None = None
        self._sinks: dict[str, Sink] = {}
        self._lock = threading.Lock()
        self._heard = time.monotonic()

    def __len__(self) -> int:
        return len(self._sinks)

    def open(self, request_id: str, sink: Sink) -> None:
        """Registers a request. Raises EngineDead after `fail`, InvalidRequest if the id is in use."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if request_id in self._sinks:
                raise InvalidRequest(f"request id {request_id!r} is in use; choose another", param="request_id")
            if not self._sinks:
                self._heard = time.monotonic()
            self._sinks[request_id] = sink

    def deliver(self, output: EngineOutput) -> None:
        """Hands a step's deltas to their sinks in order, then calls `on_step` once."""
        self.stats = output.stats
        self._heard = time.monotonic()
        for delta in output.deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is None:
                continue
            if delta.finish_reason is not None:
                del self._sinks[delta.request_id]
            sink(delta)
        self.on_step()

    def fail(self, error: EngineDead) -> None:
        """Ends every open stream with finish reason `error`; `error` is set before the first sink hears of it."""
        with self._lock:
            if self.error is None:
                self.error = error
            sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink(TokenDelta(request_id=request_id, token_ids=(), finish_reason="error"))
        self.on_step()

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine last said something, while a request waits for it; 0 when none does."""
        return time.monotonic() - self._heard if self._sinks else 0.0


class EngineClient(ABC):
    """An engine as its front end sees it. All methods may be called from any thread; only `close` waits.

    Sinks are called on one receiving thread, in order; after the sinks of one step, `on_step` is called once, so that
    an asyncio user needs a single `call_soon_threadsafe` a step.
    """

    def __init__(self) -> None:
        self.streams = Streams()

    @property
    @abstractmethod
    def limits(self) -> RunnerLimits:
        """Sizes a request must fit into. Raises Overloaded while the engine is not ready."""

    @property
    @abstractmethod
    def facts(self) -> Mapping[str, str]:
        """What the runner tells of itself for a banner (device, dtype, ...). Raises as `limits` does."""

    @abstractmethod
    def add(self, request: Request, sink: Sink) -> None:
        """Queues a request; `sink` gets its deltas, the last with a `finish_reason`.

        A stream that ends with `error` was cut by the engine's death; `self.error` then holds the cause.

        Raises:
          InvalidRequest: the prompt is empty or too long, or the id is in use.
          EngineDead: the engine has stopped.
          Overloaded: the engine is not ready yet.
        """

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; its sink gets a last delta with `abort` unless it just finished.

        Unknown ids are ignored.
        """

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Ready, and neither dead nor closed."""

    @abstractmethod
    def close(self) -> None:
        """Aborts what runs (each stream gets `abort`), stops the engine and waits for its end. Idempotent."""

    def stats(self) -> StepStats:
        """The engine's state after its latest step."""
        return self.streams.stats

    @property
    def num_unfinished(self) -> int:
        """Requests added whose last delta has not come."""
        return len(self.streams)

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the engine last said something while a request waits for it; 0 when idle."""
        return self.streams.stalled_seconds

    @property
    def error(self) -> EngineDead | None:
        """Why the engine stopped, if it did."""
        return self.streams.error

    @property
    def on_step(self) -> Callable[[], None]:
        """Called on the receiving thread after all sinks of a step, and after the engine died. Must not raise."""
        return self.streams.on_step

    @on_step.setter
    def on_step(self, hook: Callable[[], None]) -> None:
        self.streams.on_step = hook


class ThreadEngine(EngineClient):
    """An engine in a thread of this process; the engine's thread is the receiving thread.

    Args:
      runner: built already. This client drops it on `close`, so that its memory can be freed.
    """

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        super().__init__()
        self._limits = runner.limits
        self._facts = dict(runner.facts)
        self._core: EngineCore | None = EngineCore(runner, config, self.streams.deliver)
        self._thread = threading.Thread(target=self._run, args=(self._core,), name="tokenspeed-engine", daemon=True)
        self._thread.start()

    def _run(self, core: EngineCore) -> None:
        try:
            core.run()
        except EngineDead as error:
            self.streams.fail(error)
        else:
            self.streams.fail(EngineDead("the engine was closed; create a new one"))

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def facts(self) -> Mapping[str, str]:
        return self._facts

    def add(self, request: Request, sink: Sink) -> None:
        check_request(request, self._limits)
        self.streams.open(request.request_id, sink)
        if (core := self._core) is not None:
            core.add(request, np.asarray(request.prompt_ids, np.int32))

    def abort(self, request_id: str) -> None:
        if (core := self._core) is not None:
            core.abort(request_id)

    @property
    def healthy(self) -> bool:
        return self.streams.error is None

    def close(self) -> None:
        if (core := self._core) is not None:
            core.stop()
            # The collector may close an engine on its own thread, which cannot wait for itself.
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._core = None
