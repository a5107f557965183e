"""What a chat template sees of a conversation: plain dictionaries in the forms that templates expect."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenspeed.types import InvalidRequest

Message = Mapping[str, Any]
"""A message as in the OpenAI API."""

_PART_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Where each kind of content part that is text holds it."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send an answer's reasoning back; templates read the first or the last."""


class MessageForm(NamedTuple):
    """How a template reads messages.

    Attributes:
      content_parts: it goes through the parts of a content that is a list; else the parts are joined.
      developer: it knows that role; else it becomes `system`.
      arguments_as_text: it prints a tool call's arguments as they are; else they become a dictionary.
      calls_without_content: it shows tool calls only where the content is null; else a missing content is empty.
    """

    content_parts: bool = False
    developer: bool = False
    arguments_as_text: bool = False
    calls_without_content: bool = False

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Copies of the messages, without null values.

        Raises:
          InvalidRequest: a part of a content is not text.
        """
        return [self._message(message, f"messages.{index}") for index, message in enumerate(messages)]

    def _message(self, message: Message, param: str) -> dict[str, Any]:
        made: dict[str, Any] = {key: copy.deepcopy(value) for key, value in message.items() if value is not None}
        made["content"] = self._content(made.get("content", ""), f"{param}.content")
        if made.get("role") == "developer" and not self.developer:
            made["role"] = "system"
        reasoning = next((made[name] for name in _REASONING if name in made), None)
        if reasoning is not None:
            made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
        if "tool_calls" in made:
            made["tool_calls"] = [self._tool_call(call) for call in made["tool_calls"]]
            if not made["tool_calls"]:
                del made["tool_calls"]
            elif self.calls_without_content:
                made["content"] = made["content"] or None
        return made

    def _content(self, content: Any, param: str) -> str | list[dict[str, str]]:
        if not isinstance(content, (list, tuple)):
            return content
        texts = [_part_text(part, f"{param}.{index}") for index, part in enumerate(content)]
        return [{"type": "text", "text": text} for text in texts] if self.content_parts else "\n".join(texts)

    def _tool_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping):
            return dict(call)
        arguments = function.get("arguments")
        given = _as_text(arguments) if self.arguments_as_text else _as_object(arguments)
        return {**call, "function": {**function, "arguments": given}}


def _part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(_PART_TEXT[kind]) if kind in _PART_TEXT else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} is a part of type {kind!r}; this model reads text only", param=param)
    return text


def _as_object(arguments: Any) -> Any:
    """A tool call's arguments as a dictionary; text that is none is kept, since a call may have been cut off."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without the null values around its schema; inside the schema a null means something."""
    made = {key: value for key, value in tool.items() if value is not None}
    if isinstance(function := made.get("function"), Mapping):
        made["function"] = {key: value for key, value in function.items() if value is not None}
    return made
