"""Errors in OpenAI's shape: always JSON, with all four keys, and a type that fits the status (case D18)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api import errors
from server.api.errors import TOLD_CHARS_MAX, TYPES, ApiError
from server.outcome import SEVERITY, Outcome


def rendered(error: ApiError) -> dict[str, object]:
    response = errors.render(error)
    assert response.content_type == b"application/json"
    document = json.loads(response.body)
    assert document.keys() == {"error"}
    inner: dict[str, object] = document["error"]
    assert inner.keys() == {"message", "type", "param", "code"}
    return inner


@pytest.mark.parametrize("status", [*TYPES, 402, 418, 501, 504])
def test_every_status_has_a_type(status: int) -> None:
    inner = rendered(ApiError(status, "a sentence"))
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    assert inner == {"message": "a sentence", "type": kind, "param": None, "code": None}


def test_what_a_client_wrote_is_not_repeated_at_length() -> None:
    inner = rendered(errors.invalid("a" * 5_000_000, f"there is no {'b' * 5_000_000}"))
    assert len(str(inner["message"])) == len(str(inner["param"])) == TOLD_CHARS_MAX + 1
    assert str(inner["message"]).startswith("there is no bbb")
    assert str(inner["message"]).endswith("…")


def test_a_bad_field_is_named() -> None:
    inner = rendered(errors.invalid("stop.0", "too long", "out_of_range"))
    assert inner == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "stop.0",
        "code": "out_of_range",
    }


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(429, "rate_limit_exceeded", "rate_limit_error"), (503, "overloaded", "overloaded_error")],
)
def test_busy_says_when_to_come_back(status: int, code: str, kind: str) -> None:
    """F04."""
    error = errors.busy(status, "later", 5)
    assert errors.render(error).headers == ((b"Retry-After", b"5"),)
    assert (rendered(error)["code"], rendered(error)["type"]) == (code, kind)


@pytest.mark.parametrize("kind", [kind for kind in SEVERITY if kind not in ("stop", "length", "tool_calls")])
def test_an_in_band_error_has_the_outcome_as_its_code(kind: str) -> None:
    inner = json.loads(errors.outcome_body(Outcome(kind, "why")))["error"]
    assert inner.keys() == {"message", "type", "param", "code"}
    assert (inner["code"], inner["message"]) == (kind, "why")
    assert inner["type"].endswith("_error")


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
@settings(deadline=None)
def test_no_message_breaks_a_line_or_a_frame(message: str) -> None:
    """B01, B02: the error of a stream is one line of data."""
    body = errors.outcome_body(Outcome("error", message))
    assert len(body.decode().splitlines()) == 1
    assert json.loads(body)["error"]["message"] == message
