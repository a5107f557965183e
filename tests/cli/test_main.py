"""The entry of the command line, and how commands end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

import tokenspeed
from tokenspeed.cli import env
from tokenspeed.cli.main import COMMANDS, main
from tokenspeed.types import ConfigError, EngineDead, InvalidRequest, TokenspeedError


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_the_commands(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("argument", ["--version", "-V", "version"])
def test_version(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument]) == 0
    assert capsys.readouterr().out == f"{tokenspeed.__version__}\n"


def test_an_unknown_command_is_a_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert capsys.readouterr().err == "tokenspeed: unknown command srve; the commands are serve, chat, generate, env\n"


def test_help_waits_for_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from tokenspeed.cli.main import main\n"
        "main(['--help'])\n"
        "heavy = {'jax', 'numpy', 'msgspec', 'yaml', 'tokenizers', 'starlette', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_module_runs_too() -> None:
    done = subprocess.run([sys.executable, "-m", "tokenspeed", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"{tokenspeed.__version__}\n"


@pytest.mark.parametrize("error", [ConfigError("no."), InvalidRequest("no."), EngineDead("no.")])
def test_a_failure_is_one_sentence(
    error: TokenspeedError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr(env, "run", fail)
    assert main(["env"]) == 1
    assert capsys.readouterr() == ("", "tokenspeed env: no.\n")


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "run", fail)
    assert main(["env"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "from tokenspeed.cli import env, main\n"
        "env.run = lambda arguments: [print('x' * 1000) for _ in range(1000)]\n"
        "sys.exit(main.main(['env']))\n"
    )
    command = f'{sys.executable} -c "$CODE" | head -c 10 > /dev/null; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], env={"CODE": code, "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_the_public_names_are_there() -> None:
    assert tokenspeed.LLM.__module__ == "tokenspeed.llm"
    assert tokenspeed.SamplingParams(n=2).n == 2
    assert tokenspeed.EngineConfig().model == "smollm2"
    assert set(tokenspeed.__all__) <= set(dir(tokenspeed))
    with pytest.raises(AttributeError, match="no attribute 'Quux'"):
        _ = tokenspeed.Quux
