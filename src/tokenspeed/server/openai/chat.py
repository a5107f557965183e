"""POST /v1/chat/completions: a conversation, and the model's next message."""

from __future__ import annotations

from starlette.types import ASGIApp

from tokenspeed.server.endpoint import Call
from tokenspeed.server.openai.chat_prompt import check_tools, render
from tokenspeed.server.openai.chat_writer import ChatStyle, ChatWriter
from tokenspeed.server.openai.logprobs import TokenNames
from tokenspeed.server.openai.prompts import check_length, engine_requests
from tokenspeed.server.openai.protocol import ChatOptions, ChatPrompt, Message, check_refused
from tokenspeed.server.openai.response import GenerationResponse, Head, UsageReport
from tokenspeed.server.openai.sampling import check_logprobs, sampling_params
from tokenspeed.server.state import Served, ServerState
from tokenspeed.types import InvalidRequest, SamplingParams


def answer_chat(state: ServerState, call: Call) -> ASGIApp:
    """The response to a request for the next message."""
    served = state.served
    check_refused(call.body)
    options, prompt = call.body.into(ChatOptions), call.body.into(ChatPrompt)
    state.check_model(options.model)
    report = UsageReport.of(state, options)
    sampling = _sampling(state, served, options)
    check_tools(prompt)
    text = render(served, prompt)
    check_length(text, options, served.limits, "messages")
    ids = served.encoder.encode(text, add_special_tokens=prompt.add_special_tokens)
    requests = engine_requests(served, call, options, [ids], sampling, "messages")
    role = state.config.response_role if prompt.add_generation_prompt else prompt.messages[-1].role
    style = ChatStyle(
        role=role,
        echo=_echo(prompt.messages[-1], role) if options.echo else "",
        top_logprobs=sampling.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        token_ids=options.return_token_ids,
    )
    names = TokenNames(served.text.tokenizer, as_ids=options.return_tokens_as_token_ids)
    head = Head.of("chatcmpl", state, call, options)
    writer = ChatWriter(head, style, names, requests[0][0].prompt_ids, options.n)
    return GenerationResponse(state, requests, options.n, writer, report if options.stream else None)


def _sampling(state: ServerState, served: Served, options: ChatOptions) -> SamplingParams:
    if options.top_logprobs is not None and not options.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    check_logprobs("top_logprobs", options.top_logprobs)
    return sampling_params(
        options,
        defaults=served.text.defaults,
        config=state.config,
        max_tokens=_max_tokens(served, options),
        logprobs=(options.top_logprobs or 0) if options.logprobs else None,
        prompt_logprobs=options.prompt_logprobs,
    )


def _max_tokens(served: Served, options: ChatOptions) -> int | None:
    """The newer field wins over the older one, and both over the model's own limit."""
    for name, asked in (
        ("max_completion_tokens", options.max_completion_tokens),
        ("max_tokens", options.max_tokens),
    ):
        if asked is not None and asked < 1:
            raise InvalidRequest(f"{name} must be at least 1, got {asked}", param=name)
        if asked is not None:
            return asked
    return served.text.defaults.max_new_tokens


def _echo(message: Message, role: str) -> str:
    """The last message's text, if it is of the role that goes on."""
    if message.role != role or message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part if isinstance(part, str) else str(part.get("text", "")) for part in message.content)
