"""The Responses API: typed events in their order, stored responses, and the same answer streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conformance_kit.events import parse
from conformance_kit.rules import not_offered, rule
from conformance_kit.target import ABSENT, PROMPT, Target

API = "OpenAI API reference, Responses"
RESPONSES = "/v1/responses"
LAST = {"response.completed", "response.incomplete", "response.failed"}


def ask(target: Target, **fields: Any) -> Any:
    body = {"model": target.model, "input": PROMPT, "max_output_tokens": 16, "temperature": 0, **fields}
    answer = target.ask("POST", RESPONSES, body)
    if answer.status in ABSENT:
        not_offered(f"POST {RESPONSES} answers {answer.status}")
    return answer


def whole(target: Target, **fields: Any) -> dict[str, Any]:
    answer = ask(target, **fields)
    assert answer.status == 200, answer
    return dict(answer.json())


def stream(target: Target, **fields: Any) -> list[dict[str, Any]]:
    answer = ask(target, stream=True, **fields)
    assert (answer.status, answer.end) == (200, "whole"), answer
    return events_of(answer)


def events_of(answer: Any) -> list[dict[str, Any]]:
    """Some servers end with OpenAI's other terminator too."""
    return [json.loads(event.data) for event in parse(bytes(answer.body)) if event.data != "[DONE]"]


def text_of(response: dict[str, Any]) -> str:
    items = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in items for part in item["content"] if part["type"] == "output_text")


@rule("an answer is a response object with its status, output and usage", API)
def test_whole(target: Target) -> None:
    found = whole(target)
    assert found["object"] == "response" and found["id"] and found["status"] in ("completed", "incomplete")
    assert text_of(found)
    usage = found["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]


@rule("an answer that max_output_tokens cut is incomplete, and says why", API)
def test_incomplete(target: Target) -> None:
    found = whole(target, max_output_tokens=16, input="Tell me a very long story, in many chapters.")
    assert found["status"] == "incomplete"
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}


@rule("the event field is the type of the data", API)
def test_types(target: Target) -> None:
    answer = ask(target, stream=True)
    events = [event for event in parse(bytes(answer.body)) if event.data != "[DONE]"]
    assert events and all(event.type == json.loads(event.data)["type"] for event in events)


@rule("sequence_number counts the events from 0", API)
def test_sequence(target: Target) -> None:
    events = stream(target)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@rule("a stream begins with response.created and response.in_progress, and ends with the response's end", API)
def test_order(target: Target) -> None:
    kinds = [event["type"] for event in stream(target)]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in LAST and not LAST & set(kinds[:-1])


@rule("every item and part that begins also ends, in order", API)
def test_nesting(target: Target) -> None:
    open_: list[str] = []
    for event in stream(target):
        kind = event["type"]
        if kind in ("response.output_item.added", "response.content_part.added"):
            open_.append(kind.removesuffix(".added"))
        elif kind in ("response.output_item.done", "response.content_part.done"):
            assert open_.pop() == kind.removesuffix(".done")
    assert not open_


@rule("the deltas join to the text that the end tells, and to the whole answer's", API)
def test_deltas(target: Target) -> None:
    events = stream(target)
    joined = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    done = [event["text"] for event in events if event["type"] == "response.output_text.done"]
    assert joined == "".join(done) == text_of(events[-1]["response"]) == text_of(whole(target))


@rule("usage is the same streamed or not", API)
def test_usage(target: Target) -> None:
    usages = [whole(target)["usage"], stream(target)[-1]["response"]["usage"]]
    assert len({(usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) for usage in usages}) == 1


@rule("a stored response is retrieved as it was answered", API)
def test_retrieve(target: Target) -> None:
    found = whole(target)
    answer = target.ask("GET", f"{RESPONSES}/{found['id']}")
    if answer.status in (405, 501):
        not_offered("responses can't be retrieved")
    assert answer.status == 200
    assert answer.json() == found


@rule("a response that isn't stored is not found, nor one that never was", API)
def test_unknown(target: Target) -> None:
    found = whole(target, store=False)
    for name in (found["id"], "resp_of_nobody"):
        assert target.ask("GET", f"{RESPONSES}/{name}").status == 404


@rule("a background response is answered at once, and can be cancelled again and again", API)
def test_background(target: Target) -> None:
    answer = ask(target, background=True, max_output_tokens=400, input="Tell me a very long story.")
    if answer.status == 400:
        not_offered("background is refused")
    found = answer.json()
    assert found["status"] in ("queued", "in_progress", "completed", "incomplete")
    for _ in range(2):
        cancelled = target.ask("POST", f"{RESPONSES}/{found['id']}/cancel", {})
        assert cancelled.status == 200
        assert cancelled.json()["status"] in ("cancelled", "completed", "incomplete")


@rule("a background stream goes on behind starting_after, once each", API)
@pytest.mark.parametrize("after", [0, 2, 5])
def test_resume(target: Target, after: int) -> None:
    answer = ask(target, background=True, stream=True)
    if answer.status == 400:
        not_offered("background is refused")
    events = events_of(answer)
    name = events[0]["response"]["id"]
    rest = target.ask("GET", f"{RESPONSES}/{name}?stream=true&starting_after={after}")
    assert rest.status == 200
    assert events_of(rest) == events[after + 1 :]


@rule("previous_response_id carries the conversation on", API)
def test_previous(target: Target) -> None:
    first = whole(target)
    spelled = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And of Spain?"},
    ]
    chained = whole(target, input="And of Spain?", previous_response_id=first["id"])
    assert chained["usage"]["input_tokens"] == whole(target, input=spelled)["usage"]["input_tokens"]


@rule("an unknown previous response is a 4xx that names the field", API, "should")
def test_unknown_previous(target: Target) -> None:
    answer = ask(target, previous_response_id="resp_of_nobody")
    assert answer.status in (400, 404)
    assert answer.json()["error"]["param"] == "previous_response_id"
