"""`tokenspeed chat`: a conversation in the terminal, or with the lines of a pipe."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenspeed.cli.flags import ENGINE, SAMPLING
from tokenspeed.cli.generate import sampling_given, sampling_of
from tokenspeed.cli.kinds import Flag, Positional, Value
from tokenspeed.cli.parser import Parser
from tokenspeed.llm import LLM
from tokenspeed.types import ConfigError, InvalidRequest

_FLAGS: tuple[Flag, ...] = (Value("chat.system", "--system --system-prompt", "the system message"),)
PARSER = Parser(
    "chat",
    "Talks to a model in the terminal, or answers each line of a pipe.",
    {"chat": _FLAGS, "sampling": SAMPLING, **ENGINE},
    Positional("engine.model", "MODEL", "the same as --model"),
)

HELP = """/clear         forget the conversation
/system TEXT   set the system message, and forget the conversation; without TEXT there is none
/exit          leave, as Ctrl-D does; Ctrl-C stops an answer"""


def run(arguments: Sequence[str]) -> int:
    """Talks until the input ends."""
    given = PARSER.read(arguments)
    sampling = sampling_given(given)
    with LLM(**given.part("engine")) as llm:
        conversation = Conversation(llm, sampling, given.part("chat").get("system"))
        if sys.stdin.isatty():
            _in_terminal(conversation)
        else:
            _with_pipe(conversation)
    return 0


class Conversation:
    """The messages so far, and how to go on.

    Args:
      sampling: values that replace the model's defaults.
      system: the system message, if there is one.

    Raises:
      ConfigError: the model has no chat template.
    """

    def __init__(self, llm: LLM, sampling: Mapping[str, Any], system: str | None) -> None:
        if not llm.can_chat:
            raise ConfigError("this model has no chat template; give one with --chat-template, or use generate")
        self._llm = llm
        self._sampling = sampling_of(llm, sampling, chat=True)
        self._messages: list[dict[str, str]] = []
        self.start(system)

    def start(self, system: str | None) -> None:
        """Forgets all but this system message."""
        self._messages = [{"role": "system", "content": system}] if system else []

    def clear(self) -> None:
        """Forgets all but the system message."""
        self._messages = [message for message in self._messages if message["role"] == "system"]

    def answer(self, text: str, show: Callable[[str], None]) -> None:
        """Answers a message, showing the pieces as they come. What has been said is kept, however it ends.

        Raises:
          InvalidRequest: the conversation cannot go on so; the message is forgotten.
          KeyboardInterrupt: the answer was stopped.
        """
        message, said = {"role": "user", "content": text}, ""
        try:
            for step in self._llm.stream([*self._messages, message], self._sampling):
                said = step.text
                show(step.new_text)
        finally:
            if said:
                self._messages += [message, {"role": "assistant", "content": said}]


def respond(conversation: Conversation, line: str) -> bool:
    """Does what a line says and prints what there is to say; whether to go on."""
    command, _, rest = line.strip().partition(" ")
    match command:
        case "":
            pass
        case "/exit" | "/quit":
            return False
        case "/clear":
            conversation.clear()
        case "/system":
            conversation.start(rest.strip() or None)
        case "/help":
            print(HELP)
        case _ if re.fullmatch(r"/\w+", command):
            print(f"there is no {command}; /help lists what there is", file=sys.stderr)
        case _:
            _answer(conversation, line)
    return True


def _answer(conversation: Conversation, line: str) -> None:
    try:
        conversation.answer(line, lambda piece: print(piece, end="", flush=True))
        print()
    except InvalidRequest as error:
        print(f"{error} (/clear forgets the conversation)", file=sys.stderr)


def _in_terminal(conversation: Conversation) -> None:
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # gives `input` its keys and its history
    print("/help lists the commands; Ctrl-D leaves.")
    while True:
        try:
            if not respond(conversation, input("> ")):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(stopped; Ctrl-D or /exit leaves)")


def _with_pipe(conversation: Conversation) -> None:
    for line in sys.stdin:
        if not respond(conversation, line.removesuffix("\n")):
            return
