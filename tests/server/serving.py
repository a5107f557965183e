"""A server of a scripted engine on a real socket, and ways to read its streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake import EOS, LIMITS, Script, ScriptEngine, ScriptTokenizer, says
from tokenspeed.config import GenerationDefaults, ServerConfig
from tokenspeed.server.app import create_app
from tokenspeed.server.state import ServerState
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.types import RunnerLimits

MODEL = "org/script"


class FakeText(NamedTuple):
    """A model's text side, as the server wants it."""

    tokenizer: Any
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    eos_ids: tuple[int, ...]


class Answers(NamedTuple):
    """A stream, read to its end."""

    chunks: list[dict[str, Any]]
    lines: list[str]

    def choice(self, index: int = 0) -> list[dict[str, Any]]:
        """The chunks' entries for one choice."""
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """All text of one choice."""
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in self.choice(index))

    def finish_reason(self, index: int = 0) -> str:
        """The one finish reason of a choice, which must be on its last entry."""
        reasons = [choice["finish_reason"] for choice in self.choice(index)]
        assert all(reason is None for reason in reasons[:-1])
        return reasons[-1]


@dataclass
class Server:
    """A running server, its engine, and a client for it."""

    engine: ScriptEngine
    tokenizer: ScriptTokenizer
    state: ServerState
    http: httpx.Client
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Mapping[str, object], **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def complete(self, **body: object) -> dict[str, Any]:
        """The answer of /v1/completions; it must be one."""
        return fine(self.post("/v1/completions", {"prompt": "hi", **body}))

    def chat(self, content: str = "hi", **body: object) -> dict[str, Any]:
        """The answer of /v1/chat/completions; it must be one."""
        return fine(self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body}))

    def stream(self, path: str, body: Mapping[str, object]) -> Answers:
        """A stream of either, read to its end."""
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
        with self.http.stream("POST", path, json={**prompt, **body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        data = [line.removeprefix("data: ") for line in lines[:-1] if not line.startswith(":")]
        return Answers([json.loads(one) for one in data], lines)

    def refused(self, path: str, body: Mapping[str, object], status: int = 400) -> dict[str, Any]:
        """The error object of a request that must fail."""
        response = self.post(path, body)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def refused_chat(self, **body: object) -> dict[str, Any]:
        return self.refused("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body})

    def refused_completion(self, **body: object) -> dict[str, Any]:
        return self.refused("/v1/completions", {"prompt": "hi", **body})

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value now; 0 if it does not exist yet."""
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"tokenspeed:{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0

    def connect(self, path: str, body: Mapping[str, object], receive_buffer: int | None = None) -> socket.socket:
        """A raw connection that has sent a request."""
        data = json.dumps(body).encode()
        connection = socket.socket()
        connection.settimeout(10)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", self.port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection


def fine(response: httpx.Response) -> dict[str, Any]:
    """The body of a response that must be 200."""
    assert response.status_code == 200, response.text
    return cast(dict[str, Any], response.json())


def eventually(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    """Waits until `condition` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


@contextlib.contextmanager
def serving(
    *tokens: bytes | int,
    script: Callable[[ScriptTokenizer], Script] | None = None,
    group: int = 1,
    delay: float = 0.0,
    limits: RunnerLimits = LIMITS,
    config: ServerConfig | None = None,
    template: ChatTemplate | None = None,
    defaults: GenerationDefaults | None = None,
    ready: bool = True,
    send_buffer: int | None = None,
) -> Iterator[Server]:
    """A server whose engine says `tokens` to every request, or what `script` says."""
    tokenizer = ScriptTokenizer()
    engine = ScriptEngine(
        script(tokenizer) if script else says(tokenizer, *tokens), group=group, delay=delay, limits=limits
    )
    state = ServerState(config or ServerConfig(), engine, MODEL)
    text = FakeText(tokenizer, template, defaults or GenerationDefaults(), (EOS,))
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    server = uvicorn.Server(uvicorn.Config(create_app(state), lifespan="off", ws="none", log_level="error"))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    stopping: list[Callable[[], object]] = []

    async def main() -> None:
        """`Server.serve` without its rests of 0.1 s."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        if ready:
            state.serve(text, tokenizer)
        await server.startup(sockets=[listener])
        stopping.append(lambda: loop.call_soon_threadsafe(stop.set))
        await stop.wait()
        server.servers[0].close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        while server.server_state.tasks:
            await asyncio.sleep(0.005)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    port: int = listener.getsockname()[1]
    eventually(lambda: bool(stopping))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10.0) as http:
            yield Server(engine, tokenizer, state, http, port)
    finally:
        stopping[0]()
        engine.close()
        thread.join()
        state.close()
