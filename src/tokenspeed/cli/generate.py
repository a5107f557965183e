"""`tokenspeed generate`: continues prompts from arguments, a file or stdin, as text or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from tokenspeed.cli.flags import ENGINE, SAMPLES, SAMPLING
from tokenspeed.cli.kinds import Flag, Positional, Switch, Value
from tokenspeed.cli.parser import Given, Parser
from tokenspeed.llm import LLM
from tokenspeed.text.prompts import Conversation, Prompt, is_conversation
from tokenspeed.types import ConfigError, RequestOutput, SamplingParams

_FLAGS: tuple[Flag, ...] = (
    Value("prompts.file", "--file", "a file with the prompt, or with one JSON prompt a line if it ends in .jsonl"),
    Switch("prompts.lines", "--lines", "--no-lines", "each line of the file, or of stdin, is a prompt"),
    Switch("prompts.chat", "--chat", "--no-chat", "each prompt is a message to answer, not a text to continue"),
    Switch("prompts.json", "--json", "--no-json", "one JSON object a prompt, with ids, reasons and usage"),
)
PARSER = Parser(
    "generate",
    "Continues prompts: arguments, a file or stdin. A line of a .jsonl file is a text, a list of token ids, "
    '{"prompt": ...} or {"messages": [...]}.',
    {"prompts": _FLAGS, "sampling": (*SAMPLES, *SAMPLING), **ENGINE},
    Positional("prompts.given", "PROMPT", "a prompt; several are run together", many=True),
)


class Options(NamedTuple):
    """What the flags of this command say."""

    given: Sequence[str] = ()
    file: str | None = None
    lines: bool = False
    chat: bool = False
    json: bool = False


def run(arguments: Sequence[str]) -> int:
    """Writes the outputs to stdout."""
    given = PARSER.read(arguments)
    options = Options(**given.part("prompts"))
    prompts = read_prompts(options)
    sampling = sampling_given(given)
    if not options.json and sampling.keys() & {"logprobs", "prompt_logprobs"}:
        raise ConfigError("--logprobs and --prompt-logprobs have no place in plain text; add --json")
    with LLM(**given.part("engine")) as llm:
        write(llm, prompts, sampling, as_json=options.json)
    return 0


def read_prompts(options: Options) -> list[Prompt | Conversation]:
    """The prompts that the options name.

    Raises:
      ConfigError: a file cannot be read, or a line of it is no prompt, or there is no prompt.
    """
    prompts = list(_given(options))
    if not prompts:
        raise ConfigError("there is no prompt; give one as an argument, with --file or on stdin")
    return [_message(prompt) for prompt in prompts] if options.chat else prompts


def _message(prompt: Prompt | Conversation) -> Prompt | Conversation:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _given(options: Options) -> Iterator[Prompt | Conversation]:
    yield from options.given
    if options.file is not None:
        text = _read(Path(options.file))
        if options.file.endswith(".jsonl"):
            yield from _json_prompts(text, options.file)
        else:
            yield from _texts(text, options.lines)
    elif not options.given:
        yield from _texts(sys.stdin.read(), options.lines)


def _texts(text: str, lines: bool) -> list[str]:
    return [part for part in (text.splitlines() if lines else [text.removesuffix("\n")]) if part.strip()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--file {path} is not UTF-8 text: {error}") from None


def _json_prompts(text: str, source: str) -> Iterator[Prompt | Conversation]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield _prompt_of(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"{source}, line {number}, is no prompt: {error}") from None


def _prompt_of(value: object) -> Prompt | Conversation:
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        if len(fields.keys() & {"prompt", "messages"}) != 1 or len(fields) != 1:
            raise ValueError('an object must have "prompt" or "messages", and nothing else')
        [value] = fields.values()
    if isinstance(value, str) or is_conversation(value) or _are_ids(value):
        return cast(Prompt | Conversation, value)
    raise ValueError("it is neither a text, nor a list of token ids, nor a list of messages")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in cast(list[object], value))


def write(llm: LLM, prompts: Sequence[Prompt | Conversation], sampling: Mapping[str, Any], *, as_json: bool) -> None:
    """Runs the prompts and prints their outputs: as they come if there is one, else in order."""
    if len(prompts) == 1 and not as_json and sampling.get("n", 1) == 1:
        for step in llm.stream(prompts[0], sampling_of(llm, sampling, chat=is_conversation(prompts[0]))):
            print(step.new_text, end="", flush=True)
        print()
        return
    for output in _outputs(llm, prompts, sampling):
        if as_json:
            print(msgspec.json.encode(output).decode(), flush=True)
        else:
            print(*(sample.text for sample in output.outputs), sep="\n", flush=True)


def _outputs(
    llm: LLM, prompts: Sequence[Prompt | Conversation], sampling: Mapping[str, Any]
) -> Iterator[RequestOutput]:
    """All outputs, in the order of the prompts."""
    texts = [cast(Prompt, prompt) for prompt in prompts if not is_conversation(prompt)]
    chats = [prompt for prompt in prompts if is_conversation(prompt)]
    continued = iter(llm.generate(texts, sampling_of(llm, sampling, chat=False)))
    answered = iter(llm.chat(chats, sampling_of(llm, sampling, chat=True)))
    return (next(answered if is_conversation(prompt) else continued) for prompt in prompts)


def sampling_given(given: Given) -> dict[str, Any]:
    """The sampling values of a command line. Raises InvalidRequest if one is out of range, before a model loads."""
    values = given.part("sampling")
    alone: dict[str, Any] = {"max_tokens": None, **values}
    SamplingParams(**alone)
    return values


def sampling_of(llm: LLM, given: Mapping[str, Any], *, chat: bool) -> SamplingParams:
    """The model's default sampling, with the values given. Raises InvalidRequest if they do not go together."""
    return msgspec.structs.replace(llm.default_sampling(chat=chat), **given)
