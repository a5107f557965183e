"""Request bodies: read within a limit, turned into typed structs, with the field to blame when that fails."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar, cast, get_args

import msgspec
from starlette.types import Receive

from tokenspeed.server.errors import HttpError
from tokenspeed.types import InvalidRequest

MAX_NESTING = 64
"""Deepest JSON that is accepted."""

_BOM = b"\xef\xbb\xbf"
_LONE_SURROGATE = re.compile(rb"(?:\\\\)*(\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2}))")

T = TypeVar("T", bound=msgspec.Struct)


class ClientDisconnect(Exception):
    """The client went away before its request was whole."""


async def read_body(receive: Receive, headers: Mapping[str, str], max_bytes: int) -> bytes:
    """The whole request body.

    Raises:
      HttpError: 413 if it is longer than `max_bytes`, which is noticed before it is read where its length is announced.
      ClientDisconnect: the client went away.
    """
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"The request body is larger than the limit of {max_bytes} bytes; shorten it or raise --max-body.",
        code="request_too_large",
    )


class JsonBody:
    """A request's JSON object, from which typed structs are taken. A null is the same as an absent field.

    Attributes:
      fields: the top level as it came, nulls left out.

    Raises:
      InvalidRequest: the JSON is invalid (the text names the byte), nested too deep, or no object.
    """

    def __init__(self, body: bytes) -> None:
        raw = _decode(body.removeprefix(_BOM))
        if not isinstance(raw, dict):
            raise InvalidRequest("The request body must be a JSON object")
        self.fields = {name: value for name, value in cast(dict[str, object], raw).items() if value is not None}
        _check_nesting(self.fields)
        self._known: set[str] = set()
        self._unknown_inside: list[str] = []

    def into(self, struct: type[T]) -> T:
        """The fields that `struct` knows, typed. Raises InvalidRequest if one has the wrong type; `param` is its dotted path."""
        names, nested = _fields(struct)
        self.know(names)
        for name, inside in nested.items():
            value = self.fields.get(name)
            if isinstance(value, dict):
                self._unknown_inside += [f"{name}.{key}" for key in cast(dict[str, object], value) if key not in inside]
        try:
            return msgspec.convert(self.fields, struct)
        except msgspec.ValidationError as error:
            raise _wrong_type(error) from None

    def know(self, names: Iterable[str]) -> None:
        """Declares fields that are dealt with elsewhere."""
        self._known.update(names)

    @property
    def ignored(self) -> list[str]:
        """Dotted names of fields that nobody knew."""
        return [name for name in self.fields if name not in self._known] + self._unknown_inside


def _decode(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError:
        raise InvalidRequest("The request body holds a number that is out of range") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f"The request body is not valid JSON: {_reason(error)} at byte {_offset(body, error)}"
        ) from None


def _reason(error: msgspec.DecodeError) -> str:
    return re.sub(r"^JSON is malformed: | \(byte \d+\)$", "", str(error)).lower()


def _offset(body: bytes, error: msgspec.DecodeError) -> int:
    """Where the JSON goes wrong, in bytes; the decoder tells only for some kinds of error."""
    if found := re.search(r"\(byte (\d+)\)$", str(error)):
        return int(found.group(1))
    try:
        body.decode()
    except UnicodeDecodeError as invalid:
        return invalid.start
    lone = _LONE_SURROGATE.search(body)
    return lone.start(1) if lone else len(body)


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The request body is nested deeper than {MAX_NESTING} levels")


def _check_nesting(value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in _containers(parent)]
        if not level:
            return
    raise _too_deep()


def _containers(parent: object) -> list[object]:
    if isinstance(parent, dict):
        return [child for child in cast(dict[str, object], parent).values() if isinstance(child, (dict, list))]
    return [child for child in cast(list[object], parent) if isinstance(child, (dict, list))]


def _wrong_type(error: msgspec.ValidationError) -> InvalidRequest:
    """Says which field has the wrong type: the decoder ends its text with the place, as in "- at `$.stop[1]`"."""
    text, _, place = str(error).partition(" - at `$")
    param = re.sub(r"\[(\d+)\]", r".\1", place.removesuffix("`").replace("[...]", "")).lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        param = f"{param}.{missing.group(1)}".lstrip(".")
        return InvalidRequest(f"{param} is required", param=param)
    return InvalidRequest(f"{param}: {text.replace('`', '')}", param=param or None)


@cache
def _fields(struct: type[msgspec.Struct]) -> tuple[frozenset[str], Mapping[str, frozenset[str]]]:
    """The names that a struct knows, and those that the structs inside it know. Slow: it resolves annotations."""
    fields = msgspec.structs.fields(struct)
    nested = {
        field.encode_name: _fields(kind)[0]
        for field in fields
        for kind in get_args(field.type)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    return frozenset(field.encode_name for field in fields), nested
