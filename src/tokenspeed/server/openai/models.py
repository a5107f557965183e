"""GET /v1/models and /v1/models/{id}: the card of each name the model is served under."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.server.endpoint import json_response
from tokenspeed.server.errors import model_not_found
from tokenspeed.server.openai.protocol import ModelCard, ModelList, ModelPermission
from tokenspeed.server.state import ServerState


def list_models(state: ServerState, request: Request) -> Response:
    """All cards."""
    return json_response(ModelList(data=[_card(state, name) for name in state.names]))


def retrieve_model(state: ServerState, request: Request) -> Response:
    """One card. Names may contain slashes."""
    name: str = request.path_params["model"]
    if name not in state.names:
        raise model_not_found(name)
    return json_response(_card(state, name))


def _card(state: ServerState, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=state.created,
        root=state.model,
        max_model_len=state.served.limits.max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=state.created)],
    )
