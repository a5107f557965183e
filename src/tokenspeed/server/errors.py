"""What a failure looks like on the wire: one JSON shape, one status for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.responses import Response

from tokenspeed.types import EngineDead, InvalidRequest, Overloaded, TokenspeedError

ErrorType = Literal["invalid_request_error", "server_error"]


class HttpError(TokenspeedError):
    """A failure with its HTTP status.

    Args:
      status: 4xx only if the request itself is at fault: clients repeat what is answered with 5xx.
      message: what is wrong and what to do about it.
      param: dotted path of the offending field.
      code: machine-readable code.
      headers: sent with the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> ErrorType:
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object; all four keys are always there."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every failed response, and of a stream's last event when it fails midway."""

    error: ErrorObject


def http_error(error: TokenspeedError) -> HttpError:
    """The status and fields that a failure is answered with."""
    match error:
        case HttpError():
            return error
        case InvalidRequest():
            return HttpError(400, str(error), param=error.param, code=error.code)
        case Overloaded():
            return HttpError(503, str(error), code="overloaded", headers={"Retry-After": "1"})
        case EngineDead():
            return HttpError(503, f"The engine has stopped: {error}", code="engine_dead")
        case _:
            return HttpError(500, str(error), code="internal_error")


def error_json(error: TokenspeedError) -> bytes:
    """The failure as JSON."""
    failure = http_error(error)
    return msgspec.json.encode(ErrorBody(ErrorObject(str(failure), failure.type, failure.param, failure.code)))


def error_response(error: TokenspeedError) -> Response:
    """The failure as a whole response."""
    failure = http_error(error)
    return Response(
        error_json(failure), status_code=failure.status, headers=failure.headers, media_type="application/json"
    )


def model_not_found(name: str) -> HttpError:
    """The answer to a request for a model that is not served here."""
    return HttpError(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")
