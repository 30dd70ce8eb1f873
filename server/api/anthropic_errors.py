"""Errors as clients of the Anthropic API expect them: the same faults as elsewhere, in that API's shape.

It has no place for a parameter or a code, so the sentence begins with the path of the field that is wrong.
"""

from __future__ import annotations

from protocols.escape import json_value
from server.api.errors import ApiError
from server.http import Call, Response
from server.outcome import Outcome

MESSAGES = "/v1/messages"
_UNDER_MESSAGES = f"{MESSAGES}/"

# Status -> the `type` that Anthropic's SDKs and their users know.
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def expected_by(call: Call) -> bool:
    """Whether a client of that API asks: by its routes, or by the header that all of its SDKs send."""
    path = call.path
    return path == MESSAGES or path.startswith(_UNDER_MESSAGES) or bool(call.header(b"anthropic-version"))


def render(error: ApiError, request_id: str) -> Response:
    """The answer to a request that is refused."""
    kind = TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message, param = error.message, error.param
    if param and not message.startswith(param):
        message = f"{param}: {message}"
    return Response(error.status, body(message, kind, request_id), headers=error.headers)


def body(message: str, kind: str, request_id: str) -> bytes:
    """`{"type": "error", …}`."""
    return json_value({"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id})


def outcome_body(end: Outcome, request_id: str) -> bytes:
    """The error of a stream that did not end well."""
    kind = "timeout_error" if end.kind == "expired" else "overloaded_error" if end.retriable else "api_error"
    return body(end.message, kind, request_id)
