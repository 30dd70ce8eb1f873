"""The Responses API from outside (issue 7, item 2): the official SDK, raw sockets, and what is stored between."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.probes import wait_idle
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import Answer, Server, WebSocketClient, chat, until

pytestmark = pytest.mark.synthetic

RESPONSES = "/v1/responses"
STARTED = 'sluice_requests_started_total{api="responses"}'
TEXT = ["né", '"', "\\", "\n", "😀", "a\u2028b", {"hex": "e4b8"}, {"hex": "ad"}, "</script>", "\x00", "end"]
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
DONE = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "odd text", "tokens": TEXT},
        {"match": "fails", "tokens": ["a", "b", {"error": "on purpose"}]},
        {"match": "too long", "tokens": ["a", "b"], "finish": "length"},
        {"match": "empty", "tokens": []},
        {"match": "waits", "tokens": ["a", "b", {"pause_ms": 60_000}]},
    ]
    with Server("--drain-timeout", "0", scripts=scripts) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[OpenAI]:
    """Every object that it makes must be of the SDK's own types exactly."""
    url = f"{server.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def create(server: Server, given: Any, headers: list[tuple[str, str]] | None = None, **fields: Any) -> Answer:
    return server.ask("POST", RESPONSES, {"input": given, **fields}, headers or ())


def streamed(server: Server, given: Any, accept: tuple[str, str] = EVENT_STREAM, **fields: Any) -> Answer:
    answer = create(server, given, [accept], stream=True, **fields)
    assert (answer.status, answer.end) == (200, "whole")
    return answer


def refused(server: Server, given: Any = "hi", **fields: Any) -> tuple[Any, Any]:
    error = create(server, given, **fields).error(400)
    return error["param"], error["code"]


def blocks(answer: Answer) -> list[bytes]:
    *events, rest = bytes(answer.body).split(b"\n\n")
    assert rest == b""
    return [event + b"\n\n" for event in events]


# The grammar


@pytest.mark.parametrize(
    ("given", "text", "last", "status"),
    [
        ("odd text", 'né"\\\n😀a\u2028b中</script>\x00end', "response.completed", "completed"),
        ("too long", "ab", "response.incomplete", "incomplete"),
        ("empty", "", "response.completed", "completed"),
    ],
)
def test_a_stream_is_typed_numbered_and_whole(server: Server, given: str, text: str, last: str, status: str) -> None:
    answer = streamed(server, given)
    events = answer.events()
    datas = answer.chunks()
    assert [event.event for event in events] == [data["type"] for data in datas]
    deltas = len(events) - len(OPENING) - len(DONE) - 1
    assert [data["type"] for data in datas] == [*OPENING, *[DELTA] * deltas, *DONE, last]
    assert [data["sequence_number"] for data in datas] == list(range(len(events)))
    assert [event.id for event in events] == [f"{answer.header('x-stream-id')}:{n}" for n in range(len(events))]
    assert "".join(data["delta"] for data in datas if data["type"] == DELTA) == text
    response = datas[-1]["response"]
    item = response["output"][0]
    assert (response["status"], item["status"], item["content"][0]["text"]) == (status, status, text)
    assert datas[-4]["text"] == text and datas[-3]["part"] == item["content"][0] and datas[-2]["item"] == item
    assert {data["item_id"] for data in datas if "item_id" in data} == {item["id"]}
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)
    assert datas[0]["response"].items() >= {"id": response["id"], "status": "in_progress", "output": []}.items()


def test_a_fault_ends_it_as_failed_and_never_as_complete(server: Server) -> None:
    datas = streamed(server, "fails").chunks()
    assert [data["type"] for data in datas] == [*OPENING, DELTA, DELTA, "response.failed"]
    response = datas[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "on purpose" in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 2
    assert create(server, "fails").error(500)["code"] == "error"
    assert server.ask("GET", f"{RESPONSES}/{response['id']}").json() == response


def test_a_cancel_ends_it_as_cancelled(server: Server) -> None:
    with server.connect() as client:
        client.request("POST", RESPONSES, {"input": "waits", "stream": True})
        client.begin("POST")
        client.read_events(6)
        found = client.read_events(6).chunks()[0]["response"]["id"]
        cancelled = server.ask("POST", f"{RESPONSES}/{found}/cancel").json()
        last = client.finish().chunks()[-1]
    assert (last["type"], last["response"]) == ("response.cancelled", cancelled)
    assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "ab")
    assert cancelled["usage"]["output_tokens"] == 2
    assert server.ask("POST", f"{RESPONSES}/{found}/cancel").json() == cancelled  # again changes nothing


