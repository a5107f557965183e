from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.fake import EOS, Script, ScriptTokenizer, scored
from tests.server.serving import MODEL, Server, fine, serving
from tokenspeed.config import GenerationDefaults, ServerConfig
from tokenspeed.text.chat_template import ChatTemplate

PATH = "/v1/chat/completions"
GROUPS = [1, 2, 100]

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "<|end|>{% endfor %}{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATE = ChatTemplate({"default": CHATML}, {}, "test")


def said(*tokens: bytes | int, **options: Any) -> Any:
    return serving(*tokens, template=TEMPLATE, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with said(b"Hello", b" wor", b"ld", EOS) as running:
        yield running


def prompt(server: Server) -> str:
    """The text of the last prompt the engine got."""
    return bytes(server.engine.requests[-1].prompt_ids).decode()


def content(answer: dict[str, Any], index: int = 0) -> str:
    return answer["choices"][index]["message"]["content"]


def test_whole(server: Server) -> None:
    answer = server.chat("hi")
    assert prompt(server) == "<|user|>hi<|end|><|assistant|>"
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer.pop("system_fingerprint").startswith("tokenspeed-")
    assert answer == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 30,
            "completion_tokens": 4,
            "total_tokens": 34,
            "prompt_tokens_details": {"cached_tokens": 15},
        },
    }


@pytest.mark.parametrize("group", GROUPS)
def test_stream(group: int) -> None:
    with said(b"Hello", b" wor", b"ld", EOS, group=group) as server:
        stream = server.stream(PATH, {})
        first, *middle, last = stream.choice()
        assert first == {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        assert all(set(one["delta"]) == {"content"} and one["delta"]["content"] for one in middle)
        assert all(one["finish_reason"] is None for one in middle)
        assert last["delta"] == {}
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", None)
        assert stream.text() == "Hello world"
        heads = {(one["id"], one["created"], one["model"], one["object"]) for one in stream.chunks}
        assert len(heads) == 1
        assert heads.pop()[2:] == (MODEL, "chat.completion.chunk")
        assert all("usage" not in one for one in stream.chunks)


def test_nothing_is_sent_before_the_first_token() -> None:
    with said(b"a", EOS, delay=0.3) as server:
        begin = time.monotonic()
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with server.http.stream("POST", PATH, json=body) as response:
            assert time.monotonic() - begin > 0.29
            assert response.status_code == 200


def test_comments_while_the_prompt_is_read() -> None:
    with said(b"a", EOS, delay=0.25, config=ServerConfig(sse_keep_alive_interval=0.1)) as server:
        lines = server.stream(PATH, {}).lines
        assert lines[0] == ": ping"
        assert server.stream(PATH, {}).text() == "a"


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("max_tokens", "text"), [(2, "Hi "), (3, "Hi "), (5, "Hi \U0001f60a")])
def test_characters_are_not_cut(group: int, max_tokens: int, text: str) -> None:
    emoji = "\U0001f60a".encode()
    with said(b"Hi", b" ", emoji[:2], emoji[2:3], emoji[3:], b"!", group=group) as server:
        answer = server.chat(max_tokens=max_tokens)
        assert content(answer) == text
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == max_tokens
        stream = server.stream(PATH, {"max_tokens": max_tokens})
        assert stream.text() == text
        assert stream.finish_reason() == "length"


@pytest.mark.parametrize("group", GROUPS)
def test_invalid_bytes_are_replaced(group: int) -> None:
    with said(b"\xff", b"a", EOS, group=group) as server:
        assert content(server.chat()) == server.stream(PATH, {}).text() == "\ufffda"


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("tokens", "text"), [((b"hi", b"\nUs", b"ers", EOS), "hi\nUsers"), ((b"hi", b"\nUs", EOS), "hi\nUs")]
)
def test_held_back_text_is_sent_in_the_end(group: int, tokens: tuple[bytes | int, ...], text: str) -> None:
    with said(*tokens, group=group) as server:
        body = {"stop": ["\nUser:"]}
        assert content(server.chat(**body)) == text
        stream = server.stream(PATH, body)
        assert stream.text() == text
        assert all(one["delta"]["content"] for one in stream.choice()[1:-1])


