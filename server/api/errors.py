"""Errors as clients of the OpenAI API expect them: always JSON, always with a request id, never a traceback."""

from __future__ import annotations

from protocols.escape import json_value
from server.http import Headers, Response
from server.outcome import Outcome
from server.table import Busy

# Status -> the `type` that OpenAI's SDKs and their users know.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    410: "gone_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    414: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "overloaded_error",
}

# Of a message, and of a path: they may quote what the client wrote, megabytes perhaps.
TOLD_CHARS_MAX = 2000


class ApiError(Exception):
    """Answered with `status`, before any byte of a stream. A long message is cut."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Headers = ()
    ) -> None:
        message = _cut(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param and _cut(param)
        self.code = code
        self.headers = headers


def _cut(text: str) -> str:
    return text if len(text) <= TOLD_CHARS_MAX else f"{text[:TOLD_CHARS_MAX]}…"


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def busy(status: int, message: str, retry_after_s: int) -> ApiError:
    """429 or 503, with the time after which it is worth trying again."""
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    return ApiError(status, message, code=code, headers=((b"Retry-After", b"%d" % retry_after_s),))


def from_busy(refusal: Busy) -> ApiError:
    """What a client is told when there is no room for its stream."""
    if refusal.retry_after_s:
        return busy(refusal.status, str(refusal), refusal.retry_after_s)
    return ApiError(refusal.status, str(refusal), code=refusal.code)


def render(error: ApiError) -> Response:
    """OpenAI's shape."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return Response(error.status, body(error.message, kind, error.param, error.code), headers=error.headers)


def body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    """`{"error": {…}}`, with all four keys always there."""
    return json_value({"error": {"message": message, "type": kind, "param": param, "code": code}})


def outcome_body(end: Outcome) -> bytes:
    """The in-band error of a stream that did not end well: its `code` is the outcome."""
    return body(end.message, outcome_type(end), None, end.kind)


def outcome_type(end: Outcome) -> str:
    """The `type` of such an error."""
    return {"cancelled": "cancelled_error", "expired": "timeout_error"}.get(end.kind, "server_error")