def test_a_deadline_ends_it_as_failed() -> None:
    scripts = [{"match": "", "tokens": ["a", {"pause_ms": 60_000}]}]
    with Server("--request-timeout", "0.2", "--drain-timeout", "0", scripts=scripts) as server:
        response = streamed(server, "hi").chunks()[-1]["response"]
    assert (response["status"], response["error"]["type"]) == ("failed", "timeout_error")


@pytest.mark.parametrize("given", ["odd text", "too long", "fails"])
def test_every_framing_resumes_at_every_position_byte_for_byte(server: Server, given: str) -> None:
    answer = streamed(server, given)
    name, events = answer.header("x-stream-id"), blocks(answer)
    identity = answer.chunks()[0]["response"]["id"]
    lines = bytes(server.ask("GET", f"/v1/streams/{name}", None, [NDJSON]).body).splitlines(keepends=True)
    assert lines[-1] == b'{"done":true}\n' and len(lines) == len(events) + 1
    for after in range(len(events) - 1):
        last = ("Last-Event-ID", f"{name}:{after}")
        for rest in (
            server.ask("GET", f"/v1/streams/{name}?after={after}"),
            server.ask("GET", f"{RESPONSES}/{identity}?stream=true&starting_after={after}"),
            server.ask("GET", f"{RESPONSES}/{identity}?stream=true&starting_after=0", None, [last]),
            create(server, "whatever", [last], stream=True),
        ):
            assert (rest.status, bytes(rest.body)) == (200, b"".join(events[after + 1 :]))
        for target in (f"/v1/streams/{name}?after={after}", f"{RESPONSES}/{identity}?stream=1&starting_after={after}"):
            rest = server.ask("GET", target.replace("stream=1", "stream=true"), None, [NDJSON])
            assert (rest.status, bytes(rest.body)) == (200, b"".join(lines[after + 1 :]))
    poll = server.ask("GET", f"/v1/streams/{name}?after=2", None, [("Accept", "application/json")]).json()
    assert [each["data"] for each in poll["events"]] == answer.chunks()[3:]
    assert [each["event"] for each in poll["events"]] == [event.event for event in answer.events()[3:]]
    past = server.ask("GET", f"{RESPONSES}/{identity}?stream=true&starting_after={len(events) - 1}")
    assert past.status == 204


def test_plain_text_is_the_text(server: Server) -> None:
    answer = streamed(server, "odd text", PLAIN)
    text = 'né"\\\n😀a\u2028b中</script>\x00end'.encode()
    name = answer.header("x-stream-id")
    assert bytes(answer.body) == text
    assert bytes(server.ask("GET", f"/v1/streams/{name}?after_bytes=5", None, [PLAIN]).body) == text[5:]


@pytest.mark.parametrize(("given", "last"), [("odd text", "done"), ("fails", "error")])
def test_a_websocket_shows_the_text_behind_a_position(server: Server, given: str, last: str) -> None:
    answer = streamed(server, given)
    deltas = [(data["sequence_number"], data["delta"]) for data in answer.chunks() if data["type"] == DELTA]
    for after in (-1, len(OPENING), len(OPENING) + 1):
        with WebSocketClient(server) as socket:
            socket.send_json(type="resume", id="a", stream=answer.header("x-stream-id"), after=after)
            assert socket.receive_json()["type"] == "started"
            shown = []
            while (message := socket.receive_json())["type"] == "token":
                shown.append((message["n"], message["text"]))
        assert (shown, message["type"]) == ([each for each in deltas if each[0] > after], last)


def test_g04_usage_is_the_same_everywhere(server: Server) -> None:
    before = server.metrics()
    whole = create(server, "the same prompt each time, of many tokens", max_output_tokens=7).json()
    last = streamed(server, "the same prompt each time, of many tokens", max_output_tokens=7).chunks()[-1]["response"]
    usages = [response["usage"] for response in (whole, last)]
    counts = [(usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) for usage in usages]
    assert counts[0] == counts[1] == (counts[0][0], 7, counts[0][0] + 7)
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in usages]
    assert all(0 <= count <= counts[0][0] for count in cached) and cached[1] > 0
    after = server.metrics()
    for series, expected in (("prompt", 2 * counts[0][0]), ("generated", 14), ("cached", sum(cached))):
        name = f"sluice_{series}_tokens_total"
        assert after[name] - before[name] == expected
    line = until(lambda: [each for each in server.log.splitlines() if last["id"][5:13] in each], "an access line")[0]
    assert f"prompt_tokens={counts[0][0]} cached_tokens={cached[1]} completion_tokens=7" in line


