"""The real `openai` client against a server on a socket."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.fake import EOS, Script, ScriptTokenizer
from tests.server.serving import MODEL, Server, serving
from tokenspeed.config import ServerConfig
from tokenspeed.text.chat_template import ChatTemplate

TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}>"}, {}, "test")


def by_seed(tokenizer: ScriptTokenizer) -> Script:
    hello = [tokenizer.id_of(b"Hello"), tokenizer.id_of(b" world")]
    return lambda request: [*hello, ord("0") + (request.sampling.seed or 0), EOS]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(script=by_seed, template=TEMPLATE, config=ServerConfig(api_keys=("secret",))) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as connected:
        yield connected


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], seed=3)
    assert answer.choices[0].message.content == "Hello world3"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_streams_of_two_with_usage_and_logprobs(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        seed=5,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, logprobs, reasons = ["", ""], [0, 0], [list[str](), list[str]()]
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs and choice.logprobs.content:
                logprobs[choice.index] += len(choice.logprobs.content)
                assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
            if choice.finish_reason:
                reasons[choice.index].append(choice.finish_reason)
    assert texts == ["Hello world5", "Hello world6"]
    assert logprobs == [4, 4]
    assert reasons == [["stop"], ["stop"]]
    assert usage is not None
    assert usage.completion_tokens == 8


def test_the_streaming_accumulator(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": "hi"}], seed=1) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "Hello world1"


def test_stop(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stop=[" wor"])
    assert answer.choices[0].message.content == "Hello"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True, seed=2)
    assert [choice.text for choice in answer.choices] == ["aHello world2", "bHello world2"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["<s>", "a", "Hello", " world", "2", "<|im_end|>"]
    stream = client.completions.create(model=MODEL, prompt=[1, 2], stream=True, seed=2)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello world2"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="no", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=[1] * 2000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model=MODEL, input="x")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"
