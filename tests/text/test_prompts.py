"""Prompts and conversations in the forms in which they may be given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fake_llm import TEMPLATE, TOKENIZER
from tokenspeed.text.prompts import PromptReader, conversation_list, is_conversation, prompt_list
from tokenspeed.types import InvalidRequest, RunnerLimits, SamplingParams

MESSAGES = [{"role": "user", "content": "hi"}]
READER = PromptReader(TOKENIZER, TEMPLATE, (1,), RunnerLimits(50, 16, 4, 64, 100, TOKENIZER.vocab_size))


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
        (np.array([1, 2]), [[1, 2]]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_prompts_become_a_list(given: Any, listed: list[Any]) -> None:
    assert prompt_list(given) == listed


def test_conversations_become_a_list() -> None:
    assert conversation_list(MESSAGES) == [MESSAGES]
    assert conversation_list([MESSAGES, MESSAGES]) == [MESSAGES, MESSAGES]
    assert conversation_list([]) == []


@pytest.mark.parametrize(
    ("given", "expected"), [(MESSAGES, True), ([MESSAGES], False), ("a", False), ([1], False), ([], False), (3, False)]
)
def test_what_a_conversation_is(given: object, expected: bool) -> None:
    assert is_conversation(given) is expected


def test_each_prompt_gets_its_own_name_and_sampling() -> None:
    outputs = READER.plain(["ab", [3, np.int64(4)]], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    requests = [prompt.requests[0] for prompt in outputs]
    assert [request.prompt_ids for request in requests] == [tuple(TOKENIZER.encode("ab")), (3, 4)]
    assert [request.sampling.max_tokens for request in requests] == [1, 2]
    assert len({request.request_id for request in requests}) == 2
    assert {request.eos_ids for request in requests} == {(1,)}
    assert type(requests[1].prompt_ids[1]) is int


def test_a_prompt_of_the_wrong_type_is_named() -> None:
    wrong: Any = [[1.5]]
    with pytest.raises(InvalidRequest, match="a prompt must be text or a list of token ids"):
        READER.plain(wrong, SamplingParams())


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="messages must not be empty"):
        READER.conversations([[]], SamplingParams(), {})
