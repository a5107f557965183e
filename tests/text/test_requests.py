"""Prompt and sampling to requests: checks, clamping, samples."""

from __future__ import annotations

import pytest

from tokenspeed.text.requests import context_tokens, make_requests
from tokenspeed.types import InvalidRequest, Request, RunnerLimits, SamplingParams

LIMITS = RunnerLimits(
    num_pages=101, page_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100, vocab_size=50
)


def requests(ids: list[int], limits: RunnerLimits = LIMITS, **sampling: object) -> list[Request]:
    params = SamplingParams(**sampling)  # pyright: ignore[reportArgumentType]
    return make_requests("r", ids, params, limits=limits, eos_ids=(2,), arrival_time=1.5)


def test_one_sample_keeps_the_name_and_carries_everything() -> None:
    [request] = make_requests(
        "r", [3, 4], SamplingParams(seed=7), limits=LIMITS, eos_ids=(2,), arrival_time=1.5, priority=3, cache_salt="s"
    )
    assert request == Request(
        request_id="r",
        prompt_ids=(3, 4),
        sampling=SamplingParams(seed=7),
        eos_ids=(2,),
        arrival_time=1.5,
        priority=3,
        cache_salt="s",
    )


def test_arrival_time_is_now_unless_given() -> None:
    [request] = make_requests("r", [3], SamplingParams(), limits=LIMITS, eos_ids=())
    assert request.arrival_time > 1e9


def test_samples_get_their_own_names_and_seeds() -> None:
    made = requests([1], n=3, seed=10)
    assert [r.request_id for r in made] == ["r-0", "r-1", "r-2"]
    assert [r.sampling.seed for r in made] == [10, 11, 12]
    assert {r.sampling.n for r in made} == {1}


def test_samples_without_seed_leave_the_draw_to_the_engine() -> None:
    assert [r.sampling.seed for r in requests([1], n=2)] == [None, None]


def test_seed_wraps_into_int64() -> None:
    assert [r.sampling.seed for r in requests([1], n=2, seed=2**63 - 1)] == [2**63 - 1, -(2**63)]


def test_greedy_samples_are_one_request() -> None:
    [request] = requests([1], n=3, temperature=0.0)
    assert (request.request_id, request.sampling.n) == ("r", 1)


@pytest.mark.parametrize(("asked", "granted"), [(None, 90), (90, 90), (91, 90), (5, 5)])
def test_max_tokens_is_clamped_to_the_room_left(asked: int | None, granted: int) -> None:
    [request] = requests([1] * 10, max_tokens=asked)
    assert request.sampling.max_tokens == granted


def test_min_tokens_follows_the_clamp() -> None:
    [request] = requests([1] * 98, max_tokens=50, min_tokens=40)
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (2, 2)


def test_prompt_fills_the_context() -> None:
    [request] = requests([1] * 99)
    assert request.sampling.max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"maximum context length is 100 tokens.* contains 100 input") as caught:
        requests([1] * 100)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_scoring_needs_no_room_for_output() -> None:
    [request] = requests([1] * 100, max_tokens=0, prompt_logprobs=1)
    assert request.sampling.max_tokens == 0
    with pytest.raises(InvalidRequest, match="contains 101 input tokens; shorten"):
        requests([1] * 101, max_tokens=0, prompt_logprobs=1)


def test_a_small_pool_limits_the_context() -> None:
    small = LIMITS._replace(num_pages=3)
    assert context_tokens(small) == 32
    [request] = requests([1] * 10, limits=small, max_tokens=None)
    assert request.sampling.max_tokens == 22


@pytest.mark.parametrize(
    ("ids", "message"), [([], "must not be empty"), ([1, 50], "token id 50"), ([-1, 50], "token id -1")]
)
def test_bad_prompts_are_named(ids: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        requests(ids)
    assert caught.value.param == "prompt"


def test_sampling_ids_outside_the_vocabulary_are_named() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids names token id 50"):
        requests([1], stop_token_ids=(50,))