def test_log_probabilities(server: Server) -> None:
    fields: dict[str, Any] = {"max_output_tokens": 3, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    answer = streamed(server, "hi", **fields)
    deltas = [data for data in answer.chunks() if data["type"] == DELTA]
    assert [event.event for event in answer.events()].count(DELTA) == 3
    told = [data["logprobs"][0] for data in deltas]
    assert [len(each["top_logprobs"]) for each in told] == [2, 2, 2]
    assert answer.chunks()[-1]["response"]["output"][0]["content"][0]["logprobs"] == told
    again = create(server, "hi", max_output_tokens=3, include=["message.output_text.logprobs"]).json()
    assert [each["top_logprobs"] for each in again["output"][0]["content"][0]["logprobs"]] == [[], [], []]


# The conversation


def said(answer: Answer) -> Any:
    assert answer.status == 200
    return answer.json()["output"][0]["content"][0]["text"]


def test_input_has_many_forms_and_each_is_the_same_prompt(server: Server) -> None:
    """D15. At temperature 0 the synthetic engine's words depend on the prompt alone."""
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 4}
    forms: list[Any] = [
        "good day",
        [{"role": "user", "content": "good day"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "good day"}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": "good day"}], "status": "completed"}],
    ]
    texts = {said(create(server, form, **fields)) for form in forms}
    messages = chat("good day")["messages"]
    spoken = server.ask("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0})
    assert texts == {spoken.json()["choices"][0]["message"]["content"]}


def test_a_conversation_goes_on(server: Server) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_output_tokens": 4}
    first = create(server, "one", instructions="be brief", **fields).json()
    answer = first["output"][0]["content"][0]["text"]
    spelled = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "two"},
    ]
    second = create(server, "two", previous_response_id=first["id"], **fields)
    assert said(second) == said(create(server, spelled, **fields))  # the instructions are not carried on
    briefly = [{"role": "system", "content": "be brief"}, *spelled]
    other = create(server, "two", previous_response_id=first["id"], instructions="be brief", **fields)
    assert said(other) == said(create(server, briefly, **fields))
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    for earlier in (first["output"][0], reference):  # as it was answered, and by its id
        assert said(create(server, [spelled[0], earlier, spelled[2]], **fields)) == said(second)
    server.ask("DELETE", f"{RESPONSES}/{first['id']}")
    fourth = create(server, "three", previous_response_id=second.json()["id"], **fields)  # the chain stands by itself
    last = [*spelled, {"role": "assistant", "content": said(second)}, {"role": "user", "content": "three"}]
    assert said(fourth) == said(create(server, last, **fields))


def test_a_conversation_goes_on_from_nothing_that_is_not_whole(server: Server) -> None:
    failed = streamed(server, "fails").chunks()[-1]["response"]["id"]
    assert refused(server, previous_response_id=failed)[0] == "previous_response_id"
    unknown = ("previous_response_id", "previous_response_not_found")
    assert refused(server, previous_response_id="resp_of_nobody") == unknown
    unstored = create(server, "hi", store=False, max_output_tokens=1).json()["id"]
    assert refused(server, previous_response_id=unstored) == unknown
    running = create(server, "waits", background=True).json()["id"]
    assert refused(server, previous_response_id=running) == ("previous_response_id", "previous_response_in_progress")
    server.ask("DELETE", f"{RESPONSES}/{running}")


# What is stored


def test_a_background_response_runs_on_without_a_reader(server: Server) -> None:
    answer = create(server, "hello", background=True, max_output_tokens=500)
    begun = answer.json()
    assert answer.status == 200 and begun["status"] in ("queued", "in_progress") and begun["background"]

    def ended() -> Any:
        found = server.ask("GET", f"{RESPONSES}/{begun['id']}").json()
        return found if found["status"] == "incomplete" else None

    found = until(ended, "the response is whole")
    assert found["usage"]["output_tokens"] == 500
    events = server.ask("GET", f"{RESPONSES}/{begun['id']}?stream=true").chunks()
    assert events[-1]["response"] == found and len(events) == 500 + len(OPENING) + len(DONE) + 1


