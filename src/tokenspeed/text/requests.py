"""From one prompt's ids and a user's sampling to the engine's requests: checked, clamped to the context, split into samples."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tokenspeed.types import InvalidRequest, Request, RunnerLimits, SamplingParams

_INT64_SPAN = 2**64
_INT64_MAX = 2**63 - 1


def make_requests(
    request_id: str,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    limits: RunnerLimits,
    eos_ids: tuple[int, ...],
    arrival_time: float | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> list[Request]:
    """The requests that serve `sampling.n` samples of one prompt, in the order of the samples.

    Greedy samples are all alike, so one request stands for all n of them. Sample k is named `request_id` where there
    is one request, else `request_id-k`; it uses seed + k, and without a seed each draws its own in the engine.
    `max_tokens` becomes a number: what was asked for, at most what the context has room for.

    Args:
      request_id: unique among the requests that live at the same time.
      prompt_ids: the whole prompt.
      limits: what the engine can hold.
      eos_ids: ids that end the output unless `sampling.ignore_eos`.
      arrival_time: `time.time()` at which the prompt came, seconds; None: now.
      priority: lower runs first.
      cache_salt: prefixes are shared only among requests of the same salt.

    Raises:
      InvalidRequest: the prompt is empty, too long (code `context_length_exceeded`) or names an id outside the
        vocabulary, or the sampling does.
    """
    check_prompt(prompt_ids, limits)
    sampling.check_vocabulary(limits.vocab_size)
    prompt = tuple(prompt_ids)
    fitted = _fit(sampling, context_tokens(limits) - len(prompt), len(prompt))
    count = num_requests(sampling)
    arrived = time.time() if arrival_time is None else arrival_time
    return [
        Request(
            request_id=request_id if count == 1 else f"{request_id}-{k}",
            prompt_ids=prompt,
            sampling=msgspec.structs.replace(fitted, n=1, seed=_sample_seed(sampling.seed, k)),
            eos_ids=eos_ids,
            arrival_time=arrived,
            priority=priority,
            cache_salt=cache_salt,
        )
        for k in range(count)
    ]


def num_requests(sampling: SamplingParams) -> int:
    """How many requests serve `sampling.n` samples: one if all would be alike."""
    return 1 if sampling.greedy else sampling.n


def context_tokens(limits: RunnerLimits) -> int:
    """The longest prompt and output together, in tokens, that the engine can hold at once."""
    return min(limits.max_model_len, (limits.num_pages - 1) * limits.page_size)


def check_prompt(prompt_ids: Sequence[int], limits: RunnerLimits) -> None:
    """Raises InvalidRequest if the prompt is empty or names an id outside the vocabulary."""
    if not prompt_ids:
        raise InvalidRequest("the prompt must not be empty; give it at least one token", param="prompt")
    low, high = min(prompt_ids), max(prompt_ids)
    if low < 0 or high >= limits.vocab_size:
        raise InvalidRequest(
            f"the prompt names token id {low if low < 0 else high}, which is not in the vocabulary "
            f"[0, {limits.vocab_size}); encode it with this model's tokenizer",
            param="prompt",
        )


def _fit(sampling: SamplingParams, room: int, prompt_tokens: int) -> SamplingParams:
    """`sampling` with `max_tokens`, and `min_tokens` below it, no larger than the room that the prompt leaves."""
    scores_only = sampling.max_tokens == 0
    if room < (0 if scores_only else 1):
        context = room + prompt_tokens
        raise InvalidRequest(
            f"This model's maximum context length is {context} tokens. However, your prompt contains {prompt_tokens} "
            f"input tokens{'' if scores_only else ', and the output needs at least one'}; shorten the prompt"
            " or raise --max-model-len.",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))


def _sample_seed(seed: int | None, k: int) -> int | None:
    """seed + k, wrapped into int64."""
    if seed is None:
        return None
    wrapped = (seed + k) % _INT64_SPAN
    return wrapped - _INT64_SPAN if wrapped > _INT64_MAX else wrapped
