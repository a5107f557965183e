"""From a conversation to a prompt's ids, through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.server.openai.protocol import ChatPrompt, ContentPart, Message
from tokenspeed.server.state import Served
from tokenspeed.types import InvalidRequest

TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
"""Kinds of content parts that are text."""


def encode_chat(served: Served, prompt: ChatPrompt) -> Sequence[int]:
    """The ids of a conversation.

    Raises:
      InvalidRequest: the model has no chat template, the template refuses the messages, or they hold what is no text.
    """
    return served.text.tokenizer.encode(render(served, prompt), add_special_tokens=prompt.add_special_tokens)


def render(served: Served, prompt: ChatPrompt) -> str:
    """The text of a conversation. Raises as `encode_chat` does."""
    template = served.text.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template; start the server with --chat-template, or use completions"
        )
    if not prompt.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if prompt.continue_final_message and prompt.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
        )
    _check_tools(prompt)
    return template.render(
        [_message(index, message) for index, message in enumerate(prompt.messages)],
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        documents=prompt.documents or None,
        chat_template_kwargs=_variables(prompt),
    )


def _check_tools(prompt: ChatPrompt) -> None:
    """Raises InvalidRequest unless no call of a tool can be meant: a model that is not shown tools calls none."""
    choice = prompt.tool_choice
    if choice is None:
        choice = "auto" if prompt.tools else "none"
    if choice not in ("none", "auto"):
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
    switch = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return {**switch, **prompt.chat_template_kwargs}


def _message(index: int, message: Message) -> dict[str, Any]:
    """A message as templates expect it: only what was given, with parts of text only."""
    content = message.content
    if isinstance(content, list):
        content = [_part(f"messages.{index}.content.{place}", part) for place, part in enumerate(content)]
    given = {
        "role": message.role,
        "content": content,
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {key: value for key, value in given.items() if value is not None}


def _part(param: str, part: ContentPart | str) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    text = part.text if part.text is not None else part.refusal
    if part.type not in TEXT_PARTS:
        raise InvalidRequest(f"{param}: this model takes text only, got a part of type {part.type!r}", param=param)
    if text is None:
        raise InvalidRequest(f"{param}.text is required", param=f"{param}.text")
    return {"type": "text", "text": text}
