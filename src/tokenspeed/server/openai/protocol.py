"""OpenAI's JSON as typed structs: what a request may say, what is refused by name, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.server.body import JsonBody
from tokenspeed.types import InvalidRequest, Usage

IGNORED = frozenset(
    {
        "metadata",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that are accepted and mean nothing to a server of one model on one machine."""


class Refusal(NamedTuple):
    """A known field whose capability is absent.

    Attributes:
      why: what is missing.
      harmless: values that ask for nothing, beside the empty ones; if true is one, false is none.
    """

    why: str
    harmless: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        """Whether a value asks for nothing. True is not 1 here, nor false 0."""
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless):
            return True
        return not value and not any(one is True for one in self.harmless)


_CONSTRAINED = Refusal("constrained decoding is not available")
_BEAM = Refusal("beam search is not available", (1.0,))

REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal("this server produces text only"),
    "bad_words": Refusal("banning words is not available; use logit_bias or allowed_token_ids"),
    "beam_width": _BEAM,
    "chat_template": Refusal("templates are not taken from requests; start the server with --chat-template"),
    "custom_logit_processor": Refusal("logit processors are not available"),
    "detokenize": Refusal("output is always text; use return_token_ids for the ids", (True,)),
    "early_stopping": _BEAM,
    "ebnf": _CONSTRAINED,
    "function_call": Refusal("use tools and tool_choice", ("none", "auto")),
    "functions": Refusal("use tools"),
    "grammar": _CONSTRAINED,
    "guided_choice": _CONSTRAINED,
    "guided_decoding_backend": _CONSTRAINED,
    "guided_grammar": _CONSTRAINED,
    "guided_json": _CONSTRAINED,
    "guided_regex": _CONSTRAINED,
    "guided_whitespace_pattern": _CONSTRAINED,
    "include_reasoning": Refusal("reasoning is not separated from the content, so it cannot be left out", (True,)),
    "json_schema": _CONSTRAINED,
    "length_penalty": _BEAM,
    "logits_processors": Refusal("logit processors are not available"),
    "lora_path": Refusal("adapters are not available"),
    "mm_processor_kwargs": Refusal("this server takes text only"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "regex": _CONSTRAINED,
    "repetition_detection": Refusal("repetition detection is not available; use repetition_penalty"),
    "response_format": Refusal("only text is available; constrained decoding is not", ({"type": "text"},)),
    "return_hidden_states": Refusal("hidden states are not available"),
    "spaces_between_special_tokens": Refusal("special tokens are joined as the tokenizer joins them", (True,)),
    "structural_tag": _CONSTRAINED,
    "structured_outputs": _CONSTRAINED,
    "suffix": Refusal("this model cannot fill in the middle"),
    "thinking_token_budget": Refusal("reasoning is not separated from the content, so it cannot be limited"),
    "use_beam_search": _BEAM,
    "web_search_options": Refusal("web search is not available"),
}
"""Fields of OpenAI, vLLM and SGLang that would change the answer and cannot be honoured."""


def check_refused(body: JsonBody) -> None:
    """Raises InvalidRequest naming the first field that asks for an absent capability."""
    body.know(IGNORED | REFUSED.keys())
    for name, value in body.fields.items():
        if name in REFUSED and not REFUSED[name].allows(value):
            raise InvalidRequest(f"{name} is not supported: {REFUSED[name].why}", param=name)


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream reports beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateOptions(msgspec.Struct, kw_only=True):
    """Fields that chat and completions share. None means the model's or the engine's default."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    echo: bool = False


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatPrompt(msgspec.Struct, kw_only=True):
    """Fields that say how a conversation becomes a prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    documents: list[dict[str, Any]] = []
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class ChatOptions(GenerateOptions, kw_only=True):
    """Fields of POST /v1/chat/completions beside those of ChatPrompt."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionRequest(GenerateOptions, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize that names a prompt."""

    model: str = ""
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(ChatPrompt, kw_only=True):
    """The body of POST /tokenize that names messages."""

    model: str = ""
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    model: str = ""
    tokens: list[int]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageObject(msgspec.Struct, frozen=True):
    """Token counts of a request: each prompt once, the outputs of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> UsageObject:
        return cls(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            PromptTokensDetails(usage.cached_tokens),
        )


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token that was chosen, and the most likely ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class PromptLogprob(msgspec.Struct, frozen=True):
    """A token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One a prompt token, by token id; the first is null."""


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class AssistantMessage(msgspec.Struct, frozen=True):
    role: str
    content: str


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: UsageObject | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/completions, whole or a chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject | UnsetType | None = UNSET
    system_fingerprint: str


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a model's card that old clients read."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tokenspeed"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, frozen=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedPrompt(msgspec.Struct, frozen=True):
    """The answer of /detokenize."""

    prompt: str
