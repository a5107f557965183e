"""From a conversation to a prompt's ids, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.server.openai.protocol import ChatPrompt, Message
from tokenspeed.server.state import Served
from tokenspeed.types import InvalidRequest


def render(served: Served, prompt: ChatPrompt) -> str:
    """The text of a conversation. Tools are shown unless `tool_choice` is none.

    Raises:
      InvalidRequest: the model has no chat template, the template refuses the messages, or they hold what is no text.
    """
    template = served.text.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template; start the server with --chat-template, or use completions"
        )
    return template.render(
        [_message(message) for message in prompt.messages],
        tools=None if prompt.tool_choice == "none" else prompt.tools,
        documents=prompt.documents,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        kwargs=_variables(prompt),
    )


def check_tools(prompt: ChatPrompt) -> None:
    """Raises InvalidRequest if an answer could call a tool, which nobody would parse."""
    choice = prompt.tool_choice
    if choice not in (None, "none", "auto"):
        known = isinstance(choice, dict) or choice == "required"
        what = "tool_choice is not supported: calls of tools are not available" if known else "tool_choice is unknown"
        raise InvalidRequest(f"{what}; use none", param="tool_choice")
    if prompt.tools and choice != "none":
        raise InvalidRequest(
            "tools is not supported: calls of tools are not available; leave it out, or set tool_choice to none",
            param="tools",
        )


def _variables(prompt: ChatPrompt) -> Mapping[str, Any]:
    """What the template gets beside the messages: reasoning_effort is a variable, and its "none" turns thinking off."""
    effort = prompt.reasoning_effort
    if effort is None:
        return prompt.chat_template_kwargs
    switch: dict[str, Any] = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return {**switch, **prompt.chat_template_kwargs}


def _message(message: Message) -> dict[str, Any]:
    """A message as it came."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
