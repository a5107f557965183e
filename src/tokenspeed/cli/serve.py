"""`tokenspeed serve`: a model over HTTP, the engine in a process of its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from tokenspeed.cli.flags import SERVER
from tokenspeed.cli.kinds import Positional
from tokenspeed.cli.parser import Given, Parser
from tokenspeed.config import EngineConfig, ServerConfig, environment
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.loading import build, open_text
from tokenspeed.server.run import listen, run_server
from tokenspeed.weights.catalog import resolve_model

PARSER = Parser(
    "serve",
    "Serves a model over HTTP, with the OpenAI API.",
    SERVER,
    Positional("engine.model", "MODEL", "the same as --model"),
)


def run(arguments: Sequence[str]) -> int:
    """Serves until SIGINT or SIGTERM."""
    given = PARSER.read(arguments)
    asked = EngineConfig(**given.part("engine"))
    server = _server_config(given)
    if not server.api_keys and server.host not in ("127.0.0.1", "localhost", "::1") and server.uds is None:
        tell(f"Warning: whoever reaches {server.host} may use this server; --api-key asks for a key")
    listen(server).close()  # an address that is taken is known before the model is fetched
    tell(f"Model: {asked.model}")
    # Resolved once: the engine's process and this one must not fetch the same files at the same time.
    config = dataclasses.replace(asked, model=str(resolve_model(asked)), revision=None)
    engine = ProcessEngine(build, config, tell)
    run_server(server, asked, engine, lambda: open_text(config), show)
    return 0


def _server_config(given: Given) -> ServerConfig:
    """What was given, with the environment's key where there is none on the command line."""
    fields = given.part("server")
    fields.setdefault("api_keys", environment().api_keys)
    return ServerConfig(**fields)


def show(lines: str) -> None:
    """Says that the server is ready: the one thing it writes to stdout, at once if that is a pipe too."""
    print(lines, flush=True)


def tell(line: str) -> None:
    """Says how far the start is."""
    print(line, file=sys.stderr, flush=True)
