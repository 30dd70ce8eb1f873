"""The request bodies of the Messages API: whatever comes is taken or refused, and fields mean what all APIs share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.anthropic_prompt import turns_of
from server.api.anthropic_tools import tool_use
from server.api.anthropic_types import CountTokensRequest, MessagesRequest, parse_count, parse_messages
from server.api.errors import ApiError
from server.api.types import STOP_CHARS_MAX, stop_strings

BODY = {"model": "m", "max_tokens": 7, "messages": [{"role": "user", "content": "x"}]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["text", "image", "document", "thinking", "tool_use", "tool_result", "x"])
BLOCK_FIELDS = st.sampled_from(["text", "id", "name", "input", "tool_use_id", "content", "is_error", "cache_control"])
BLOCKS = st.builds(lambda kind, rest: {"type": kind, **rest}, KINDS, st.dictionaries(BLOCK_FIELDS, JSON, max_size=4))
TURNS = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system", "x"]),
    st.text(max_size=4) | st.lists(BLOCKS, max_size=3),
)


def test_the_fields_that_all_apis_share() -> None:
    request, fields = parse_messages(
        json.dumps({**BODY, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["a", "b"]}).encode()
    )
    assert (fields.max_tokens, fields.temperature, fields.top_k, fields.top_p) == (7, 0.5, 3, 0.9)
    assert stop_strings(fields) == ("a", "b")
    assert (fields.n, fields.stream, request.model) == (None, None, "m")


def test_a_stop_sequence_has_a_length() -> None:
    parse_messages(json.dumps({**BODY, "stop_sequences": ["x" * STOP_CHARS_MAX]}).encode())
    with pytest.raises(ApiError) as refused:
        parse_messages(json.dumps({**BODY, "stop_sequences": ["a", "x" * (STOP_CHARS_MAX + 1)]}).encode())
    assert (refused.value.status, refused.value.param) == (400, "stop_sequences.1")


def status_of(body: bytes, kind: type) -> int:
    """What the body is answered with, as far as its types go."""
    try:
        request = parse_count(body) if kind is CountTokensRequest else parse_messages(body)[0]
        tool_use(request)
        return 200 if turns_of(request) else 500
    except ApiError as refused:
        return refused.status


@pytest.mark.parametrize("kind", [CountTokensRequest, MessagesRequest])
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_any_value_in_any_field_is_taken_or_refused(kind: type, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.__struct_fields__))  # type: ignore[attr-defined]
    body: dict[str, Any] = {**BODY, **data.draw(st.dictionaries(names | st.text(max_size=5), JSON, max_size=4))}
    if kind is CountTokensRequest:
        body.pop("max_tokens", None)
    body["messages"] = data.draw(st.just(body["messages"]) | st.lists(TURNS, max_size=4))
    encoded = json.dumps(body).encode()
    assert status_of(encoded, kind) in (200, 400)
