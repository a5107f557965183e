"""`tokenspeed generate`: where prompts come from, and what is written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fake_llm import make
from tokenspeed import LLM, RequestOutput, SamplingParams
from tokenspeed.cli import generate
from tokenspeed.cli.main import main

FLAGS = ["--sampling-seed", "5", "--max-tokens", "12"]
SEEDED = SamplingParams(seed=5, max_tokens=12)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each `LLM` that the command opened."""
    settings: list[dict[str, Any]] = []

    def open_fake(**config: Any) -> LLM:
        settings.append(config)
        return make().llm

    monkeypatch.setattr(generate, "LLM", open_fake)
    return settings


def texts(*prompts: Any) -> list[str]:
    """What the fake model says to each."""
    with make().llm as llm:
        return [list(llm.stream(prompt, SEEDED))[-1].text for prompt in prompts]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["generate", *FLAGS, *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_prompt_and_the_settings(opened: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "hello", "--model", "m", "--max-model-len", "1k", "--no-progress") == texts("hello")
    assert opened == [{"model": "m", "max_model_len": 1000, "progress": False}]


@pytest.mark.usefixtures("opened")
def test_several_prompts_run_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "one", "two") == texts("one", "two")
    assert printed(capsys, "--chat", "one", "two") == texts(user("one"), user("two"))


@pytest.mark.usefixtures("opened")
def test_samples_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed(capsys, "hello", "-n", "3")) == 3


@pytest.mark.usefixtures("opened")
def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "one", "two", "--json", "--logprobs", "1")
    outputs = [msgspec.json.decode(line, type=RequestOutput) for line in lines]
    assert [output.prompt for output in outputs] == ["one", "two"]
    assert [output.text for output in outputs] == texts("one", "two")
    assert outputs[0].outputs[0].logprobs is not None
    assert json.loads(lines[0])["usage"]["prompt_tokens"] == 3


@pytest.mark.usefixtures("opened")
def test_prompts_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("one two\n")
    assert printed(capsys, "--file", str(file)) == texts("one two")
    file.write_text("one\n\ntwo\n")
    assert printed(capsys, "--file", str(file), "--lines") == texts("one", "two")
    assert printed(capsys, "zero", "--file", str(file), "--lines") == texts("zero", "one", "two")
    file = tmp_path / "prompts.jsonl"
    rows = ["one", [5, 6], {"prompt": "two"}, {"messages": user("three")}, {"prompt": [7]}]
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert printed(capsys, "--file", str(file)) == texts("one", [5, 6], "two", user("three"), [7])


@pytest.mark.usefixtures("opened")
def test_prompts_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n"))
    assert printed(capsys) == texts("one two")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert printed(capsys, "--lines", "--chat") == texts(user("one"), user("two"))


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence a run ends in."""
    assert main(["generate", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tokenspeed generate: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2, is no prompt: Expecting"),
        ("5", "neither a text"),
        ('{"prompt": "a", "id": 3}', 'an object must have "prompt" or "messages"'),
        ("[1, true]", "neither a text"),
    ],
)
def test_a_bad_line_is_named(
    line: str, message: str, tmp_path: Path, opened: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"fine"\n{line}\n')
    assert message in failure(capsys, "--file", str(file))
    assert opened == []


def test_what_cannot_be_done_is_said_before_a_model_loads(
    tmp_path: Path, opened: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert "there is no prompt" in failure(capsys)
    assert "nowhere.txt cannot be read: No such file" in failure(capsys, "--file", "nowhere.txt")
    assert "is not UTF-8" in failure(capsys, "--file", str(tmp_path / "bytes"))
    assert "temperature must be in [0, 2], got 3" in failure(capsys, "a", "--temperature", "3")
    assert "add --json" in failure(capsys, "a", "--logprobs", "3")
    assert "-tp 2 is not supported" in failure(capsys, "a", "-tp", "2")
    assert opened == []


def test_what_is_no_model_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json" in failure(capsys, "a", "--model", str(tmp_path))
    assert "--model nowhere is none of the things" in failure(capsys, "a", "--model", "nowhere")


def test_a_wrong_dtype_is_a_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "a", "--dtype", "float8"])
    assert caught.value.code == 2
    assert "'float8' is none of auto, float32," in capsys.readouterr().err
