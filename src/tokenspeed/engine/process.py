"""An engine in a process of its own, so that the front end's Python never waits for the engine's and the reverse."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from tokenspeed.config import EngineConfig
from tokenspeed.engine.client import EngineClient, Sink, check_request
from tokenspeed.engine.engine import EngineCore, Runner
from tokenspeed.types import ConfigError, EngineDead, EngineOutput, Overloaded, Request, RunnerLimits, TokenspeedError

Build = Callable[[EngineConfig], Runner]
"""A module-level callable that builds a runner in the engine's process. What it logs at INFO to the `tokenspeed`
loggers becomes start-up progress. It raises a TokenspeedError for what the user can mend."""

_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_CLOSE_SECONDS = 20.0
"""How long `close` waits for the engine's process to end by itself."""


class _Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    request: Request
    """Without its prompt_ids: 50,000 of them as one byte string cost the engine's loop nothing."""
    prompt_ids: bytes


class _Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_id: str


class _Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    pass


class _Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    line: str


class _Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    limits: RunnerLimits
    facts: dict[str, str]


class _Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    sentence: str


class _Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    output: EngineOutput


class _Dead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    cause: str


_Command = _Add | _Abort | _Stop
_Report = _Progress | _Ready | _Failed | _Step | _Dead


class ProcessEngine(EngineClient):
    """An engine in a spawned process; `start` it, then `wait_ready`, or watch `healthy`.

    The process ends when this one does, however that happens, and leaves the signals that a terminal or a service
    manager sends to both (SIGINT, SIGTERM) to this one.

    Args:
      build: see Build.
      config: sent to the process and given to `build`.
      on_progress: called with one line a start-up stage, on the receiving thread.
    """

    def __init__(
        self, build: Build, config: EngineConfig, on_progress: Callable[[str], None] = lambda line: None
    ) -> None:
        super().__init__()
        context = multiprocessing.get_context("spawn")
        self._connection, self._engine_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._engine_end, build, config), name="tokenspeed-engine", daemon=True
        )
        self._on_progress = on_progress
        self._outbox: queue.SimpleQueue[_Add | _Abort | _Stop | Request] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="tokenspeed-engine-sender", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name="tokenspeed-engine-receiver", daemon=True)
        self._settled = threading.Event()
        self._ready: _Ready | None = None
        self._failure: ConfigError | None = None
        self._cause: str | None = None
        self._closing = False

    def start(self) -> None:
        """Starts the process and returns at once."""
        # The child inherits the mask, so no such signal can reach it before it has chosen to ignore them.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._engine_end.close()
        # Without this, multiprocessing's own exit would wait for a process that ignores its SIGTERM.
        atexit.register(self._process.kill)
        self._sender.start()
        self._receiver.start()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Waits until the engine serves.

        Raises:
          ConfigError: it could not start, for a reason the user can mend.
          EngineDead: its process ended.
          TimeoutError: it was not ready after `timeout` seconds; it goes on starting.
        """
        if not self._settled.wait(timeout):
            raise TimeoutError(f"the engine was not ready after {timeout} s")
        if self._failure is not None:
            raise self._failure
        if self._ready is None:
            assert self.error is not None
            raise self.error

    @property
    def limits(self) -> RunnerLimits:
        return self._facts_when_ready().limits

    @property
    def facts(self) -> Mapping[str, str]:
        return self._facts_when_ready().facts

    def _facts_when_ready(self) -> _Ready:
        if self._ready is None:
            raise self.error or Overloaded("the engine is still starting; try again in a moment")
        return self._ready

    def add(self, request: Request, sink: Sink) -> None:
        check_request(request, self.limits)
        self.streams.open(request.request_id, sink)
        self._outbox.put(request)

    def abort(self, request_id: str) -> None:
        self._outbox.put(_Abort(request_id))

    @property
    def healthy(self) -> bool:
        return self._ready is not None and self.error is None and not self._closing

    def close(self) -> None:
        if self._process.pid is None:
            return
        self._closing = True
        self._outbox.put(_Stop())
        self._process.join(_CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._receiver.join()
        atexit.unregister(self._process.kill)

    def _send(self) -> None:
        """Encodes and sends on a thread of its own, so that `add` never waits for the pipe."""
        encode = msgspec.msgpack.Encoder().encode
        with contextlib.suppress(OSError):  # the receiver finds the end of the process
            while True:
                command = self._outbox.get()
                if isinstance(command, Request):
                    ids = np.asarray(command.prompt_ids, np.int32).tobytes()
                    command = _Add(msgspec.structs.replace(command, prompt_ids=()), ids)
                self._connection.send_bytes(encode(command))
                if isinstance(command, _Stop):
                    return

    def _receive(self) -> None:
        decode = msgspec.msgpack.Decoder(_Report).decode
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._take(decode(self._connection.recv_bytes()))
        self._process.join()
        self.streams.fail(EngineDead(self._last_words()))
        self._settled.set()
        self._outbox.put(_Stop())
        self._sender.join()
        self._connection.close()

    def _take(self, report: _Report) -> None:
        match report:
            case _Step(output):
                self.streams.deliver(output)
            case _Progress(line):
                self._on_progress(line)
            case _Ready():
                self._ready = report
                self._settled.set()
            case _Failed(sentence):
                self._failure = ConfigError(sentence)
                self._cause = sentence
            case _Dead(cause):
                self._cause = cause

    def _last_words(self) -> str:
        if self._cause is not None:
            return self._cause
        if self._closing:
            return "the engine was closed; create a new one"
        return f"the engine's process ended with code {self._process.exitcode}; its output says why"


class _Commands:
    """The child's ear: passes commands to the engine, and ends the process when the parent is gone."""

    def __init__(self, connection: Connection) -> None:
        self.core: EngineCore | None = None
        self._connection = connection
        threading.Thread(target=self._listen, name="tokenspeed-engine-commands", daemon=True).start()

    def _listen(self) -> None:
        decode = msgspec.msgpack.Decoder(_Command).decode
        while True:
            try:
                command = decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)  # nobody is left to serve, and the loop may be deep inside a step or a compile
            self._obey(command)

    def _obey(self, command: _Command) -> None:
        core = self.core
        match command:
            case _Stop():
                if core is None:
                    os._exit(0)  # still starting: there is nothing to finish
                core.stop()
            case _Add(request, prompt_ids):
                assert core is not None, "requests come after ready"
                core.add(request, np.frombuffer(prompt_ids, np.int32))
            case _Abort(request_id):
                if core is not None:
                    core.abort(request_id)


class _ProgressLog(logging.Handler):
    """Sends what is logged while the engine starts to the front end."""

    def __init__(self, send: Callable[[_Report], None]) -> None:
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(_Progress(record.getMessage()))


def _serve(connection: Connection, build: Build, config: EngineConfig) -> None:
    """The engine's process."""
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    commands = _Commands(connection)
    encode = msgspec.msgpack.Encoder().encode

    def send(report: _Report) -> None:
        connection.send_bytes(encode(report))

    try:
        runner = _build(build, config, send)
    except TokenspeedError as error:
        send(_Failed(str(error)))
        raise SystemExit(1) from None
    core = EngineCore(runner, config, lambda output: send(_Step(output)))
    commands.core = core
    send(_Ready(runner.limits, dict(runner.facts)))
    try:
        core.run()
    except EngineDead as error:
        send(_Dead(str(error)))
        raise SystemExit(1) from None


def _build(build: Build, config: EngineConfig, send: Callable[[_Report], None]) -> Runner:
    log = logging.getLogger("tokenspeed")
    progress = _ProgressLog(send)
    level = log.level
    log.addHandler(progress)
    log.setLevel(logging.INFO)
    try:
        return build(config)
    finally:
        log.removeHandler(progress)
        log.setLevel(level)
