"""The engine's loop: schedules a step, dispatches it, and commits the last one while the device works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from tokenspeed.config import EngineConfig
from tokenspeed.types import EngineOutput, Request, RunnerLimits, Schedule, StepResult


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


class EngineCore:
    """One engine: an inbox of requests, a scheduler and a runner.

    Args:
      emit: called once a step with its deltas, on the thread of `run`.
    """

    def __init__(self, runner: Runner, config: EngineConfig, emit: Callable[[EngineOutput], None]) -> None:
        raise NotImplementedError

    def add(self, request: Request, prompt_ids: np.ndarray) -> None:
        """Queues a request from any thread. `prompt_ids` int32 [prompt length] stands for `request.prompt_ids`."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown ids are ignored. From any thread."""
        raise NotImplementedError

    def stop(self) -> None:
        """Makes `run` abort what is left and return. From any thread."""
        raise NotImplementedError

    def run(self) -> None:
        """Serves until `stop`.

        Raises:
          EngineDead: a step failed; its cause is chained. The callers of `add` must be told (see client.Streams.fail).
        """
        raise NotImplementedError
