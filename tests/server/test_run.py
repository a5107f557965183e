from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engine import builds
from tests.server.process import load_text
from tests.server.serving import eventually
from tokenspeed.config import EngineConfig, ServerConfig
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.server.run import banner, listen, run_server
from tokenspeed.types import ConfigError

LONG = {"prompt": [1, 2, 3], "max_tokens": 7000, "ignore_eos": True, "seed": 1, "stream": True}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Process:
    """A server in a process, and what it prints."""

    def __init__(self, build: str, text: str = "text", **config: object) -> None:
        self.port = free_port()
        arguments = json.dumps({"host": "127.0.0.1", "port": self.port, "uvicorn_log_level": "warning", **config})
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.server.process", build, arguments, text],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def wait_for(self, words: str) -> list[str]:
        """The lines up to the one that has these words."""
        assert self.popen.stdout is not None
        lines = [""]
        while words not in lines[-1]:
            lines.append(self.popen.stdout.readline())
            assert lines[-1], f"it ended: {lines}"
        return lines

    def exit_code(self, seconds: float) -> int:
        return self.popen.wait(seconds)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def running(
    build: str = "build_slow", *, ready: bool = True, text: str = "text", **config: object
) -> Iterator[Process]:
    process = Process(build, text, **config)
    try:
        if ready:
            process.wait_for("Try: ")
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()
        assert process.popen.stdout is not None
        process.popen.stdout.close()


def test_drains_then_ends_well() -> None:
    with running() as server:
        body = {**LONG, "max_tokens": 100}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGTERM)
            eventually(lambda: refuses(server.port))
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.exit_code(5) == 0


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    return False


def test_cuts_short_what_does_not_finish_and_who_does_not_read() -> None:
    with running(shutdown_timeout=0.3) as server, socket.socket() as stalled:
        data = json.dumps({**LONG, "logprobs": 20, "n": 4}).encode()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", server.port))
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert '"code":"shutting_down"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.exit_code(6) == 0


def test_second_signal_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with running(shutdown_timeout=60, uds=str(path)) as server:
        with (
            httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client,
            client.stream("POST", "http://x/v1/completions", json=LONG) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert next(lines) == ""
            begin = time.monotonic()
            server.popen.send_signal(signal.SIGTERM)
            assert server.exit_code(5) == 128 + signal.SIGTERM
            assert time.monotonic() - begin < 2
        assert not path.exists()


def test_the_port_is_open_while_the_model_loads() -> None:
    with running("build_endless", ready=False, text="endless") as server:
        eventually(lambda: not refuses(server.port), 10)
        response = httpx.get(f"{server.url}/health")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code(5) == 0


def test_a_model_that_cannot_be_served() -> None:
    with running("build_refusing", ready=False) as server:
        assert "--model=tiny does not exist; name another" in server.wait_for("error: ")[-1]
        assert server.exit_code(5) == 2


def test_an_address_that_is_taken_is_told_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = ServerConfig(host="127.0.0.1", port=other.getsockname()[1])
        engine = ProcessEngine(builds.build_crashing, EngineConfig())
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{config.port}.*in use.*--port"):
            run_server(config, EngineConfig(), engine, load_text)
    with pytest.raises(ConfigError, match=r"cannot listen on 256\.0\.0\.1:8000"):
        listen(ServerConfig(host="256.0.0.1"))
    with pytest.raises(ConfigError, match="cannot listen on /no/such"):
        listen(ServerConfig(uds="/no/such/socket"))
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="in use"):
        listen(ServerConfig(uds=str(file)))
    assert file.read_text() == "precious"


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "socket"))
    listen(config).close()
    with listen(config) as second:
        assert second.getsockname() == config.uds
        with pytest.raises(ConfigError, match="in use"):
            listen(config)


def test_bad_certificates_are_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    config = ServerConfig(
        host="127.0.0.1", port=0, ssl_keyfile=str(tmp_path / "key"), ssl_certfile=str(tmp_path / "key")
    )
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        run_server(config, EngineConfig(), ProcessEngine(builds.build_crashing, EngineConfig()), load_text)


@pytest.mark.parametrize(
    ("config", "address", "target"),
    [
        (ServerConfig(host="0.0.0.0", port=0), "http://0.0.0.0:", "http://127.0.0.1:"),
        (ServerConfig(host="127.0.0.1", port=0, root_path="/llm"), "http://127.0.0.1:", "/llm/v1/chat/completions"),
        (ServerConfig(host="127.0.0.1", port=0, api_keys=("k",)), "http://127.0.0.1:", "Authorization: Bearer"),
    ],
)
def test_banner(config: ServerConfig, address: str, target: str) -> None:
    with listen(config) as listener:
        first, second = banner(config, listener, "my/model").splitlines()
    assert first.startswith(f"Serving my/model on {address}")
    assert second.startswith("Try: curl ")
    assert target in second
    assert second.endswith("/v1/chat/completions")
