"""Prompts and conversations, in whatever form the library was given them, to prompts that can run."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict, TypeGuard, cast

from tokenspeed.text.chat_messages import Message
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.text.incremental import IncrementalEncoder
from tokenspeed.text.outputs import PromptOutputs
from tokenspeed.text.requests import make_requests
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import InvalidRequest, RunnerLimits, SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids, which are used as they are."""

Conversation = Sequence[Message]
"""Messages as in the OpenAI API, the oldest first."""


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool
    """End the prompt where the answer begins. Default: yes, unless `continue_final_message`."""
    continue_final_message: bool
    """Leave the last message open, so that the model goes on with it. Default: no."""
    tools: Sequence[Mapping[str, Any]]
    """Functions with their JSON schemas, as in the OpenAI API, for the chat template."""
    chat_template_kwargs: Mapping[str, Any]
    """More variables for the chat template, e.g. `{"enable_thinking": False}`."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    given = list(prompts)
    return [cast(Sequence[int], given)] if given and isinstance(given[0], Integral) else cast(list[Prompt], given)


def conversation_list(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or several, as a list."""
    if is_conversation(messages):
        return [messages]
    return list(cast(Sequence[Conversation], messages))


def is_conversation(given: object) -> TypeGuard[Conversation]:
    """Whether this is a list of messages, and not a prompt."""
    if not isinstance(given, Sequence):
        return False
    items = cast(Sequence[object], given)
    return bool(items) and isinstance(items[0], Mapping)


class PromptReader:
    """Makes prompts that can run of what a model was asked. Threads may share it.

    Args:
      chat_template: None if the model has none.
      eos_ids: ids that end its output.
      limits: what its engine can hold.
    """

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, eos_ids: tuple[int, ...], limits: RunnerLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = IncrementalEncoder(tokenizer)
        self._chat_template = chat_template
        self._eos_ids = eos_ids
        self._limits = limits
        self._count = itertools.count()

    def plain(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[PromptOutputs]:
        """Prompts to continue. Raises InvalidRequest if one of them cannot run."""
        params = _one_each(sampling, len(prompts))
        return [self._plain(prompt, how) for prompt, how in zip(prompts, params, strict=True)]

    def conversations(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams],
        options: ChatOptions,
    ) -> list[PromptOutputs]:
        """Conversations to answer. Raises InvalidRequest if there is no template, or one of them cannot run."""
        params = _one_each(sampling, len(conversations))
        return [self._chat(messages, how, options) for messages, how in zip(conversations, params, strict=True)]

    def _plain(self, prompt: Prompt, sampling: SamplingParams) -> PromptOutputs:
        if isinstance(prompt, str):
            return self._outputs(prompt, self._encoder.encode(prompt), sampling)
        return self._outputs(None, _ids(prompt), sampling)

    def _chat(self, messages: Conversation, sampling: SamplingParams, options: ChatOptions) -> PromptOutputs:
        if self._chat_template is None:
            raise InvalidRequest(
                "this model has no chat template; give LLM one with chat_template=, or use generate", param="messages"
            )
        continues = options.get("continue_final_message", False)
        prompt = self._chat_template.render(
            messages,
            add_generation_prompt=options.get("add_generation_prompt", not continues),
            continue_final_message=continues,
            tools=options.get("tools"),
            kwargs=options.get("chat_template_kwargs"),
        )
        return self._outputs(prompt, self._encoder.encode(prompt, add_special_tokens=False), sampling)

    def _outputs(self, text: str | None, prompt_ids: Sequence[int], sampling: SamplingParams) -> PromptOutputs:
        request_id = str(next(self._count))
        requests = make_requests(request_id, prompt_ids, sampling, limits=self._limits, eos_ids=self._eos_ids)
        return PromptOutputs(request_id, text, requests, sampling.n, self._tokenizer)


def _one_each(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """The sampling of each of `count` prompts."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if len(sampling) != count:
        raise InvalidRequest(
            f"{len(sampling)} SamplingParams were given for {count} prompts; give one for all, or one each",
            param="sampling",
        )
    return list(sampling)


def _ids(prompt: Sequence[int]) -> list[int]:
    """Token ids as plain integers."""
    try:
        return [operator.index(token_id) for token_id in prompt]
    except TypeError as error:
        raise InvalidRequest(f"a prompt must be text or a list of token ids ({error})", param="prompt") from None
