from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.fake import BOS, EOS, LIMITS, VOCAB, scored
from tests.server.serving import MODEL, Server, fine, serving
from tokenspeed.config import GenerationDefaults, ServerConfig
from tokenspeed.types import SamplingParams

PATH = "/v1/completions"
GROUPS = [1, 2, 100]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(b"Hello", b" wor", b"ld", EOS) as running:
        yield running


def sampling(server: Server, **body: object) -> SamplingParams:
    """What a request makes the engine do."""
    server.complete(**body)
    return server.engine.requests[-1].sampling


def test_whole(server: Server) -> None:
    answer = server.complete(prompt="The quick", max_tokens=8)
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer.pop("system_fingerprint").startswith("tokenspeed-")
    assert answer == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 4,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }


@pytest.mark.parametrize("group", GROUPS)
def test_stream_is_the_same(group: int) -> None:
    with serving(b"Hello", b" wor", b"ld", EOS, group=group) as server:
        stream = server.stream(PATH, {"max_tokens": 8, "stream_options": {"include_usage": True}})
        assert stream.text() == "Hello world"
        assert stream.finish_reason() == "stop"
        assert stream.chunks[-1]["choices"] == []
        assert stream.chunks[-1]["usage"] == server.complete(max_tokens=8)["usage"]
        assert {(chunk["id"], chunk["created"], chunk["object"]) for chunk in stream.chunks} == {
            (stream.chunks[0]["id"], stream.chunks[0]["created"], "text_completion")
        }


def test_length(server: Server) -> None:
    answer = server.complete(max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


def test_fields_reach_the_engine(server: Server) -> None:
    body: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40.0,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"50": -1000, "51": 5},
        "allowed_token_ids": [50, 51, 256],
        "seed": 2**63 - 1,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop": "x",
        "stop_token_ids": [7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 3,
        "prompt_logprobs": 2,
    }
    assert sampling(server, **body) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={50: -100.0, 51: 5.0},
        allowed_token_ids=(50, 51, 256),
        seed=2**63 - 1,
        max_tokens=9,
        min_tokens=1,
        stop=("x",),
        stop_token_ids=(7,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=3,
        prompt_logprobs=2,
    )
    server.complete(priority=-3, cache_salt="tenant")
    request = server.engine.requests[-1]
    assert (request.priority, request.cache_salt, request.eos_ids) == (-3, "tenant", (EOS,))


def test_nulls_are_defaults(server: Server) -> None:
    names = [
        "temperature",
        "top_p",
        "n",
        "stop",
        "logit_bias",
        "seed",
        "logprobs",
        "stream_options",
        "best_of",
        "suffix",
    ]
    assert sampling(server, **dict.fromkeys(names)) == sampling(server)
    assert sampling(server).max_tokens == 16


def test_the_models_defaults_come_before_the_engines() -> None:
    shipped = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05)
    with serving(b"a", EOS, defaults=shipped) as server:
        got = sampling(server, top_k=5)
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.6, 0.95, 5, 0.01, 1.05)


@pytest.mark.parametrize(("seed", "meant"), [(-1, None), (0, 0), (-(2**63), -(2**63))])
def test_seed(server: Server, seed: int, meant: int | None) -> None:
    assert sampling(server, seed=seed).seed == meant


