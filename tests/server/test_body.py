from __future__ import annotations

import asyncio

import msgspec
import pytest

from tokenspeed.server.body import MAX_NESTING, ClientDisconnect, JsonBody, read_body
from tokenspeed.server.errors import HttpError
from tokenspeed.types import InvalidRequest


class Inner(msgspec.Struct):
    a: int | None = None


class Outer(msgspec.Struct):
    items: list[Inner]
    n: int = 1
    inner: Inner | None = None
    stop: str | list[str] = ""
    bias: dict[str, float] = {}


def test_null_is_absent() -> None:
    assert JsonBody(b'{"items": [], "n": null, "inner": null}').into(Outer) == Outer(items=[])


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (b"{}", "items", "items is required"),
        (b'{"items": [{"a": 1}, {"a": "x"}]}', "items.1.a", "expected"),
        (b'{"items": [], "n": "2"}', "n", "got str"),
        (b'{"items": [], "n": true}', "n", "got bool"),
        (b'{"items": [], "n": 1.5}', "n", "got float"),
        (b'{"items": [], "stop": ["a", 1]}', "stop.1", "got int"),
        (b'{"items": [], "bias": {"5": "x"}}', "bias", "got str"),
        (b'{"items": [], "inner": {"a": []}}', "inner.a", "got array"),
    ],
)
def test_wrong_type_names_the_field(body: bytes, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JsonBody(body).into(Outer)
    assert caught.value.param == param
    assert says in str(caught.value).replace("Expected", "expected")


@pytest.mark.parametrize(
    ("body", "offset"),
    [
        (b'{"n": nan}', 10),
        (b'{"n": NaN}', 6),
        (b'{"n": 1} x', 10),
        (b'{"n": [1, ', 10),
        (b"", 0),
        (b'{"n": "\xff"}', 7),
        (b'{"n": "\\ud83c"}', 7),
        (b'{"n": "\\ud83c abc"}', 13),
    ],
)
def test_invalid_json_names_the_byte(body: bytes, offset: int) -> None:
    with pytest.raises(InvalidRequest, match=f"not valid JSON.* at byte {offset}$") as caught:
        JsonBody(body)
    assert caught.value.param is None


@pytest.mark.parametrize("body", [b"[]", b"1", b'"a"', b"null"])
def test_only_objects(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        JsonBody(body)


def test_unicode_bodies() -> None:
    assert JsonBody(b'\xef\xbb\xbf{"items": [], "stop": "\\ud83c\\udf89\\u0000"}').into(Outer).stop == "\U0001f389\0"


@pytest.mark.parametrize(("depth", "fine"), [(MAX_NESTING - 1, True), (MAX_NESTING, False), (100_000, False)])
def test_nesting(depth: int, fine: bool) -> None:
    body = b'{"x": ' + b"[" * depth + b"]" * depth + b"}"
    if fine:
        assert JsonBody(body).fields
        return
    with pytest.raises(InvalidRequest, match="nested deeper"):
        JsonBody(body)


def test_huge_number() -> None:
    with pytest.raises(InvalidRequest, match="out of range"):
        JsonBody(b'{"n": 1e999}')


def test_unknown_fields_are_named() -> None:
    body = JsonBody(b'{"items": [], "inner": {"a": 1, "b": 2}, "zz": 1, "user": "x"}')
    body.into(Outer)
    body.know(["user"])
    assert body.ignored == ["zz", "inner.b"]


def read(*chunks: bytes, announced: int | None = None, limit: int = 10) -> bytes:
    """Reads a body that comes in these chunks; the client goes away after an empty one."""
    messages = [{"type": "http.request", "body": chunk, "more_body": chunk != chunks[-1]} for chunk in chunks]

    async def receive() -> dict[str, object]:
        message = messages.pop(0)
        return message if message["body"] else {"type": "http.disconnect"}

    headers = {} if announced is None else {"content-length": str(announced)}
    return asyncio.run(read_body(receive, headers, limit))


def test_reads_whole_bodies() -> None:
    assert read(b"abc", b"defg") == b"abcdefg"
    assert read(b"0123456789") == b"0123456789"


@pytest.mark.parametrize(("chunks", "announced"), [((b"012345", b"67890"), None), ((), 11)])
def test_body_too_large(chunks: tuple[bytes, ...], announced: int | None) -> None:
    with pytest.raises(HttpError) as caught:
        read(*chunks, announced=announced)
    assert caught.value.status == 413


def test_client_leaves_while_it_sends() -> None:
    with pytest.raises(ClientDisconnect):
        read(b"abc", b"", b"x")
