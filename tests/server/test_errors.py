from __future__ import annotations

import json

import pytest

from tokenspeed.server.errors import HttpError, error_json, error_response, model_not_found
from tokenspeed.types import ConfigError, EngineDead, InvalidRequest, Overloaded, TokenspeedError


@pytest.mark.parametrize(
    ("error", "status", "fields"),
    [
        (InvalidRequest("bad", param="n", code="c"), 400, {"type": "invalid_request_error", "param": "n", "code": "c"}),
        (Overloaded("full"), 503, {"type": "server_error", "param": None, "code": "overloaded"}),
        (EngineDead("cause"), 503, {"type": "server_error", "param": None, "code": "engine_dead"}),
        (ConfigError("odd"), 500, {"type": "server_error", "param": None, "code": "internal_error"}),
        (HttpError(404, "x", code="y"), 404, {"type": "invalid_request_error", "param": None, "code": "y"}),
        (model_not_found("m"), 404, {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}),
    ],
)
def test_status_and_shape(error: TokenspeedError, status: int, fields: dict[str, str | None]) -> None:
    response = error_response(error)
    body = json.loads(bytes(response.body))
    assert response.status_code == status
    assert body["error"].pop("message")
    assert body == {"error": fields}
    assert response.headers["content-type"] == "application/json"


def test_overload_says_when_to_come_back() -> None:
    assert error_response(Overloaded("full")).headers["retry-after"] == "1"


def test_cause_of_death_is_told() -> None:
    assert json.loads(error_json(EngineDead("the device is on fire")))["error"]["message"].endswith("on fire")