@pytest.mark.parametrize("group", GROUPS)
def test_stop_string(group: int) -> None:
    with said(b"ab", b"cST", b"OPd", b"e", b"f", b"g", b"h", group=group, delay=0.01) as server:
        answer = server.chat(stop=["STOP"], max_tokens=200)
        assert content(answer) == "abc"
        assert answer["choices"][0]["stop_reason"] == "STOP"
        assert answer["usage"]["completion_tokens"] == 3
        assert server.engine.aborted == [server.engine.requests[-1].request_id]
        stream = server.stream(PATH, {"stop": ["STOP"], "max_tokens": 200})
        assert stream.text() == "abc"
        assert stream.choice()[-1]["stop_reason"] == "STOP"
        assert content(server.chat(stop=["STOP"], max_tokens=200, include_stop_str_in_output=True)) == "abcSTOP"


@pytest.mark.parametrize("group", [1, 3, 100])
def test_end_within_a_step(group: int) -> None:
    with said(*[b"a"] * 8, EOS, b"x", b"y", group=group) as server:
        answer = server.chat(max_tokens=10)
        assert content(answer) == "a" * 8
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 9
        assert server.chat(max_tokens=8)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("group", GROUPS)
def test_min_tokens(group: int) -> None:
    with said(EOS, b"a", b"b", b"c", b"d", b"a", b"e", EOS, group=group) as server:
        answer = server.chat(min_tokens=5, max_tokens=10, stop=["a"])
        assert content(answer) == "abcdae"
        assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("group", GROUPS)
def test_usage_in_streams(group: int) -> None:
    with said(b"Hello", b" wor", b"ld", EOS, group=group) as server:
        whole = server.chat(n=2, seed=1)["usage"]
        chunks = server.stream(PATH, {"n": 2, "seed": 1, "stream_options": {"include_usage": True}}).chunks
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole
        assert whole["completion_tokens"] == 8
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        options = {"include_usage": True, "continuous_usage_stats": True}
        counts = [c["usage"]["completion_tokens"] for c in server.stream(PATH, {"stream_options": options}).chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert all("usage" not in chunk for chunk in server.stream(PATH, {"stream_options": {}}).chunks)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("stop", [None, ["\nUser:"], ["rs"]])
def test_logprobs_survive_held_back_text(group: int, stop: list[str] | None) -> None:
    with said(b"hi", b"\nUs", b"e", b"rs", EOS, group=group) as server:
        body = {"stop": stop, "logprobs": True, "top_logprobs": 2}
        answer = server.chat(**body)
        whole = answer["choices"][0]["logprobs"]["content"]
        assert len(whole) == answer["usage"]["completion_tokens"]
        stream = server.stream(PATH, body)
        assert [e for one in stream.choice() if one["logprobs"] for e in one["logprobs"]["content"]] == whole
        assert stream.text() == content(answer)


def test_logprobs(server: Server) -> None:
    hello = server.tokenizer.id_of(b"Hello")
    entry = server.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"][0]
    top = entry.pop("top_logprobs")
    assert entry == {"token": "Hello", "logprob": scored(hello, 2).logprob, "bytes": list(b"Hello")}
    assert [(one["token"], one["logprob"]) for one in top] == [
        (server.tokenizer.token_text(hello ^ 1), -0.25),
        ("Hello", -0.5),
    ]
    last = server.chat(logprobs=True, top_logprobs=0)["choices"][0]["logprobs"]["content"][-1]
    assert (last["token"], last["top_logprobs"]) == ("<|im_end|>", [])


@pytest.mark.parametrize("options", [{}, {"temperature": 0}])
def test_samples(options: dict[str, object]) -> None:
    def by_seed(tokenizer: ScriptTokenizer) -> Script:
        return lambda request: [*(b"%d" % (request.sampling.seed or 0)), EOS]

    with said(script=by_seed) as server:
        answer = server.chat(n=3, seed=7, **options)
        expected = ["7"] * 3 if options else ["7", "8", "9"]
        assert [content(answer, k) for k in range(3)] == expected
        assert answer["usage"]["prompt_tokens"] == 30
        assert answer["usage"]["completion_tokens"] == 6
        stream = server.stream(PATH, {"n": 3, "seed": 7, "stream_options": {"include_usage": True}, **options})
        assert [stream.text(k) for k in range(3)] == expected
        assert [stream.finish_reason(k) for k in range(3)] == ["stop"] * 3
        assert [one["delta"].get("role") for k in range(3) for one in stream.choice(k)].count("assistant") == 3
        assert sum(not chunk["choices"] for chunk in stream.chunks) == 1


def test_special_tokens_can_be_shown() -> None:
    with said(b"a", EOS, b"b", EOS) as server:
        body = {"ignore_eos": True, "max_tokens": 3}
        assert content(server.chat(**body)) == "ab"
        assert content(server.chat(**body, skip_special_tokens=False)) == "a<|im_end|>b"


def test_stop_token(server: Server) -> None:
    stop = server.tokenizer.id_of(b" wor")
    answer = server.chat(stop_token_ids=[stop])
    assert content(answer) == "Hello"
    assert answer["choices"][0]["stop_reason"] == stop
    assert answer["usage"]["completion_tokens"] == 2


def test_max_tokens(server: Server) -> None:
    server.chat()
    assert server.engine.requests[-1].sampling.max_tokens == 1024 - 30
    server.chat(max_tokens=5)
    assert server.engine.requests[-1].sampling.max_tokens == 5
    server.chat(max_tokens=5, max_completion_tokens=6)
    assert server.engine.requests[-1].sampling.max_tokens == 6
    with said(b"a", EOS, defaults=GenerationDefaults(max_new_tokens=9)) as limited:
        limited.chat()
        assert limited.engine.requests[-1].sampling.max_tokens == 9


def ask(server: Server, *messages: dict[str, Any], **body: object) -> str:
    """The prompt that a conversation becomes."""
    fine(server.post(PATH, {"messages": messages, **body}))
    return prompt(server)


def test_roles(server: Server) -> None:
    user = {"role": "user", "content": "u"}
    assert ask(server, {"role": "developer", "content": "d"}, user).startswith("<|system|>d<|end|>")
    assert ask(server, {"role": "assistant", "content": "a"}) == "<|assistant|>a<|end|><|assistant|>"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history = ask(server, user, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "t"})
    assert '"arguments": {"x": 1}' in history
    assert "<|tool|>t<|end|>" in history
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert ask(server, {"role": "user", "content": parts}) == "<|user|>a\nb\nc<|end|><|assistant|>"
    assert ask(server, {"role": "user", "content": "\U0001f389\0"}).startswith("<|user|>\U0001f389\0")


