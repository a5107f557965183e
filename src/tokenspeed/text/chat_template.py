"""Conversations to prompts, by the Jinja template that a model ships."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed.text.chat_messages import Message, MessageForm, without_nulls
from tokenspeed.text.tokenizer import read_json, special_tokens
from tokenspeed.types import ConfigError, InvalidRequest
from tokenspeed.weights.gguf import GGUFFile

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the last message ends in the prompt; its space tells whether the template trims the message."""

_TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise when messages do not fit it."""


class _Raised(TemplateError):
    """The template refused the messages by itself."""


class _GenerationTag(Extension):
    """`{% generation %}`, which marks what a model is trained to write; it prints what it holds."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates may change nothing but lists, which some use as queues. They get copies, so this stays their own affair."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> _Sandbox:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    sandbox.filters["tojson"] = _to_json
    return sandbox


_ENVIRONMENT = _environment()
_FUNCTIONS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class _Source:
    """One template, and how it reads messages."""

    def __init__(self, text: str, name: str, constants: Mapping[str, str]) -> None:
        try:
            syntax = _ENVIRONMENT.parse(text)
            self._template = _ENVIRONMENT.from_string(text, globals=_FUNCTIONS)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template of {name} has a mistake in line {error.lineno}: {error}") from error
        self._constants = constants
        form = MessageForm(content_parts=_goes_through_content(syntax), developer="developer" in text)
        self.form = next((f for f in _call_forms(form) if self._shows_calls(f)), form)

    def render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        return self._template.render(messages=messages, **{**self._constants, **variables})

    def _shows_calls(self, form: MessageForm) -> bool:
        """Whether a tool call in this form comes out, and not as Python writes a dictionary."""
        variables = {"tools": [_PROBE_TOOL], "documents": None, "add_generation_prompt": False}
        try:
            text = self.render(form.messages(_PROBE), variables)
        except _TEMPLATE_FAILURES:
            return False
        return "probe" in text and "{'probe'" not in text


def _call_forms(form: MessageForm) -> Iterator[MessageForm]:
    """The forms that tool calls can have, the usual first."""
    for without_content in (False, True):
        for as_text in (False, True):
            yield form._replace(arguments_as_text=as_text, calls_without_content=without_content)


_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"probe": 1}'}}
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_PROBE: list[Message] = [
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "t"},
]


def _goes_through_content(syntax: nodes.Template) -> bool:
    """Whether a template has a loop over a message's content, or over a variable or parameter that holds it."""
    held = {"content"}
    for assignment in syntax.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, held):
            held.add(assignment.target.name)
    return any(_is_content(loop.iter, held) for loop in syntax.find_all(nodes.For))


def _is_content(node: nodes.Node | None, held: set[str]) -> bool:
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, held)
    if isinstance(node, nodes.Name):
        return node.name in held
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


class ChatTemplate:
    """A model's chat template.

    Args:
      templates: by name; `default` is used, or `tool_use` where tools are given and it exists.
      special_tokens: variables such as `bos_token`.
      source: where it comes from, for errors.

    Attributes:
      text: the default template.
      form: how it reads messages.

    Raises:
      ConfigError: a template has a syntax error.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        self._sources = {name: _Source(text, source, special_tokens) for name, text in templates.items()}
        self.text = templates["default"]
        self.form = self._sources["default"].form

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt, special tokens included: encode it with `add_special_tokens=False`.

        Args:
          tools: functions in OpenAI's wrapper.
          documents: dictionaries with `title` and `text`, for templates that cite.
          add_generation_prompt: end the prompt where the answer begins.
          continue_final_message: end the prompt inside the last message, so that the model goes on with it.
          kwargs: more variables for the template.

        Raises:
          InvalidRequest: the messages do not fit the template; its own words if it has any.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
            )
        variables: dict[str, Any] = {
            "tools": [without_nulls(tool) for tool in tools] if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        for name in kwargs or {}:
            if name in variables or name == "messages":
                raise InvalidRequest(f"{name} is a field of the request itself", param=f"chat_template_kwargs.{name}")
        return self._render(messages, {**variables, **(kwargs or {})}, continue_final_message)

    def _render(self, messages: Sequence[Message], variables: dict[str, Any], continues: bool) -> str:
        source = self._sources["default"]
        if variables["tools"]:
            source = self._sources.get("tool_use", source)
        made = source.form.messages(messages)
        if continues:
            _mark_end(made[-1])
        try:
            prompt = source.render(made, variables)
        except _Raised as error:
            raise InvalidRequest(str(error), param="messages") from error
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from error
        return _cut_at_mark(prompt) if continues else prompt


def _mark_end(message: dict[str, Any]) -> None:
    """Puts the mark at the end of a message's text."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUED
    elif content:
        content[-1]["text"] += _CONTINUED
    else:
        raise InvalidRequest("continue_final_message needs a last message with text", param="continue_final_message")


def _cut_at_mark(prompt: str) -> str:
    at = prompt.rfind(_CONTINUED.strip())
    if at < 0:
        raise InvalidRequest(
            "the model's chat template leaves out the last message, so it cannot be continued",
            param="continue_final_message",
        )
    trims = not prompt.startswith(_CONTINUED, at)
    return prompt[:at].rstrip() if trims else prompt[:at]


def load_chat_template(path: Path, override: str | None = None) -> ChatTemplate | None:
    """The chat template of a model, or None if it has none.

    Args:
      path: the model's folder, a file in it, or a GGUF file.
      override: another template: a file, or its text.

    Raises:
      ConfigError: the override is no file and no template, a file is damaged, or the template has a syntax error.
    """
    if path.suffix == ".gguf":
        templates, tokens = _of_gguf(path)
    else:
        folder = path if path.is_dir() else path.parent
        templates, tokens = _of_folder(folder), special_tokens(folder)
    if override is not None:
        templates = {"default": _given(override)}
    if "default" not in templates:
        return None
    return ChatTemplate(templates, tokens, str(path) if override is None else "--chat-template")


def _given(override: str) -> str:
    if any(mark in override for mark in ("{{", "{%", "\n")):
        return override
    return _read(Path(override).expanduser(), f"--chat-template {override} is no template, and as a file it")


def _of_folder(folder: Path) -> dict[str, str]:
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    templates = {name: _read(file, str(file)) for name, file in files.items() if file.is_file()}
    if "default" in templates:
        return templates
    named = read_json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(named, list):
        return {str(entry.get("name")): str(entry.get("template")) for entry in named if isinstance(entry, Mapping)}
    return {"default": named} if isinstance(named, str) else {}


def _read(file: Path, name: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error


def _of_gguf(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    metadata = GGUFFile(path, header_only=True).metadata
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default"] = value
    tokens, named = metadata.get("tokenizer.ggml.tokens"), dict[str, str]()
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(tokens, list) and isinstance(token_id, int) and 0 <= token_id < len(tokens):
            named[f"{ours}_token"] = tokens[token_id]
    return templates, named
