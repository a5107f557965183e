"""A server's life: the port is bound first, the model loads while /health says so, and a signal drains what runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import TypeVar

import uvicorn

from tokenspeed.config import EngineConfig, ServerConfig
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.server.app import create_app
from tokenspeed.server.state import ModelText, ServerState
from tokenspeed.text.incremental import IncrementalEncoder
from tokenspeed.types import ConfigError

LAST_EVENTS_SECONDS = 2.0
"""How long streams have to send their last event once they have been cut short."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


def run_server(
    config: ServerConfig,
    engine_config: EngineConfig,
    engine: ProcessEngine,
    load_text: Callable[[], ModelText],
    on_ready: Callable[[str], None] = print,
) -> None:
    """Serves until SIGTERM or SIGINT, then lets requests finish for `config.shutdown_timeout` seconds and returns.

    Args:
      engine: not started yet; it is closed in the end.
      load_text: loads the text side of the model; runs in a thread beside the engine's start.
      on_ready: called once with lines that tell the address, the model, and what to try.

    Raises:
      ConfigError: the address is taken, or the model cannot be served.
      EngineDead: the engine ended while it started.
      SystemExit: a second signal came.
    """
    state = ServerState(config, engine, engine_config.model)
    with listening(config) as listener:
        server = _Server(state, engine, load_text, lambda: on_ready(banner(config, listener, state.names[0])))
        with server.hearing_signals():
            try:
                engine.start()
                server.run(sockets=[listener])
            finally:
                server.ended = True
                engine.close()
                state.close()
    if server.failure is not None:
        raise server.failure
    if server.forced_by is not None:
        raise SystemExit(128 + server.forced_by)


@contextlib.contextmanager
def listening(config: ServerConfig) -> Generator[socket.socket]:
    """A listening socket that leaves nothing behind. Raises ConfigError if the address cannot be had."""
    with listen(config) as listener:
        try:
            yield listener
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


def listen(config: ServerConfig) -> socket.socket:
    """A listening socket. Raises ConfigError if the address cannot be had."""
    try:
        return _listen_unix(config.uds) if config.uds is not None else _listen_tcp(config)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise ConfigError(
            f"cannot listen on {where}: {error.strerror or error}; choose another with --port, --host or --uds"
        ) from None


def _listen_tcp(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=2048)


def _listen_unix(path: str) -> socket.socket:
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Removes a socket that nobody listens on any more."""
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def banner(config: ServerConfig, listener: socket.socket, model: str) -> str:
    """The address, the model, and a line to try."""
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
    body = f"""{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}"""
    curl = f"curl{key} -H 'Content-Type: application/json' -d '{body}'"
    if config.uds is not None:
        where, curl = config.uds, f"{curl} --unix-socket {config.uds} http://localhost"
    else:
        scheme = "https" if config.ssl_certfile else "http"
        port: int = listener.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        near = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        where, curl = f"{scheme}://{host}:{port}", f"{curl} {scheme}://{near}:{port}"
    return f"Serving {model} on {where}\nTry: {curl}{config.root_path}/v1/chat/completions"


class _Server(uvicorn.Server):
    """uvicorn, with a model that loads beside it and a drain that ends."""

    def __init__(
        self,
        state: ServerState,
        engine: ProcessEngine,
        load_text: Callable[[], ModelText],
        on_ready: Callable[[], None],
    ) -> None:
        super().__init__(_uvicorn_config(state))
        self.failure: Exception | None = None
        self.forced_by: int | None = None
        self.ended = False
        self._state = state
        self._engine = engine
        self._load_text = load_text
        self._on_ready = on_ready
        self._loading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            (text, encoder), _ = await asyncio.gather(in_thread(self._open_text), in_thread(self._engine.wait_ready))
            self._state.serve(text, encoder)
            self._on_ready()
        except Exception as error:  # the caller of `run_server` gets it, whatever it is
            self.failure = None if self.should_exit else error
            self.should_exit = True

    def _open_text(self) -> tuple[ModelText, IncrementalEncoder]:
        text = self._load_text()
        return text, IncrementalEncoder(text.tokenizer)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Does nothing: signals are heard from before the engine's start until after its end."""
        yield

    @contextlib.contextmanager
    def hearing_signals(self) -> Generator[None]:
        """Lets `handle_exit` hear SIGTERM and SIGINT; in a thread that cannot, the caller sets `should_exit`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, a second one does not wait."""
        if self.should_exit:
            self.force_exit, self.forced_by = True, sig
            if self.ended:
                raise SystemExit(128 + sig)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        drain.cancel()
        if self._loading is not None:
            self._loading.cancel()

    async def _drain(self) -> None:
        """Ends what is left when the time is over, or at once when told to."""
        count = self._engine.num_unfinished
        if count:
            logger.warning("waiting for %d requests to finish; a second signal ends them", count)
        await self._wait_for_end(self._state.config.shutdown_timeout)
        if not self.force_exit:
            await in_thread(self._engine.close)
            await self._wait_for_end(LAST_EVENTS_SECONDS)
            self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _wait_for_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.force_exit and time.monotonic() < end:
            await asyncio.sleep(0.05)


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    config = state.config
    server = uvicorn.Config(
        create_app(state),
        lifespan="off",
        ws="none",
        log_level=config.uvicorn_log_level,
        access_log=config.access_log,
        root_path=config.root_path,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        server_header=False,
    )
    try:
        server.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"cannot use --ssl-certfile={config.ssl_certfile} with --ssl-keyfile={config.ssl_keyfile}: {error}"
        ) from None
    return server


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs blocking work in a thread that nobody waits for when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as caught:
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it who wanted to know
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future
