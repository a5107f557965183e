"""POST /tokenize and /detokenize: text to ids and back, as prompts of the other routes are encoded."""

from __future__ import annotations

from starlette.types import ASGIApp

from tokenspeed.server.endpoint import Call, json_response
from tokenspeed.server.openai.chat_prompt import render
from tokenspeed.server.openai.protocol import (
    DetokenizedPrompt,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    Tokens,
    check_refused,
)
from tokenspeed.server.state import ServerState
from tokenspeed.types import InvalidRequest


def answer_tokenize(state: ServerState, call: Call) -> ASGIApp:
    """The ids of a prompt, or of a conversation."""
    served = state.served
    check_refused(call.body)
    request: TokenizeRequest | TokenizeChatRequest
    if "messages" in call.body.fields:
        request = call.body.into(TokenizeChatRequest)
        state.check_model(request.model)
        ids = served.encoder.encode(render(served, request), add_special_tokens=request.add_special_tokens)
    else:
        request = call.body.into(TokenizeRequest)
        state.check_model(request.model)
        ids = served.encoder.encode(request.prompt, add_special_tokens=request.add_special_tokens)
    spellings = [served.text.tokenizer.spelling(token_id) for token_id in ids] if request.return_token_strs else None
    return json_response(Tokens(len(ids), served.limits.max_model_len, list(ids), spellings))


def answer_detokenize(state: ServerState, call: Call) -> ASGIApp:
    """The text of ids, special tokens included."""
    check_refused(call.body)
    request = call.body.into(DetokenizeRequest)
    state.check_model(request.model)
    try:
        text = state.served.text.tokenizer.decode(request.tokens, skip_special_tokens=False)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param="tokens") from None
    return json_response(DetokenizedPrompt(text))