def test_continuing_the_last_message(server: Server) -> None:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Once"}]
    body: dict[str, Any] = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert content(fine(server.post(PATH, body))) == "Hello world"
    assert prompt(server) == "<|user|>u<|end|><|assistant|>Once"
    assert content(fine(server.post(PATH, {**body, "echo": True}))) == "OnceHello world"
    assert server.stream(PATH, {**body, "echo": True}).text() == "OnceHello world"
    error = server.refused(PATH, {**body, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


def test_variables_of_the_template(server: Server) -> None:
    user = {"role": "user", "content": "u"}
    assert "[thinking True]" in ask(server, user, chat_template_kwargs={"enable_thinking": True})
    assert "[thinking False]" in ask(server, user, reasoning_effort="none")
    assert "[effort low]" in ask(server, user, reasoning_effort="low")


def test_tools_that_cannot_be_called(server: Server) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for body in ({"tools": []}, {"tools": [tool], "tool_choice": "none"}, {"tool_choice": "auto"}, {"tools": None}):
        assert content(server.chat(**body)) == "Hello world"


def test_ids_are_returned(server: Server) -> None:
    answer = server.chat(return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]).decode() == prompt(server)
    ids = answer["choices"][0]["token_ids"]
    assert ids[-1] == EOS
    stream = server.stream(PATH, {"return_token_ids": True})
    assert stream.chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for one in stream.choice() for i in one.get("token_ids", [])] == ids


def test_prompt_logprobs(server: Server) -> None:
    scores = server.chat(prompt_logprobs=1)["prompt_logprobs"]
    assert scores[0] is None
    assert len(scores) == 30
    assert scores[1]["124"]["decoded_token"] == "|"


def test_response_role() -> None:
    with said(b"a", EOS, config=ServerConfig(response_role="bot")) as server:
        assert server.chat()["choices"][0]["message"]["role"] == "bot"
        assert server.stream(PATH, {}).choice()[0]["delta"]["role"] == "bot"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 11, "max_tokens": 10}, "min_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_choice": ["yes", "no"]}, "guided_choice"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_refused(server: Server, body: dict[str, object], param: str) -> None:
    assert server.refused_chat(**body)["param"] == param


def test_a_template_that_refuses() -> None:
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    with serving(b"a", EOS, template=ChatTemplate({"default": strict}, {}, "test")) as server:
        assert "System message must be at the beginning" in server.refused_chat()["message"]


def test_no_template() -> None:
    with serving(b"a", EOS) as server:
        assert "--chat-template" in server.refused_chat()["message"]


def test_long_prompts_name_the_messages(server: Server) -> None:
    for length in (1100, 10**6):
        error = server.refused_chat(messages=[{"role": "user", "content": "x" * length}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
