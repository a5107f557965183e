"""From a prompt's ids to the engine's requests, and what a prompt may not be."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.server.endpoint import Call
from tokenspeed.server.openai.protocol import GenerateOptions
from tokenspeed.server.state import Served
from tokenspeed.text.requests import context_tokens, make_requests
from tokenspeed.types import InvalidRequest, Request, RunnerLimits, SamplingParams

MAX_TOKEN_CHARACTERS = 256
"""No tokenizer has a token that stands for more text."""

_INT32 = range(-(2**31), 2**31)


def engine_requests(
    served: Served,
    call: Call,
    options: GenerateOptions,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    param: str,
) -> list[list[Request]]:
    """For each prompt the engine's requests that serve its samples.

    Raises:
      InvalidRequest: a prompt or the sampling cannot be served; the prompt's field is called `param`.
    """
    _check_options(options)
    try:
        return [
            make_requests(
                f"{call.own_id}-{index}",
                truncated(prompt, options, served.limits),
                sampling,
                limits=served.limits,
                eos_ids=served.text.eos_ids,
                arrival_time=call.arrival_time,
                priority=options.priority,
                cache_salt=options.cache_salt,
            )
            for index, prompt in enumerate(prompts)
        ]
    except InvalidRequest as error:
        if error.param != "prompt":
            raise
        raise InvalidRequest(str(error), param=param, code=error.code) from None


def _check_options(options: GenerateOptions) -> None:
    if options.stream and options.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs are not available when stream=true", param="prompt_logprobs")
    if options.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty; leave it out to share prefixes", param="cache_salt")
    if options.priority not in _INT32:
        raise InvalidRequest(f"priority must fit in 32 bits, got {options.priority}", param="priority")


def truncated(prompt: Sequence[int], options: GenerateOptions, limits: RunnerLimits) -> Sequence[int]:
    """The end of a prompt, or its beginning, as `truncate_prompt_tokens` asks; -1 leaves room for one token of output."""
    most = options.truncate_prompt_tokens
    if most is None:
        return prompt
    if most < -1 or most == 0:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at least 1, or -1 for all that fits, got {most}",
            param="truncate_prompt_tokens",
        )
    kept = context_tokens(limits) - 1 if most == -1 else most
    return prompt[-kept:] if options.truncation_side == "left" else prompt[:kept]


def check_length(text: str, options: GenerateOptions, limits: RunnerLimits, param: str) -> None:
    """Raises InvalidRequest if a text is too long for the context however it is encoded, so that it need not be."""
    least, most = len(text) // MAX_TOKEN_CHARACTERS, context_tokens(limits)
    if least > most and options.truncate_prompt_tokens is None:
        raise InvalidRequest(
            f"This model's maximum context length is {most} tokens. However, your prompt contains at least {least} "
            "input tokens; shorten it.",
            param=param,
            code="context_length_exceeded",
        )
