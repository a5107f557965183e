"""From a request's fields to SamplingParams: the request's own values, then the model's defaults, then the engine's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenspeed.config import GenerationDefaults, ServerConfig
from tokenspeed.server.openai.protocol import GenerateOptions
from tokenspeed.types import MAX_LOGPROBS, InvalidRequest, SamplingParams

MAX_LOGIT_BIAS_AMOUNT = 100.0
"""Amounts beyond this are clamped to it."""

_INT32_MAX = 2**31 - 1


def sampling_params(
    options: GenerateOptions,
    *,
    defaults: GenerationDefaults,
    config: ServerConfig,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """How to sample what a request asks for.

    Args:
      max_tokens: None for as many as the context has room for.

    Raises:
      InvalidRequest: a value is out of range; `param` names the field.
    """
    if not 1 <= options.n <= config.max_n:
        raise InvalidRequest(f"n must be in [1, {config.max_n}], got {options.n}", param="n")
    return SamplingParams(
        n=options.n,
        temperature=_first(options.temperature, defaults.temperature, 1.0),
        top_p=_first(options.top_p, defaults.top_p, 1.0),
        top_k=min(_whole("top_k", _first(options.top_k, defaults.top_k, 0)), _INT32_MAX),
        min_p=_first(options.min_p, defaults.min_p, 0.0),
        repetition_penalty=_first(options.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=_logit_bias(options.logit_bias),
        allowed_token_ids=None if options.allowed_token_ids is None else tuple(options.allowed_token_ids),
        seed=None if options.seed == -1 else options.seed,
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        stop=_stop(options.stop, config.max_stop_strings),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        include_stop_str_in_output=options.include_stop_str_in_output,
        skip_special_tokens=options.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def check_logprobs(name: str, count: int | None) -> None:
    """Raises InvalidRequest if a request asks for more alternatives than there are."""
    if count is not None and count > MAX_LOGPROBS:
        raise InvalidRequest(
            f"Requested sample logprobs of {count}, which is greater than max allowed: {MAX_LOGPROBS}", param=name
        )
    if count is not None and count < 0:
        raise InvalidRequest(f"{name} must be at least 0, got {count}", param=name)


def _first(asked: float | None, shipped: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if shipped is None else shipped


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise InvalidRequest(f"{name} must be a whole number, got {value:g}", param=name)
    return int(value)


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    amounts: dict[int, float] = {}
    for key, amount in biases.items():
        if not re.fullmatch("[0-9]{1,18}", key):
            raise InvalidRequest(f"logit_bias has the key {key!r}, which is no token id", param=f"logit_bias.{key}")
        amounts[int(key)] = max(-MAX_LOGIT_BIAS_AMOUNT, min(MAX_LOGIT_BIAS_AMOUNT, amount))
    return amounts


def _stop(stop: str | list[str], most: int) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > most:
        raise InvalidRequest(
            f"stop may have at most {most} strings, got {len(strings)}; --max-stop-strings raises the limit",
            param="stop",
        )
    return strings
