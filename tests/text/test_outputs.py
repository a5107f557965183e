"""The samples of one prompt, from deltas to what a user sees."""

from __future__ import annotations

import pytest

from tests.fake_llm import TOKENIZER
from tokenspeed.text.outputs import PromptOutputs
from tokenspeed.text.requests import make_requests
from tokenspeed.types import RunnerLimits, SamplingParams, TokenDelta, TokenLogprobs, Usage

LIMITS = RunnerLimits(50, 16, 4, 64, 100, TOKENIZER.vocab_size)


def prompt_outputs(sampling: SamplingParams) -> PromptOutputs:
    requests = make_requests("r", TOKENIZER.encode("hi"), sampling, limits=LIMITS, eos_ids=TOKENIZER.eos_ids)
    return PromptOutputs("r", "hi", requests, sampling.n, TOKENIZER)


def delta(request_id: str, text: str, **more: object) -> TokenDelta:
    ids = tuple(TOKENIZER.encode(text))
    return TokenDelta(request_id=request_id, token_ids=ids, **more)  # pyright: ignore[reportArgumentType]


def test_it_grows_and_ends() -> None:
    outputs = prompt_outputs(SamplingParams())
    growth = outputs.take(delta("r", "ab", num_cached_tokens=1))
    assert growth is not None
    assert (growth.sample, growth.added.text, growth.added.token_ids) == (0, "ab", tuple(TOKENIZER.encode("ab")))
    output = outputs.output()
    assert (output.text, output.finished, outputs.unfinished) == ("ab", False, ["r"])
    outputs.take(delta("r", "c", num_cached_tokens=1, finish_reason="length"))
    output = outputs.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hi", tuple(TOKENIZER.encode("hi")))
    assert (output.text, output.finished, outputs.unfinished) == ("abc", True, [])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("length", None)
    assert output.usage == Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)


def test_what_comes_after_the_end_is_dropped() -> None:
    outputs = prompt_outputs(SamplingParams(stop=("b",)))
    growth = outputs.take(delta("r", "abc"))
    assert growth is not None
    assert (growth.added.finish_reason, growth.added.token_ids) == ("stop", tuple(TOKENIZER.encode("ab")))
    assert outputs.take(delta("r", "d")) is None
    assert outputs.take(delta("r", "", finish_reason="abort")) is None
    output = outputs.output()
    assert (output.text, output.outputs[0].stop_reason, output.outputs[0].finish_reason) == ("a", "b", "stop")
    assert output.usage.completion_tokens == 2


def test_samples_grow_apart() -> None:
    outputs = prompt_outputs(SamplingParams(n=2, seed=1))
    outputs.take(delta("r-1", "b", finish_reason="length", num_cached_tokens=2))
    growth = outputs.take(delta("r-0", "a"))
    assert growth is not None
    assert growth.sample == 0
    assert outputs.unfinished == ["r-0"]
    output = outputs.output()
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "a"), (1, "b")]
    assert (output.finished, output.usage.completion_tokens, output.usage.cached_tokens) == (False, 2, 0)


def test_greedy_samples_are_copies() -> None:
    outputs = prompt_outputs(SamplingParams(n=3, temperature=0.0))
    outputs.take(delta("r", "ab", finish_reason="length"))
    output = outputs.output()
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "ab"), (1, "ab"), (2, "ab")]
    assert (output.finished, output.usage.completion_tokens) == (True, 6)


@pytest.mark.parametrize("asked", [None, 1])
def test_logprobs_if_asked_for(asked: int | None) -> None:
    outputs = prompt_outputs(SamplingParams(logprobs=asked, prompt_logprobs=asked))
    assert outputs.output().outputs[0].logprobs == (None if asked is None else ())
    entry = TokenLogprobs(-1.0, 1, (3,), (-1.0,))
    scores = None if asked is None else (None, entry)
    for text in "ab":
        outputs.take(delta("r", text, logprobs=None if asked is None else (entry,), prompt_logprobs=scores))
        scores = None
    output = outputs.output()
    assert output.outputs[0].logprobs == (None if asked is None else (entry, entry))
    assert output.prompt_logprobs == (None if asked is None else (None, entry))
