"""`tokenspeed serve`: what it asks the server for, what it refuses, and a life from its banner to SIGTERM."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tokenspeed.cli import serve
from tokenspeed.cli.main import main
from tokenspeed.config import EngineConfig, ServerConfig
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.loading import build


class Asked(NamedTuple):
    """What `run_server` was called with."""

    config: ServerConfig
    engine_config: EngineConfig
    engine: ProcessEngine
    load_text: Callable[[], object]
    on_ready: Callable[[str], None]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    calls: list[Asked] = []
    monkeypatch.setattr(serve, "run_server", lambda *arguments: calls.append(Asked(*arguments)))
    monkeypatch.setattr(serve, "resolve_model", lambda config: Path("/resolved") / config.model)
    monkeypatch.delenv("TOKENSPEED_API_KEY", raising=False)
    return calls


def test_flags_reach_the_server_and_the_engine(asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "m --revision r --max-model-len 1k --port 0 --host 127.0.0.1 --served-model-name a b --api-key k"
    assert main(["serve", *flags.split()]) == 0
    [call] = asked
    assert call.config == ServerConfig(host="127.0.0.1", port=0, served_model_names=("a", "b"), api_keys=("k",))
    assert call.engine_config == EngineConfig(model="m", revision="r", max_model_len=1000)
    assert capsys.readouterr() == ("", "Model: m\n")


def test_the_engine_gets_the_model_that_was_resolved(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(serve, "ProcessEngine", lambda *arguments: made.append(arguments))
    assert main(["serve", "m", "--revision", "r", "--port", "0"]) == 0
    [(how, config, _)] = made
    assert how is build
    assert config == EngineConfig(model="/resolved/m")


def test_the_environments_key_and_the_command_lines(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_API_KEY", "env")
    assert main(["serve", "--port", "0"]) == 0
    assert main(["serve", "--port", "0", "--api-key", "a", "--api-key", "b"]) == 0
    assert [call.config.api_keys for call in asked] == [("env",), ("a", "b")]


def test_an_open_server_is_warned_of(asked: list[Asked], capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--port", "0"])
    assert "Warning: whoever reaches 0.0.0.0 may use this server; --api-key asks for a key" in capsys.readouterr().err
    main(["serve", "--port", "0", "--api-key", "k"])
    main(["serve", "--port", "0", "--host", "localhost"])
    assert "Warning" not in capsys.readouterr().err


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence a run ends in."""
    assert main(["serve", "--host", "127.0.0.1", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err.removeprefix("Model: m\n")


def test_a_port_in_use_is_said_before_the_model_is_fetched(
    asked: list[Asked], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failure(capsys, "m", "--port", str(port))
    assert said.startswith(f"tokenspeed serve: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert (said.count("\n"), asked) == (1, [])


def test_what_is_no_model_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model nowhere is none of the things" in failure(capsys, "nowhere", "--port", "0")


def test_wrong_values_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(capsys, "--port", "70000") == "tokenspeed serve: --port must be in [0, 65535], got 70000\n"
    assert "--block-size must be 16" in failure(capsys, "--block-size", "8")
    assert "--ssl-keyfile and --ssl-certfile belong together" in failure(capsys, "--ssl-keyfile", "k")
    assert "--tool-call-parser hermes is not supported" in failure(capsys, "--tool-call-parser", "hermes")


SCRIPT = textwrap.dedent("""
    import sys
    from pathlib import Path
    from tests.engine.builds import build
    from tests.fake_llm import TEXT
    from tokenspeed.cli import main, serve

    serve.resolve_model = lambda config: Path("resolved")
    serve.open_text = lambda config: TEXT
    serve.build = build
    if __name__ == "__main__":
        sys.exit(main.main(["serve", "--port", "0", "--host", "127.0.0.1"]))
""")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A server of the fake model, in a process of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    with process:
        yield process
        process.kill()


def test_the_line_to_try_works_and_sigterm_ends_it(served: subprocess.Popen[str]) -> None:
    assert served.stdout is not None
    assert served.stderr is not None
    banner = served.stdout.readline()
    found = re.fullmatch(r"Serving smollm2 on (http://127\.0\.0\.1:\d+)\n", banner)
    assert found, banner + served.stderr.read()
    curl, *words = shlex.split(served.stdout.readline().removeprefix("Try: "))
    assert (curl, words[0], words[2]) == ("curl", "-H", "-d")
    name, value = words[1].split(": ")
    answer = httpx.post(words[-1], headers={name: value}, content=words[3], timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
    served.send_signal(signal.SIGTERM)
    assert served.wait(30) == 0
    assert "loading resolved" in served.stderr.read()