def test_a_background_stream_runs_on_when_its_reader_leaves(server: Server) -> None:
    with server.connect() as client:
        client.request("POST", RESPONSES, {"input": "hi", "background": True, "stream": True, "max_output_tokens": 900})
        client.begin("POST")
        seen = client.read_events(3).chunks()
        client.reset()
    target = f"{RESPONSES}/{seen[0]['response']['id']}"
    until(lambda: server.ask("GET", target).json()["status"] == "incomplete", "it runs to its end")
    rest = server.ask("GET", f"{target}?stream=true&starting_after={len(seen) - 1}").chunks()
    assert [data["sequence_number"] for data in seen + rest] == list(range(len(seen) + len(rest)))


def test_a_background_stream_keeps_no_more_than_its_logs_bound() -> None:
    with Server("--log-bytes-per-stream", "20000") as server:
        begun = create(server, "hi", background=True, max_output_tokens=1000).json()
        target = f"{RESPONSES}/{begun['id']}"
        until(lambda: server.ask("GET", target).json()["status"] == "incomplete", "it runs to its end")
        whole = server.ask("GET", target).json()
        error = server.ask("GET", f"{target}?stream=true&starting_after=0").error(410)
        assert (error["code"], whole["usage"]["output_tokens"]) == ("position_gone", 1000)
        first = int(error["message"].rpartition(" ")[2])
        rest = server.ask("GET", f"{target}?stream=true&starting_after={first - 1}").chunks()
    assert rest[0]["sequence_number"] == first and rest[-1]["response"] == whole


def test_a_response_outlives_its_stream_for_a_while() -> None:
    with Server("--resume-ttl", "0.1") as server:
        found = create(server, "hi", max_output_tokens=2).json()
        target = f"{RESPONSES}/{found['id']}"
        until(lambda: server.ask("GET", f"{target}?stream=true").status == 410, "the stream is gone")
        assert server.ask("GET", target).json() == found
    with Server("--response-ttl", "0") as server:
        found = create(server, "hi", max_output_tokens=2).json()
        assert server.ask("GET", f"{RESPONSES}/{found['id']}").error(404)["code"] == "response_not_found"


def test_what_is_stored_has_a_bound() -> None:
    with Server("--response-bytes", "20000") as server:
        names = [create(server, "x" * 5000, max_output_tokens=1).json()["id"] for _ in range(6)]
        statuses = [server.ask("GET", f"{RESPONSES}/{name}").status for name in names]
    assert statuses[0] == 404 and statuses[-1] == 200 and statuses == sorted(statuses, reverse=True)


def test_a_deleted_response_is_gone_with_its_stream(server: Server) -> None:
    running = create(server, "waits", background=True)
    name, stream = running.json()["id"], running.header("x-stream-id")
    assert server.ask("DELETE", f"{RESPONSES}/{name}").json() == {"id": name, "object": "response", "deleted": True}
    assert server.ask("GET", f"{RESPONSES}/{name}").status == 404
    assert server.ask("DELETE", f"{RESPONSES}/{name}").status == 404
    assert server.ask("GET", f"/v1/streams/{stream}").status == 410
    wait_idle(server)


def test_a_client_of_a_whole_answer_that_leaves_cancels_it(server: Server) -> None:
    before = server.metrics()[CANCELLED]
    with server.connect() as client:
        client.request("POST", RESPONSES, {"input": "waits"})
        until(lambda: server.metrics()['sluice_streams{state="running"}'] == 1, "it runs")
        client.reset()
    server.wait_metric(CANCELLED, before + 1)


CANCELLED = 'sluice_requests_total{api="responses",outcome="cancelled"}'


def test_nobody_sees_the_responses_of_others(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob")}
    path.write_text("".join(f'[keys.{name}]\nsha256 = "{digest}"\n' for name, digest in digests.items()))
    alice, bob = (("Authorization", f"Bearer {name}") for name in digests)
    with Server("--api-keys", str(path)) as server:
        found = create(server, "hi", [alice], max_output_tokens=2).json()["id"]
        target = f"{RESPONSES}/{found}"
        assert server.ask("GET", target, None, [alice]).status == 200
        for method, place in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("GET", "/input_items")):
            assert server.ask(method, target + place, None, [bob]).error(404)["code"] == "response_not_found"
        assert server.ask("DELETE", target, None, [bob]).status == 404
        item = server.ask("GET", target, None, [alice]).json()["output"][0]["id"]
        assert create(server, [{"type": "item_reference", "id": item}], [bob]).error(400)["param"] == "input.0.id"
        answer = create(server, "hi", [bob], previous_response_id=found)
        assert answer.error(400)["code"] == "previous_response_not_found"


