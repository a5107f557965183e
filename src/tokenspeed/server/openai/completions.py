"""POST /v1/completions: prompts as text or ids, continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from starlette.types import ASGIApp

from tokenspeed.server.endpoint import Call
from tokenspeed.server.openai.completion_writer import CompletionStyle, CompletionWriter
from tokenspeed.server.openai.logprobs import TokenNames
from tokenspeed.server.openai.prompts import check_length, engine_requests
from tokenspeed.server.openai.protocol import CompletionRequest, check_refused
from tokenspeed.server.openai.response import GenerationResponse, Head, UsageReport
from tokenspeed.server.openai.sampling import check_logprobs, sampling_params
from tokenspeed.server.state import Served, ServerState
from tokenspeed.types import InvalidRequest, SamplingParams

MAX_PROMPTS = 1024
"""Most prompts in one request."""

MAX_SAMPLES = 2048
"""Most samples of all prompts of one request."""

DEFAULT_MAX_TOKENS = 16


def answer_completion(state: ServerState, call: Call) -> ASGIApp:
    """The response to a request for completions."""
    served = state.served
    check_refused(call.body)
    request = call.body.into(CompletionRequest)
    state.check_model(request.model)
    report = UsageReport.of(state, request)
    sampling = _sampling(state, served, request)
    given = _prompts(request.prompt)
    if len(given) * request.n > MAX_SAMPLES:
        raise InvalidRequest(
            f"{len(given)} prompts with n={request.n} are more than {MAX_SAMPLES} samples; send several requests",
            param="n",
        )
    encoded = [_encode(served, request, prompt) for prompt in given]
    requests = engine_requests(served, call, request, encoded, sampling, "prompt")
    prompts = [samples[0].prompt_ids for samples in requests]
    style = CompletionStyle(
        echoes=[_text(served, request, *pair) for pair in zip(given, prompts, strict=True)] if request.echo else None,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=request.return_token_ids,
    )
    names = TokenNames(served.text.tokenizer, as_ids=request.return_tokens_as_token_ids)
    writer = CompletionWriter(Head.of("cmpl", state, call, request), style, names, prompts, request.n)
    return GenerationResponse(state, requests, request.n, writer, report if request.stream else None)


def _sampling(state: ServerState, served: Served, request: CompletionRequest) -> SamplingParams:
    check_logprobs("logprobs", request.logprobs)
    if request.best_of not in (None, 1, request.n):
        raise InvalidRequest(
            f"best_of={request.best_of} is not supported: all n samples are returned; leave it out", param="best_of"
        )
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return sampling_params(
        request,
        defaults=served.text.defaults,
        config=state.config,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=_scored(request),
    )


def _scored(request: CompletionRequest) -> int | None:
    """Alternatives for each prompt token: what the echo shows or the request asks for; 0 where nothing is generated."""
    echoed = request.logprobs if request.echo else None
    counts = [count for count in (echoed, request.prompt_logprobs) if count is not None]
    if not counts and request.echo and request.max_tokens == 0:
        return 0
    return max(counts, default=None)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One or many prompts, each text or ids."""
    many: list[str | list[int]]
    if isinstance(prompt, str):
        many = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        many = [cast(list[int], prompt)]
    elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        many = cast(list[str | list[int]], prompt)
    else:
        raise InvalidRequest("prompt must be a text, token ids, a list of texts or a list of token ids", param="prompt")
    if not 1 <= len(many) <= MAX_PROMPTS:
        raise InvalidRequest(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(many)}", param="prompt")
    if not all(many):
        raise InvalidRequest("prompt must not be empty", param="prompt")
    return many


def _encode(served: Served, request: CompletionRequest, prompt: str | list[int]) -> Sequence[int]:
    if not isinstance(prompt, str):
        return prompt
    check_length(prompt, request, served.limits, "prompt")
    return served.encoder.encode(prompt, add_special_tokens=request.add_special_tokens)


def _text(served: Served, request: CompletionRequest, given: str | list[int], used: Sequence[int]) -> str:
    """What is echoed: a text as it was given, unless the prompt is ids or was cut."""
    if isinstance(given, str) and request.truncate_prompt_tokens is None:
        return given
    return served.text.tokenizer.decode(used, skip_special_tokens=request.skip_special_tokens)
