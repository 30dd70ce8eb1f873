"""/v1/models, /health, /ready, /metrics and /status."""

from __future__ import annotations

from collections.abc import Awaitable

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from server.api.errors import ApiError, busy
from server.api.generation import Generation, Model
from server.elsewhere import Elsewhere
from server.gateway.access_tokens import AccessTokens
from server.http import Response, json_response
from server.metrics import Metrics, summed
from server.status import server_now, together

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


async def metrics(counts: Metrics, elsewhere: Elsewhere) -> Response:
    """GET /metrics: of all processes together, whichever answers. Raises ApiError 503 when one doesn't say in time."""
    others = await _told(elsewhere.count())
    return Response(200, summed(counts.render(), others), CONTENT_TYPE_PLAIN_0_0_4.encode())


async def status(generation: Generation, counts: Metrics, *, names_keys: bool) -> Response:
    """GET /status, likewise."""
    others = await _told(generation.elsewhere.status(names_keys=names_keys))
    assert counts.live is not None
    now = server_now(generation.table, counts, counts.live(), generation.model.name, names_keys=names_keys)
    return json_response(together(now, others), headers=_UNCACHED)


async def _told(asked: Awaitable[list[bytes]]) -> list[bytes]:
    try:
        return await asked
    except TimeoutError:
        raise busy(503, "a process of this server did not say in time what it has counted", 5) from None


def _card(model: Model) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sluice",
        "max_model_len": model.hello.context_tokens_max,
    }