def test_b04_a_request_that_is_sent_again_finds_the_same_response(server: Server) -> None:
    before = server.metrics()[STARTED]
    for number, fields in enumerate(({}, {"stream": True}, {"background": True})):
        name = ("Idempotency-Key", f"again-{number}")
        answers = [create(server, "hello", [name], max_output_tokens=3, **fields) for _ in range(2)]
        ids = {(answer.chunks()[0]["response"] if "stream" in fields else answer.json())["id"] for answer in answers}
        assert len(ids) == 1 and [answer.status for answer in answers] == [200, 200]
    assert server.metrics()[STARTED] == before + 3


# What is refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input.0"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id"),
        ({"input": [{"id": "msg_1"}]}, "input.0.id"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id"),
        ({"input": [{}]}, "input.0.id"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": "x", "colour": "red"}]}, "input.0.colour"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input.0.content.0.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"background": True, "store": False}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_does_not_work_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    assert (
        create(server, **{"given": "hi"} | {("given" if k == "input" else k): v for k, v in fields.items()}).error(400)[
            "param"
        ]
        == param
    )


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=maybe", "stream"),
        ("starting_after=3", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("include=reasoning.encrypted_content", "include"),
        ("colour=red", "colour"),
    ],
)
def test_what_cannot_be_retrieved_is_refused_by_name(server: Server, query: str, param: str) -> None:
    name = create(server, "hi", max_output_tokens=1).json()["id"]
    assert server.ask("GET", f"{RESPONSES}/{name}?{query}").error(400)["param"] == param


def test_a_prompt_that_does_not_fit_is_refused_before_it_begins(server: Server) -> None:
    error = create(server, "x" * 200_000, stream=True).error(400)
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


# The official SDK, strict


def test_the_sdk_creates_retrieves_and_streams(sdk: OpenAI) -> None:
    whole = sdk.responses.create(model="synthetic", input="odd text", metadata={"a": "b"}, user="me", instructions="x")
    assert whole.status == "completed" and whole.output_text.startswith("né") and whole.metadata == {"a": "b"}
    assert sdk.responses.retrieve(whole.id) == whole
    with sdk.responses.stream(model="synthetic", input="odd text", instructions="x") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and kinds[-1] == "response.completed"
    items = list(sdk.responses.input_items.list(whole.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"]


def test_the_sdk_comes_back_and_cancels(sdk: OpenAI) -> None:
    with sdk.responses.create(
        model="synthetic", input="hi", background=True, stream=True, max_output_tokens=9
    ) as stream:
        seen = [next(iter(stream)) for _ in range(5)]
    assert seen[0].type == "response.created"
    name = seen[0].response.id
    with sdk.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number) as rest:
        seen += list(rest)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.incomplete"
    with sdk.responses.stream(response_id=name, starting_after=6) as again:
        assert [event.sequence_number for event in again] == list(range(7, len(seen)))
    running = sdk.responses.create(model="synthetic", input="waits", background=True)
    assert sdk.responses.cancel(running.id).status == "cancelled"
    sdk.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(running.id)


def test_the_sdk_sees_a_fault(sdk: OpenAI) -> None:
    with sdk.responses.create(model="synthetic", input="fails", stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.error is not None
    with pytest.raises(openai.InternalServerError):
        sdk.responses.create(model="synthetic", input="fails")


def test_the_sdk_sees_a_cancel(sdk: OpenAI, server: Server) -> None:
    """`response.cancelled` is no type of the SDK's, which does not check it and hands it on."""
    url = f"{server.url}/v1"
    with (
        OpenAI(base_url=url, api_key="none", max_retries=0) as lax,
        lax.responses.create(model="synthetic", input="waits", stream=True) as stream,
    ):
        events = iter(stream)
        first: Any = next(events)
        assert sdk.responses.cancel(first.response.id).status == "cancelled"
        last: Any = list(events)[-1]
    assert (last.type, last.response["status"]) == ("response.cancelled", "cancelled")
