"""/v1/models, /health, /ready, /metrics and /status."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from server.api.errors import ApiError
from server.api.generation import Generation, Model
from server.gateway.access_tokens import AccessTokens
from server.http import Response, json_response
from server.metrics import Metrics
from server.status import server_now

_UNCACHED = ((b"Cache-Control", b"no-store"),)


def models(allowed: list[Model]) -> Response:
    """GET /v1/models."""
    return json_response({"object": "list", "data": [_card(model) for model in allowed]})


def model_named(model: Model, name: str) -> Response:
    """GET /v1/models/{id}. Raises ApiError 404."""
    if name != model.name:
        raise ApiError(404, f"the model {name!r} is not served here", param="model", code="model_not_found")
    return json_response(_card(model))


def access_token(tokens: AccessTokens, key: str) -> Response:
    """POST /v1/access-tokens: what a page puts behind `?token=`."""
    token, end = tokens.issue(key)
    return json_response({"object": "access_token", "token": token, "expires_at": end}, headers=_UNCACHED)


def health() -> Response:
    """GET /health: the process answers."""
    return json_response({"status": "ok"})


def ready(*, engine: bool, draining: bool) -> Response:
    """GET /ready: whether new generations are taken."""
    if engine and not draining:
        return json_response({"status": "ready"})
    status = "draining" if draining else "engine down"
    return json_response({"status": status}, 503, ((b"Retry-After", b"2"),))


def metrics(counts: Metrics) -> Response:
    """GET /metrics."""
    return Response(200, counts.render(), CONTENT_TYPE_PLAIN_0_0_4.encode())


def status(generation: Generation, counts: Metrics, *, names_keys: bool) -> Response:
    """GET /status."""
    assert counts.live is not None
    now = server_now(generation.table, counts, counts.live(), generation.model.name, names_keys=names_keys)
    return json_response(now, headers=_UNCACHED)


def _card(model: Model) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sluice",
        "max_model_len": model.hello.context_tokens_max,
    }
