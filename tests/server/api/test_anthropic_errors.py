"""Errors in Anthropic's shape: a type that its clients know for each status, and a sentence that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.api import anthropic_errors, errors
from server.api.errors import ApiError, invalid
from server.outcome import Outcome

# What Anthropic's documentation of its errors names.
KNOWN = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "conflict_error",
    "api_error",
    "overloaded_error",
}


def shown(error: ApiError) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(anthropic_errors.render(error, "req-1").body)
    assert document.keys() == {"type", "error", "request_id"}
    assert (document["type"], document["request_id"]) == ("error", "req-1")
    assert document["error"].keys() == {"type", "message"}
    return dict(document["error"])


@pytest.mark.parametrize("status", [*errors.TYPES, 418, 502])
def test_every_status_has_a_type_that_clients_know(status: int) -> None:
    assert shown(ApiError(status, "x"))["type"] in KNOWN


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_the_types_that_its_documentation_names(status: int, kind: str) -> None:
    assert shown(ApiError(status, "x"))["type"] == kind


def test_the_sentence_begins_with_the_path_once() -> None:
    assert shown(invalid("a.0.b", "must be a string"))["message"] == "a.0.b: must be a string"
    assert shown(invalid("a.0.b", "a.0.b: must be a string"))["message"] == "a.0.b: must be a string"
    assert shown(invalid("top_k", "top_k must be at least 1"))["message"] == "top_k must be at least 1"
    assert shown(ApiError(503, "full"))["message"] == "full"


def test_headers_stay() -> None:
    assert anthropic_errors.render(errors.busy(429, "x", 3), "r").headers == ((b"Retry-After", b"3"),)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Outcome("error", "x"), "api_error"),
        (Outcome("error", "x", retriable=True), "overloaded_error"),
        (Outcome("cancelled", "x"), "api_error"),
        (Outcome("expired", "x"), "timeout_error"),
    ],
)
def test_the_error_of_a_stream(end: Outcome, kind: str) -> None:
    document = json.loads(anthropic_errors.outcome_body(end, "r"))
    assert document == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "r"}


def test_what_would_break_a_line_is_escaped() -> None:
    assert len(anthropic_errors.body("a\u2028b\r\nc", "api_error", "r").decode().splitlines()) == 1
