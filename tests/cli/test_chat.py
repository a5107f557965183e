"""`tokenspeed chat`: turns, commands, interrupts, a terminal and a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_llm import TOKENIZER, make
from tokenspeed import LLM, SamplingParams
from tokenspeed.cli import chat
from tokenspeed.cli.chat import Conversation, respond
from tokenspeed.cli.main import main
from tokenspeed.config import GenerationDefaults
from tokenspeed.loading import ModelText
from tokenspeed.types import ConfigError

SEEDED = {"seed": 5, "max_tokens": 8}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make().llm as llm:
        yield llm


def said(llm: LLM, *turns: tuple[str, str]) -> str:
    """What the fake model says to these messages."""
    messages = [{"role": role, "content": content} for role, content in turns]
    [output] = llm.chat(messages, SamplingParams(**SEEDED))  # pyright: ignore[reportArgumentType]
    return output.text


def told(capsys: pytest.CaptureFixture[str], conversation: Conversation, line: str) -> str:
    assert respond(conversation, line)
    return capsys.readouterr().out.removesuffix("\n")


def test_answers_and_messages_stay_in_the_conversation(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SEEDED, "be")
    first = told(capsys, conversation, "one")
    assert first == said(llm, ("system", "be"), ("user", "one"))
    second = told(capsys, conversation, "two")
    assert second == said(llm, ("system", "be"), ("user", "one"), ("assistant", first), ("user", "two"))


def test_commands(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SEEDED, "be")
    told(capsys, conversation, "one")
    told(capsys, conversation, " /clear ")
    assert told(capsys, conversation, "two") == said(llm, ("system", "be"), ("user", "two"))
    told(capsys, conversation, "/system new words")
    assert told(capsys, conversation, "two") == said(llm, ("system", "new words"), ("user", "two"))
    told(capsys, conversation, "/system")
    assert told(capsys, conversation, "two") == said(llm, ("user", "two"))
    assert "/clear" in told(capsys, conversation, "/help")
    assert told(capsys, conversation, "   ") == ""
    assert not respond(conversation, "/exit")
    assert not respond(conversation, "/quit")


def test_an_unknown_command_is_named_and_a_path_is_a_message(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SEEDED, None)
    assert respond(conversation, "/clea")
    assert capsys.readouterr() == ("", "there is no /clea; /help lists what there is\n")
    assert told(capsys, conversation, "/a/b is") == said(llm, ("user", "/a/b is"))


def test_a_conversation_that_is_too_long_can_be_cleared(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SEEDED, None)
    assert respond(conversation, "a" * 200)
    out, err = capsys.readouterr()
    assert out == ""
    assert "maximum context length is 96 tokens" in err
    assert told(capsys, conversation, "one") == said(llm, ("user", "one"))


def test_a_model_without_template_is_refused() -> None:
    made = make()
    text = ModelText(TOKENIZER, None, GenerationDefaults(), ())
    with LLM.over(text, made.engine) as llm, pytest.raises(ConfigError, match="no chat template"):
        Conversation(llm, {}, None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of each `LLM` that the command opened."""
    settings: list[dict[str, Any]] = []

    def open_fake(**config: Any) -> LLM:
        settings.append(config)
        return make().llm

    monkeypatch.setattr(chat, "LLM", open_fake)
    return settings


FLAGS = ["--sampling-seed", "5", "--max-tokens", "8"]


def test_a_pipe_is_a_turn_a_line(
    llm: LLM, opened: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/exit\nthree\n"))
    assert main(["chat", "m", *FLAGS, "--system", "be"]) == 0
    first = said(llm, ("system", "be"), ("user", "one"))
    second = said(llm, ("system", "be"), ("user", "one"), ("assistant", first), ("user", "two"))
    assert capsys.readouterr() == (f"{first}\n{second}\n", "")
    assert opened == [{"model": "m"}]


def test_flags_of_generate_alone_are_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["chat", "--logprobs", "3"])
    assert caught.value.code == 2
    assert "unknown flag --logprobs" in capsys.readouterr().err


class Terminal:
    """`tokenspeed chat` with a slow fake model, in a terminal of its own."""

    def __init__(self) -> None:
        code = textwrap.dedent("""
            import os, sys
            os.open(os.ttyname(0), os.O_RDWR)  # makes it the terminal whose Ctrl-C reaches this process
            from tests.fake_llm import make
            from tokenspeed.cli import chat, main
            chat.LLM = lambda **config: make(slow=True).llm
            sys.exit(main.main(["chat", "--sampling-seed", "5", "--ignore-eos"]))
        """)
        self._mine, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path), "TERM": "dumb"},
        )
        os.close(theirs)
        self._text = ""

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def wait_for(self, pattern: str, seconds: float = 30) -> None:
        """Waits until the pattern appears after what was waited for before."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self._text)):
            assert time.monotonic() < end, f"{pattern!r} is not in {self._text!r}"
            if select.select([self._mine], [], [], 0.1)[0]:
                self._text += os.read(self._mine, 4096).decode()
        self._text = self._text[found.end() :]

    def interrupt_until(self, pattern: str) -> None:
        """Presses Ctrl-C as a person does: again, if it came between the prompt and the read, where nothing hears it."""
        for _ in range(9):
            self.type("\x03")
            with contextlib.suppress(AssertionError):
                return self.wait_for(pattern, seconds=3)
        self.type("\x03")
        return self.wait_for(pattern)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._mine)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_control_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.type("hello\n")
    terminal.wait_for(r"hello\s+\w{3}")
    terminal.type("\x03")
    terminal.wait_for(r"\(stopped; Ctrl-D or /exit leaves\)\s+> ")
    terminal.interrupt_until(r"\(stopped; Ctrl-D or /exit leaves\)\s+> ")
    terminal.type("/help\n")
    terminal.wait_for(r"forget the conversation[^>]*> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0
