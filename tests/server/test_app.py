"""What all routes have in common, and the routes that generate nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.server.fake import EOS, LIMITS, VOCAB
from tests.server.serving import MODEL, Server, eventually, fine, serving
from tokenspeed import __version__
from tokenspeed.config import ServerConfig
from tokenspeed.engine.client import NO_STATS
from tokenspeed.server.app import ABSENT
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.types import EngineDead

TEMPLATE = ChatTemplate(
    {
        "default": "{% if tools %}[{{ tools | length }}]{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    },
    {},
    "test",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(b"a", EOS, template=TEMPLATE) as running:
        yield running


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health(server: Server, path: str) -> None:
    assert fine(server.http.get(path)) == {"status": "ok"}
    head = server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_version(server: Server) -> None:
    assert fine(server.http.get("/version")) == {"version": __version__}


def test_load() -> None:
    with serving(b"a", EOS) as server:
        server.engine.open.clear()
        with server.connect("/v1/completions", {"prompt": "x", "n": 3}):
            eventually(lambda: server.http.get("/load").json() == {"server_load": 3})
        eventually(lambda: server.http.get("/load").json() == {"server_load": 0})


def test_models(server: Server) -> None:
    models = fine(server.http.get("/v1/models"))
    assert models["object"] == "list"
    [card] = models["data"]
    assert card["id"] == card["root"] == MODEL
    assert card["max_model_len"] == LIMITS.max_model_len
    assert card["permission"][0]["object"] == "model_permission"
    assert fine(server.http.get(f"/v1/models/{MODEL}")) == card
    assert fine(server.http.get(f"/v1/models/{MODEL.replace('/', '%2F')}")) == card
    assert error(server.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_served_names() -> None:
    with serving(b"a", EOS, config=ServerConfig(served_model_names=("one", "two"))) as server:
        cards = fine(server.http.get("/v1/models"))["data"]
        assert [(card["id"], card["root"]) for card in cards] == [("one", MODEL), ("two", MODEL)]
        assert server.complete(model="two")["model"] == "one"
        assert server.refused("/v1/completions", {"model": MODEL, "prompt": "x"}, 404)["param"] == "model"


@pytest.mark.parametrize("model", [None, "", MODEL])
def test_the_model_may_be_left_out(server: Server, model: str | None) -> None:
    assert server.complete(model=model)["model"] == MODEL


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_unknown_model(server: Server, path: str) -> None:
    body = {"model": "no", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    refused = server.refused(path, body, 404)
    assert (refused["code"], refused["param"]) == ("model_not_found", "model")
    assert refused["message"] == "The model `no` does not exist."


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/metrics/", "/v1/chat"])
def test_no_such_route(server: Server, path: str) -> None:
    assert path in error(server.http.get(path), 404)["message"]


def test_wrong_method(server: Server) -> None:
    response = server.http.get("/v1/completions")
    error(response, 405)
    assert response.headers["allow"] == "POST"
    error(server.http.post("/v1/models"), 405)


@pytest.mark.parametrize("path", ABSENT)
def test_routes_that_are_refused_by_name(server: Server, path: str) -> None:
    refused = error(server.http.post(path, content=b"anything"), 400)
    assert MODEL in refused["message"]
    assert refused["code"] == "not_supported"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "byte 1"),
        (b'{"prompt": "\\ud83c"}', "not valid JSON"),
        (b"[1]", "JSON object"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested"),
    ],
)
def test_bad_json(server: Server, content: bytes, says: str) -> None:
    assert says in error(server.http.post("/v1/completions", content=content), 400)["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.api+json", ""])
def test_content_types(server: Server, kind: str) -> None:
    fine(server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": kind}))


def test_wrong_content_type(server: Server) -> None:
    response = server.http.post("/v1/completions", data={"prompt": "x"})
    assert "application/x-www-form-urlencoded" in error(response, 400)["message"]


def test_body_too_large() -> None:
    with serving(b"a", EOS, config=ServerConfig(max_body_bytes=1000)) as server:
        body = {"prompt": "x" * 10**6}
        assert error(server.post("/v1/completions", body), 413)["code"] == "request_too_large"
        chunks = (b"x" * 600 for _ in range(3))
        error(server.http.post("/v1/completions", content=chunks), 413)
        assert server.complete()


def test_unknown_fields_are_named(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "tempertaure": 1, "stream_options": None, "a\r\nb": 1}
    with caplog.at_level(logging.WARNING):
        first = server.post("/v1/completions", body)
        assert first.headers["x-ignored-fields"] == "tempertaure, a%0D%0Ab"
        assert caplog.text.count("tempertaure") == 1
        server.post("/v1/completions", body)
        assert caplog.text.count("tempertaure") == 1
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        assert stream.headers["x-ignored-fields"] == "tempertaure, a%0D%0Ab"


def test_big_prompts_do_not_hold_up_others(server: Server) -> None:
    """10 MB are decoded, rendered and refused in a thread while health is asked."""
    body = b'{"messages": [{"role": "user", "content": "' + b"hello " * (10 * 2**20 // 6) + b'"}]}'
    answers: list[httpx.Response] = []
    client = httpx.Client(base_url=server.url, timeout=30)
    sender = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", content=body)))
    slowest = 0.0
    sender.start()
    while sender.is_alive():
        begin = time.monotonic()
        fine(server.http.get("/health"))
        slowest = max(slowest, time.monotonic() - begin)
    client.close()
    assert error(answers[0], 400)["code"] == "context_length_exceeded"
    assert slowest < 0.25


def test_api_keys() -> None:
    with serving(b"a", EOS, config=ServerConfig(api_keys=("one", "t\u00fcr"))) as server:
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic one"}, {"x-api-key": "on"}):
            response = server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert error(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for headers in ({"Authorization": "Bearer one"}, {"Authorization": "bearer one"}, {"x-api-key": "one"}):
            fine(server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers))
        fine(server.http.get("/load", headers={"x-api-key": "t\u00fcr".encode()}))
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/load"):
            error(server.http.get(path), 401)
        for path in ("/tokenize", "/detokenize", "/v1/embeddings"):
            error(server.http.post(path, json={}), 401)
        for path in ("/health", "/ping", "/metrics", "/version"):
            assert server.http.get(path).status_code == 200


def test_cors(server: Server) -> None:
    headers = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
    preflight = server.http.options("/v1/chat/completions", headers=headers)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert (
        server.http.get("/v1/models", headers={"Origin": "http://page"}).headers["access-control-allow-origin"] == "*"
    )
    with serving(b"a", EOS, config=ServerConfig(allowed_origins=("http://mine",), api_keys=("k",))) as strict:
        assert strict.http.options("/v1/completions", headers=headers).status_code == 400
        own = strict.http.post("/v1/completions", json={}, headers={"Origin": "http://mine"})
        assert own.status_code == 401
        assert own.headers["access-control-allow-origin"] == "http://mine"


def test_request_ids() -> None:
    with serving(b"a", EOS, config=ServerConfig(enable_request_id_headers=True)) as server:
        response = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert fine(response)["id"] == "cmpl-mine"
        response = server.post("/v1/completions", {"prompt": "x"})
        assert fine(response)["id"] == f"cmpl-{response.headers['x-request-id']}"
        assert server.http.get("/nothing").headers["x-request-id"]


def test_equal_request_ids_do_not_clash() -> None:
    with serving(b"a", EOS, delay=0.1) as server:
        answers: list[dict[str, Any]] = []

        def ask() -> None:
            headers = {"X-Request-Id": "same"}
            answers.append(fine(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, headers=headers)))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer["id"] for answer in answers] == ["cmpl-same"] * 3


def test_loading() -> None:
    with serving(b"a", EOS, ready=False) as server:
        assert error(server.http.get("/health"), 503)["message"] == "Loading model"
        for response in (server.http.get("/v1/models"), server.post("/v1/completions", {"prompt": "x"})):
            assert error(response, 503)["code"] == "loading"
            assert response.headers["retry-after"] == "1"
        assert server.http.get("/version").status_code == server.http.get("/metrics").status_code == 200


def test_engine_death() -> None:
    with serving(b"a", b"b", EOS, delay=0.1) as server:
        body = {"prompt": "x", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert "data: " in next(lines)
            server.engine.streams.fail(EngineDead("the device is on fire"))
            rest = [line for line in lines if line]
        assert '"code":"engine_dead"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert "on fire" in error(server.http.get("/health"), 503)["message"]
        assert error(server.post("/v1/completions", {"prompt": "x"}), 503)["code"] == "engine_dead"
        assert server.metric("request_success_total", finished_reason="error") == 1


def test_engine_death_before_the_first_token() -> None:
    with serving(b"a", EOS) as server:
        server.engine.open.clear()
        threading.Timer(0.1, lambda: server.engine.streams.fail(EngineDead("gone"))).start()
        assert error(server.post("/v1/completions", {"prompt": "x", "stream": True}), 503)["code"] == "engine_dead"


def test_a_stalled_engine_is_not_healthy() -> None:
    with serving(b"a", EOS, config=ServerConfig(watchdog_timeout=0.2)) as server:
        time.sleep(0.25)
        assert server.http.get("/health").status_code == 200
        server.engine.open.clear()
        with server.connect("/v1/completions", {"prompt": "x"}):
            eventually(lambda: server.http.get("/health").status_code == 503)
            assert error(server.http.get("/health"), 503)["code"] == "engine_stalled"


@pytest.mark.parametrize("free", [0, 1])
def test_full_queue(free: int) -> None:
    limits = LIMITS._replace(max_num_seqs=1 + free)
    with serving(b"a", EOS, limits=limits, config=ServerConfig(max_num_queued_reqs=1)) as server:
        server.engine.open.clear()
        others = [server.connect("/v1/completions", {"prompt": "x"}) for _ in range(2 + free)]
        eventually(lambda: server.engine.num_unfinished == 2 + free)
        response = server.post("/v1/completions", {"prompt": "x"})
        assert error(response, 503)["code"] == "overloaded"
        assert response.headers["retry-after"] == "1"
        assert server.metric("admission_rejections_total", reason="queue_full") == 1
        server.engine.open.set()
        for other in others:
            assert b"200 OK" in other.recv(1000)
            other.close()
        assert server.complete()


def test_full_queue_though_places_are_free() -> None:
    """Pages may run out before places do: then the engine says that requests wait."""
    with serving(b"a", EOS, config=ServerConfig(max_num_queued_reqs=1)) as server:
        server.engine.open.clear()
        with server.connect("/v1/completions", {"prompt": "x"}):
            eventually(lambda: server.engine.num_unfinished == 1)
            server.engine.streams.stats = msgspec.structs.replace(NO_STATS, num_waiting=1)
            assert error(server.post("/v1/completions", {"prompt": "x"}), 503)["code"] == "overloaded"
        eventually(lambda: server.engine.num_unfinished == 0)
        # What the engine said is old: nothing waits any more.
        server.engine.streams.stats = msgspec.structs.replace(NO_STATS, num_waiting=1)
        server.engine.open.set()
        assert server.complete()


def test_metrics(server: Server) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    with serving(b"a", b"b", EOS) as fresh:
        for _ in range(3):
            fresh.complete(n=2, seed=1)
        for name in (
            "e2e_request_latency_seconds",
            "time_to_first_token_seconds",
            "request_queue_time_seconds",
            "request_prompt_tokens",
            "request_params_max_tokens",
        ):
            assert fresh.metric(f"{name}_count") == 6
        assert fresh.metric("request_params_n_count") == 3
        assert fresh.metric("request_params_n_sum") == 6
        assert fresh.metric("request_success_total", finished_reason="stop") == 6
        assert fresh.metric("generation_tokens_total") == 18
        assert fresh.metric("inter_token_latency_seconds_count") == 12
        assert fresh.metric("iteration_tokens_total_count") > 0
        assert 'model_name="org/script"' in fresh.http.get("/metrics").text


def test_tokenize(server: Server) -> None:
    answer = fine(server.post("/tokenize", {"prompt": "ab", "return_token_strs": True}))
    assert answer == {
        "count": 3,
        "max_model_len": LIMITS.max_model_len,
        "tokens": [257, 97, 98],
        "token_strs": ["<s>", "a", "b"],
    }
    plain = fine(server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}))
    assert (plain["tokens"], plain["token_strs"]) == ([97, 98], None)
    chat = {"messages": [{"role": "user", "content": "ab"}]}
    assert fine(server.post("/tokenize", chat))["tokens"] == list(b"ab>")
    assert fine(server.post("/tokenize", {**chat, "add_generation_prompt": False}))["tokens"] == list(b"ab")
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert fine(server.post("/tokenize", {**chat, **tools}))["tokens"] == list(b"[1]ab>")
    assert fine(server.post("/tokenize", {**chat, **tools, "tool_choice": "none"}))["tokens"] == list(b"ab>")
    assert server.refused("/tokenize", {})["param"] == "prompt"
    assert server.refused("/tokenize", {"messages": []})["param"] == "messages"


def test_detokenize(server: Server) -> None:
    assert fine(server.post("/detokenize", {"tokens": [257, 97, 98, EOS]})) == {"prompt": "<s>ab<|im_end|>"}
    assert fine(server.post("/detokenize", {"tokens": []})) == {"prompt": ""}
    assert server.refused("/detokenize", {"tokens": [VOCAB]})["param"] == "tokens"
    assert server.refused("/detokenize", {"tokens": ["a"]})["param"] == "tokens.0"
