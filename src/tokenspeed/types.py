"""What crosses a border: requests, schedules, step results, token deltas and the outputs a user sees.

This module is a leaf. Everything here is frozen; wire types are `msgspec` structs so that one encode a step
carries them between the engine's process and the server's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
"""Most alternatives a logprobs request may ask for; the width of the device's top-k output."""

MAX_LOGIT_BIAS = 512
"""Most entries of one request's `logit_bias`; the width of its row in the device's sampling state."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy."""

NO_TOKEN = -1
"""In `Schedule.token_ids`: take the slot's last sampled token. In `StepResult.token_ids`: the row sampled nothing."""


class TokenspeedError(Exception):
    """Any failure a user can cause. Its text is one sentence that says what is wrong and what to do."""


class ConfigError(TokenspeedError):
    """A flag, a file or a model that cannot be used."""


class InvalidRequest(TokenspeedError):
    """A request that cannot be served as asked.

    Args:
      message: what is wrong, with the value and the remedy.
      param: dotted path of the offending field, if one is to blame.
      code: machine-readable code, e.g. `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(TokenspeedError):
    """The queue is full; try again later."""


class EngineDead(TokenspeedError):
    """The engine stopped because of an internal error; its text is the cause."""


def _finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value}", param=name)


def _between(name: str, value: float, low: float, high: float) -> None:
    _finite(name, value)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low:g}, {high:g}], got {value:g}", param=name)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. Names, ranges and meanings are vLLM's.

    Order of application: allowed and banned ids, `min_tokens`, `logit_bias`, repetition, frequency and presence
    penalties, greedy argmax or temperature, `min_p`, `top_k`, `top_p`, sample. Log-probabilities are those of the raw
    logits.

    Raises:
      InvalidRequest: a value is out of range; `param` names the field.
    """

    n: int = 1
    """Samples for one prompt; sample k uses seed + k."""
    temperature: float = 1.0
    """In [0, 2]; below 1e-5 greedy."""
    top_p: float = 1.0
    """In (0, 1]: the smallest set of tokens whose mass reaches it, computed after top_k."""
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    """In [0, 1]: least probability relative to the most likely token's."""
    repetition_penalty: float = 1.0
    """Above 0; over prompt and output tokens."""
    presence_penalty: float = 0.0
    """In [-2, 2]; over output tokens."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; over output tokens."""
    logit_bias: Mapping[int, float] = {}
    """Token id to an amount in [-100, 100] (clamped) added to its logit; at most 512 entries."""
    allowed_token_ids: tuple[int, ...] | None = None
    """If given, only these ids may be chosen."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids never chosen."""
    seed: int | None = None
    """int64. The same seed gives the same tokens whatever else is in the batch. None: drawn by the engine."""
    max_tokens: int | None = 16
    """At least 1 (0 where only prompt log-probabilities are wanted); None: as many as the context has room for."""
    min_tokens: int = 0
    """No end of sequence, stop id or stop string before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; the earliest match wins, and the text before it is returned."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """Alternatives reported for each output token (0: the chosen token only)."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens; the first has none."""

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0.0, 2.0)
        _finite("top_p", self.top_p)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p:g}", param="top_p")
        if self.top_k < -1:
            raise InvalidRequest(f"top_k must be -1 or 0 (off), or at least 1, got {self.top_k}", param="top_k")
        _between("min_p", self.min_p, 0.0, 1.0)
        _finite("repetition_penalty", self.repetition_penalty)
        if self.repetition_penalty <= 0.0:
            raise InvalidRequest(
                f"repetition_penalty must be greater than zero, got {self.repetition_penalty:g}",
                param="repetition_penalty",
            )
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.n < 1:
            raise InvalidRequest(f"n must be at least 1, got {self.n}", param="n")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias may have at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", param="logit_bias"
            )
        for key, value in self.logit_bias.items():
            _finite(f"logit_bias.{key}", value)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids must not be empty; leave it out to allow all", param="allowed_token_ids"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise InvalidRequest(f"seed must fit in 64 bits, got {self.seed}", param="seed")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 1, got {self.max_tokens}", param="max_tokens")
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise InvalidRequest(
                "max_tokens must be at least 1; 0 is for scoring a prompt with prompt_logprobs", param="max_tokens"
            )
        if self.min_tokens < 0:
            raise InvalidRequest(f"min_tokens must be at least 0, got {self.min_tokens}", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}", param="min_tokens"
            )
        if any(not text for text in self.stop):
            raise InvalidRequest("stop cannot contain an empty string", param="stop")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise InvalidRequest(
                    f"Requested {name} of {count}, which is greater than max allowed: {MAX_LOGPROBS}"
                    if count > 0
                    else f"{name} must be at least 0, got {count}",
                    param=name,
                )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidRequest if an id named here is not in [0, vocab_size)."""
        named = (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("banned_token_ids", self.banned_token_ids),
            ("stop_token_ids", self.stop_token_ids),
        )
        for name, ids in named:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name} names token id {token_id}, which is not in the vocabulary [0, {vocab_size})",
                        param=f"{name}.{token_id}" if name == "logit_bias" else name,
                    )


class Request(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One prompt and how to continue it; `sampling.n` is 1 here (a front end splits n > 1 into n requests)."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """At least one id, all inside the vocabulary."""
    sampling: SamplingParams
    eos_ids: tuple[int, ...]
    """Ids that end the output unless `sampling.ignore_eos`."""
    arrival_time: float
    """`time.time()` at the front end, seconds."""
    priority: int = 0
    """Lower runs first."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of the same salt."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token's own, and the most likely ones in falling order."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step added to one request. The last delta of a request carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...]
    """New output ids; an end-of-sequence or stop id is included, and counted."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One an id, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One a prompt id, the first None; on the first delta only."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id of `stop_token_ids` that ended the output; None for end of sequence."""
    num_cached_tokens: int = 0
    """Prompt tokens whose cache was reused."""
    scheduled_time: float = 0.0
    """`time.time()` at which the request was first scheduled, seconds."""
    num_preemptions: int = 0
    """How often the request was put back."""


class StepStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The engine's state after a step, for metrics. Counters are totals since start."""

    time: float
    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_used: int
    """Pages held by live sequences (cached pages nobody uses are not counted)."""
    prefix_queries: int
    """Prompt tokens looked up, total."""
    prefix_hits: int
    """Prompt tokens found, total."""
    num_preemptions: int
    num_steps: int
    step_tokens: int
    """Tokens in this step."""
    step_padding: int
    """Tokens of padding in this step's bucket."""
    step_seconds: float
    """Time from this step's dispatch to its commit."""
    num_compiles: int
    """Backend compilations since the engine was ready."""


class EngineOutput(msgspec.Struct, frozen=True, array_like=True):
    """The one message an engine sends a step."""

    deltas: list[TokenDelta]
    stats: StepStats


class SlotParams(NamedTuple):
    """A slot's sampling state, sent to the device when a sequence takes the slot (first time or resumed)."""

    slot: int
    sampling: SamplingParams
    seed: int
    """uint64 bit pattern, already chosen."""
    stop_ids: tuple[int, ...]
    """End-of-sequence and stop ids, masked until `min_tokens`."""
    prompt_ids: np.ndarray
    """int32 [prompt length]; for the repetition penalty."""
    output_ids: np.ndarray
    """int32 [outputs so far]; empty the first time; for the penalties."""


class PromptScore(NamedTuple):
    """Prompt positions of one scheduled row that must be scored: the log-probability of each next prompt token."""

    row: int
    start: int
    """First flat index in `Schedule.token_ids` whose next token is scored."""
    target_ids: np.ndarray
    """int32 [count]: the next prompt token of each of those positions."""


class Schedule(NamedTuple):
    """One step's work, decided on the host with integers only. Rows are sequences, tokens are flat, rows in order.

    Rows that decode (one token, its id NO_TOKEN) come first, then those that prefill (known ids); kernels rely on it.
    Of several `page_updates` for one entry all name the same page, so they may be applied in any order.

    Shapes: T tokens, B rows, U page-table updates.
    """

    step_id: int
    token_ids: np.ndarray
    """int32 [T]; NO_TOKEN: the slot's last sampled token, which only the device knows yet."""
    positions: np.ndarray
    """int32 [T]"""
    cu_q_lens: np.ndarray
    """int32 [B + 1]"""
    kv_lens: np.ndarray
    """int32 [B]: context length of each row once this step's tokens are in the cache."""
    slots: np.ndarray
    """int32 [B]"""
    samples: np.ndarray
    """bool [B]: whether the row's last token is followed by a sampled one."""
    output_positions: np.ndarray
    """int32 [B]: how many output tokens the row's sequence had before this step's; counts for the random numbers."""
    page_updates: np.ndarray
    """int32 [U, 3]: (slot, index in the slot's table, page) entries that changed since the last schedule."""
    new_slots: tuple[SlotParams, ...]
    """Applied before the step runs."""
    prompt_scores: tuple[PromptScore, ...]
    wants_logprobs: bool
    """Whether any sampling row asked for log-probabilities."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def decode_only(self) -> bool:
        """Whether every row is one token whose slot samples: the decode program serves it."""
        return self.num_tokens == self.num_rows and bool((self.token_ids == NO_TOKEN).all())


class ScoreArrays(NamedTuple):
    """Log-probabilities of given or chosen tokens, on the host."""

    logprobs: np.ndarray
    """float32 [R]"""
    ranks: np.ndarray
    """int32 [R], 1 the most likely"""
    top_ids: np.ndarray
    """int32 [R, 20]"""
    top_logprobs: np.ndarray
    """float32 [R, 20]"""


class StepResult(NamedTuple):
    """What a step gave, on the host."""

    step_id: int
    token_ids: np.ndarray
    """int32 [B]; NO_TOKEN where the row did not sample."""
    scores: ScoreArrays | None
    """R = B rows, if the schedule wanted log-probabilities."""
    prompt_scores: tuple[ScoreArrays, ...]
    """One for each of the schedule's `prompt_scores`, in order."""


class RunnerLimits(NamedTuple):
    """What a scheduler must know of the compiled step."""

    num_pages: int
    """Pages in the pool; page 0 is scratch for padding and is never handed out."""
    page_size: int
    """Tokens a page."""
    max_num_seqs: int
    """Slots."""
    max_num_batched_tokens: int
    """Largest token bucket."""
    max_model_len: int
    vocab_size: int
    shares_prefixes: bool = True
    """Whether a token's keys and values depend on nothing but the tokens up to it, so that others may read them."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a request, so far or whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it; None for end of sequence and length."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a user sees of a request: all of it when done, or all so far while streaming."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of the first sample."""
        return self.outputs[0].token_ids
