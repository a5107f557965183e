"""The engine's loop: schedules a step, dispatches it, and commits the last one while the device works."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from tokenspeed.config import EngineConfig
from tokenspeed.engine.commit import commit
from tokenspeed.engine.roster import Roster
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.types import (
    EngineDead,
    EngineOutput,
    Request,
    RunnerLimits,
    Schedule,
    StepResult,
    StepStats,
    TokenDelta,
)

log = logging.getLogger(__name__)


class PendingStep(Protocol):
    """A dispatched step."""

    def result(self) -> StepResult:
        """Blocks until the device is done and the results are on the host."""
        ...


class Runner(Protocol):
    """What the engine needs of the device side. Steps run on the device in the order of their dispatch."""

    @property
    def limits(self) -> RunnerLimits:
        """Sizes the schedules must stay inside."""
        ...

    @property
    def facts(self) -> Mapping[str, str]:
        """What it tells of itself for a start-up banner: device, dtype, kernels, pages."""
        ...

    @property
    def num_compiles(self) -> int:
        """Backend compilations since it was ready to serve."""
        ...

    def dispatch(self, schedule: Schedule) -> PendingStep:
        """Starts a step; returns at once."""
        ...

    def padded_tokens(self, schedule: Schedule) -> int:
        """Tokens of the compiled bucket the schedule runs in."""
        ...


class _Arrival(NamedTuple):
    request: Request
    prompt_ids: np.ndarray


class _Abort(NamedTuple):
    request_id: str


class _Stop(NamedTuple):
    pass


class _Dispatched(NamedTuple):
    schedule: Schedule
    step: PendingStep
    started: float
    """time.perf_counter()"""


class EngineCore:
    """One engine: an inbox of requests, a scheduler and a runner.

    With overlap, step N + 1 is scheduled and dispatched before step N is committed, as if every sequence in flight
    went on; what it computes for a sequence that did not is dropped, so the output is that of the loop without.

    Args:
      emit: called once a step with its deltas, on the thread of `run`.
    """

    def __init__(self, runner: Runner, config: EngineConfig, emit: Callable[[EngineOutput], None]) -> None:
        self._runner = runner
        self._overlap = config.overlap
        self._emit = emit
        share_prefixes = config.enable_prefix_caching and runner.limits.shares_prefixes
        self._roster = Roster(runner.limits, share_prefixes=share_prefixes, seed=config.seed)
        self._scheduler = Scheduler(self._roster)
        self._inbox: queue.SimpleQueue[_Arrival | _Abort | _Stop] = queue.SimpleQueue()
        self._pending: _Dispatched | None = None
        self._aborted: list[TokenDelta] = []
        self._stopping = False

    def add(self, request: Request, prompt_ids: np.ndarray) -> None:
        """Queues a request from any thread. `prompt_ids` int32 [prompt length] stands for `request.prompt_ids`."""
        self._inbox.put(_Arrival(request, prompt_ids))

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown ids are ignored. From any thread."""
        self._inbox.put(_Abort(request_id))

    def stop(self) -> None:
        """Makes `run` abort what is left and return. From any thread."""
        self._inbox.put(_Stop())

    def run(self) -> None:
        """Serves until `stop`.

        Raises:
          EngineDead: a step failed; the cause is chained. Callers of `add` must be told (see client.Streams.fail).
        """
        try:
            self._serve()
        except Exception as cause:
            log.exception("the engine stopped")
            raise EngineDead(f"the engine stopped because of {type(cause).__name__}: {cause}") from cause

    def _serve(self) -> None:
        working = True
        while working:
            if self.idle:
                self._obey(self._inbox.get())
            working = self.step()

    @property
    def idle(self) -> bool:
        """Whether nothing is to be done until something comes into the inbox."""
        return self._pending is None and self._roster.num_live == 0

    def step(self) -> bool:
        """Takes what is in the inbox, without waiting, and makes one turn of the loop; False once it has stopped."""
        while not self._inbox.empty():
            self._obey(self._inbox.get())
        if self._stopping:
            self._end()
        else:
            self._pending = self._turn(self._pending)
        return not self._stopping

    def _end(self) -> None:
        if self._pending is not None:
            self._pending.step.result()  # leaves the device idle
        for request_id in self._roster.live_ids:
            self._finish_aborted(request_id)
        self._tell(self._aborted, None)

    def _obey(self, command: _Arrival | _Abort | _Stop) -> None:
        match command:
            case _Arrival(request, prompt_ids):
                self._roster.add(request, prompt_ids)
            case _Abort(request_id):
                self._finish_aborted(request_id)
            case _Stop():
                self._stopping = True

    def _finish_aborted(self, request_id: str) -> None:
        sequence = self._roster.find(request_id)
        if sequence is not None:
            self._roster.finish(sequence, "abort")
            self._aborted.append(sequence.delta((), "abort"))

    def _turn(self, pending: _Dispatched | None) -> _Dispatched | None:
        """Dispatches a step, commits the pending one (with overlap) or the same; returns what is in flight."""
        dispatched = self._dispatch()
        done, left = (pending, dispatched) if self._overlap else (dispatched, None)
        if done is not None:
            deltas = commit(self._roster, done.step.result())
            self._tell(self._aborted + deltas, done)
        elif self._aborted:
            self._tell(self._aborted, None)
        else:
            assert left is not None or self._roster.num_live == 0, "nothing can be scheduled, and nothing is in flight"
        return left

    def _dispatch(self) -> _Dispatched | None:
        schedule = self._scheduler.schedule()
        if schedule is None:
            return None
        started = time.perf_counter()
        return _Dispatched(schedule, self._runner.dispatch(schedule), started)

    def _tell(self, deltas: list[TokenDelta], done: _Dispatched | None) -> None:
        self._aborted = []
        self._emit(EngineOutput(deltas, self._stats(done)))

    def _stats(self, done: _Dispatched | None) -> StepStats:
        roster, counters = self._roster, self._roster.counters
        tokens = done.schedule.num_tokens if done is not None else 0
        return StepStats(
            time=time.time(),
            num_running=roster.num_running,
            num_waiting=roster.num_waiting,
            num_pages=roster.table.pool.capacity,
            num_pages_used=roster.table.num_used,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_preemptions=counters.num_preemptions,
            num_steps=counters.num_steps,
            step_tokens=tokens,
            step_padding=self._runner.padded_tokens(done.schedule) - tokens if done is not None else 0,
            step_seconds=time.perf_counter() - done.started if done is not None else 0.0,
            num_compiles=self._runner.num_compiles,
        )