def test_max_tokens_is_clamped_to_the_context(server: Server) -> None:
    assert sampling(server, prompt=[1] * 1000, max_tokens=10**9).max_tokens == LIMITS.max_model_len - 1000


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temperature": 2.1}, "temperature", ""),
        ({"temperature": -0.1}, "temperature", ""),
        ({"temperature": "1"}, "temperature", "str"),
        ({"top_p": 0}, "top_p", ""),
        ({"top_p": 1.1}, "top_p", ""),
        ({"top_k": -2}, "top_k", ""),
        ({"top_k": 40.5}, "top_k", "40.5"),
        ({"top_k": "40"}, "top_k", "str"),
        ({"min_p": 1.5}, "min_p", ""),
        ({"repetition_penalty": 0}, "repetition_penalty", ""),
        ({"presence_penalty": 2.5}, "presence_penalty", ""),
        ({"frequency_penalty": -2.5}, "frequency_penalty", ""),
        ({"logit_bias": {"999999999": 1}}, "logit_bias.999999999", "999999999"),
        ({"logit_bias": {"abc": 1}}, "logit_bias.abc", "abc"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 5000, "no token id"),
        ({"allowed_token_ids": []}, "allowed_token_ids", ""),
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", ""),
        ({"stop_token_ids": [10**9]}, "stop_token_ids", ""),
        ({"seed": 2**63}, "seed", ""),
        ({"n": 0}, "n", "128"),
        ({"n": -1}, "n", ""),
        ({"n": 10**9}, "n", ""),
        ({"n": "2"}, "n", "str"),
        ({"n": 1.5}, "n", "float"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"max_tokens": -1}, "max_tokens", ""),
        ({"max_tokens": "a"}, "max_tokens", "str"),
        ({"min_tokens": 17}, "min_tokens", ""),
        ({"min_tokens": -1}, "min_tokens", ""),
        ({"stop": ""}, "stop", "empty"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": ["a"] * 5}, "stop", "4"),
        ({"logprobs": 21}, "logprobs", "greater than max allowed: 20"),
        ({"logprobs": -1}, "logprobs", ""),
        ({"logprobs": True}, "logprobs", "bool"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"stream_options": {}}, "stream_options", "Stream options can only be defined when `stream=True`."),
        ({"cache_salt": ""}, "cache_salt", "empty"),
        ({"priority": 2**40}, "priority", ""),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ""),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"guided_json": {"type": "object"}}, "guided_json", "not supported"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "not supported"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", ""),
        ({"prompt": [[]]}, "prompt", ""),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ["a"] * 1025}, "prompt", "1024"),
        ({"prompt": ["a", 1]}, "prompt", ""),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [VOCAB]}, "prompt", str(VOCAB)),
        ({"prompt": [1.5]}, "prompt.0", "float"),
        ({"prompt": [True]}, "prompt.0", "bool"),
        ({"prompt": [[1, "a"]]}, "prompt.0.1", "str"),
    ],
)
def test_refused(server: Server, body: dict[str, object], param: str, says: str) -> None:
    error = server.refused_completion(**body)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"use_beam_search": False, "length_penalty": 1, "early_stopping": False},
        {"suffix": "", "bad_words": [], "guided_json": None, "response_format": {"type": "text"}},
        {"detokenize": True, "spaces_between_special_tokens": True, "include_reasoning": True},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    ],
)
def test_fields_that_ask_for_nothing(server: Server, body: dict[str, object]) -> None:
    response = server.post(PATH, {"prompt": "hi", **body})
    assert fine(response)
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("name", ["detokenize", "spaces_between_special_tokens", "include_reasoning"])
def test_false_may_ask_for_something(server: Server, name: str) -> None:
    assert server.refused_completion(**{name: False})["param"] == name


def test_context_length(server: Server) -> None:
    error = server.refused_completion(prompt=[1] * 1024)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 1024 tokens. However, your")
    before = len(server.engine.requests)
    error = server.refused_completion(prompt="x" * 10**6)
    assert error["code"] == "context_length_exceeded"
    assert len(server.engine.requests) == before


def test_limits_are_the_configurations() -> None:
    with serving(b"a", EOS, config=ServerConfig(max_n=2, max_stop_strings=5)) as server:
        assert server.refused_completion(n=3)["param"] == "n"
        server.complete(n=2, stop=list("abcde"))


def test_many_prompts(server: Server) -> None:
    answer = server.complete(prompt=[[1], [2, 3]], max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8
    assert [one.prompt_ids for one in server.engine.requests[-2:]] == [(1,), (2, 3)]


def test_text_prompts_get_special_tokens(server: Server) -> None:
    server.complete(prompt="ab")
    server.complete(prompt="ab", add_special_tokens=False)
    assert [one.prompt_ids for one in server.engine.requests[-2:]] == [(BOS, 97, 98), (97, 98)]


@pytest.mark.parametrize(("extra", "ids"), [({}, (3, 4)), ({"truncation_side": "right"}, (1, 2))])
def test_truncation(server: Server, extra: dict[str, object], ids: tuple[int, ...]) -> None:
    server.complete(prompt=[1, 2, 3, 4], truncate_prompt_tokens=2, **extra)
    assert server.engine.requests[-1].prompt_ids == ids


def test_truncation_to_the_context(server: Server) -> None:
    server.complete(prompt=[1] * 3000, truncate_prompt_tokens=-1)
    assert len(server.engine.requests[-1].prompt_ids) == LIMITS.max_model_len - 1


def test_samples_of_several_prompts() -> None:
    def by_seed(tokenizer: Any) -> Any:
        return lambda request: [*(b"%d/%d" % (request.sampling.seed, request.prompt_ids[0])), EOS]

    with serving(script=by_seed) as server:
        answer = server.complete(prompt=[[1], [2]], n=3, seed=7)
        assert [c["text"] for c in answer["choices"]] == ["7/1", "8/1", "9/1", "7/2", "8/2", "9/2"]
        assert [c["index"] for c in answer["choices"]] == list(range(6))
        assert answer["usage"]["prompt_tokens"] == 2
        stream = server.stream(PATH, {"prompt": [[1], [2]], "n": 3, "seed": 7})
        assert [stream.text(k) for k in range(6)] == [c["text"] for c in answer["choices"]]
        assert [stream.finish_reason(k) for k in range(6)] == ["stop"] * 6


def test_greedy_samples_run_once(server: Server) -> None:
    before = len(server.engine.requests)
    answer = server.complete(n=3, temperature=0, max_tokens=8)
    assert [c["text"] for c in answer["choices"]] == ["Hello world"] * 3
    assert answer["usage"]["completion_tokens"] == 12
    assert len(server.engine.requests) == before + 1
    stream = server.stream(PATH, {"n": 3, "temperature": 0, "max_tokens": 8})
    assert [stream.text(k) for k in range(3)] == ["Hello world"] * 3


@pytest.mark.parametrize("best_of", [1, 2])
def test_best_of(server: Server, best_of: int) -> None:
    assert len(server.complete(n=2, best_of=best_of)["choices"]) == 2


def test_echo_only_scores(server: Server) -> None:
    answer = server.complete(prompt="The quick", echo=True, max_tokens=0, logprobs=1)
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The quick"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert logprobs["tokens"] == ["<s>", *"The quick"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(isinstance(one, float) for one in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [0, *range(3, 12)]
    ids = server.complete(prompt=[BOS, *b"The quick"], echo=True, max_tokens=0, logprobs=1)
    assert ids["choices"] == answer["choices"]
    assert server.complete(prompt="x", echo=True, max_tokens=0)["choices"][0]["text"] == "x"


@pytest.mark.parametrize("group", GROUPS)
def test_echo_streams(group: int) -> None:
    with serving(b"Hello", b" wor", b"ld", EOS, group=group) as server:
        body: dict[str, Any] = {"prompt": "ab", "echo": True, "max_tokens": 2, "logprobs": 1}
        whole = server.complete(**body)["choices"][0]
        stream = server.stream(PATH, body)
        assert stream.text() == whole["text"] == "abHello wor"
        assert whole["logprobs"]["text_offset"] == [0, 3, 4, 5, 10]
        for name, values in whole["logprobs"].items():
            parts = [choice["logprobs"][name] for choice in stream.choice() if choice["logprobs"]]
            assert [one for part in parts for one in part] == values


def test_logprobs(server: Server) -> None:
    tokens = [server.tokenizer.id_of(b"Hello"), server.tokenizer.id_of(b" wor")]
    logprobs = server.complete(max_tokens=2, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " wor"]
    assert logprobs["token_logprobs"] == [scored(i, 2).logprob for i in tokens]
    neighbour = server.tokenizer.token_text(tokens[0] ^ 1)
    assert logprobs["top_logprobs"][0] == {neighbour: -0.25, "Hello": -0.5}


def test_logprobs_zero_is_the_chosen_token(server: Server) -> None:
    logprobs = server.complete(max_tokens=1, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"Hello": logprobs["token_logprobs"][0]}]


def test_tokens_as_ids(server: Server) -> None:
    hello = server.tokenizer.id_of(b"Hello")
    body: dict[str, Any] = {"max_tokens": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    assert server.complete(**body)["choices"][0]["logprobs"]["tokens"] == [f"token_id:{hello}"]


def test_ids_are_returned(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "ab", "max_tokens": 8, "return_token_ids": True}
    choice = server.complete(**body)["choices"][0]
    assert choice["prompt_token_ids"] == [BOS, 97, 98]
    assert choice["token_ids"][-1] == EOS
    stream = server.stream(PATH, body)
    assert stream.choice()[0]["prompt_token_ids"] == [BOS, 97, 98]
    assert [i for one in stream.choice() for i in one["token_ids"]] == choice["token_ids"]


def test_prompt_logprobs(server: Server) -> None:
    first, second = server.complete(prompt=[97, 98], prompt_logprobs=1, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": scored(98, 1).logprob, "rank": 2, "decoded_token": "b"}
    assert second["99"] == {"logprob": -0.25, "rank": 1, "decoded_token": "c"}


def test_continuous_usage(server: Server) -> None:
    body = {"max_tokens": 8, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in server.stream(PATH, body).chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_no_usage_unless_asked(server: Server) -> None:
    for options in (None, {}, {"include_usage": False}):
        stream = server.stream(PATH, {"stream_options": options})
        assert all("usage" not in chunk for chunk in stream.chunks)


def test_usage_can_be_forced() -> None:
    with serving(b"a", EOS, config=ServerConfig(enable_force_include_usage=True)) as server:
        assert server.stream(PATH, {}).chunks[-1]["usage"]["completion_tokens"] == 2


def test_request_ids(server: Server) -> None:
    response = server.post(PATH, {"prompt": "hi"}, headers={"X-Request-Id": "mine"})
    assert fine(response)["id"] == "cmpl-mine"
    assert server.complete(request_id="own")["id"] == "cmpl-own"
    assert "x-request-id" not in response.headers
