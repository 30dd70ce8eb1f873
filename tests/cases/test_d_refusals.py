"""Kind D of the fault cases: what is refused, and how. Each test names its case.

A refusal is a whole answer in OpenAI's shape that names the field, before any byte of a stream; the server goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pytest

from tests.support.readings import agree, of_chunks, read_all
from tests.support.serving import Server, WebSocketClient, chat

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BLOCKS = 8
LIMIT = BLOCKS * 16  # tokens of the small server's context


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pieces = ["ABC", "DEF", "G", "HI", "J"]
    with Server(scripts=[{"match": "play stops", "tokens": pieces}]) as server:
        yield server


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    with Server("--kv-blocks", str(BLOCKS)) as server:
        yield server


class TestD11EmptyPrompts:
    """Empty is refused by name, and spoils nothing for those beside it."""

    @pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []], None, {}, [None], [1, "a"], [1.5]])
    @pytest.mark.parametrize("stream", [False, True])
    def test_completions(self, server: Server, prompt: Any, stream: bool) -> None:
        error = server.ask("POST", COMPLETIONS, {"prompt": prompt, "stream": stream}).error(400)
        assert error["type"] == "invalid_request_error"
        assert error["param"].startswith("prompt")
        assert agree(read_all(server, "play stops")).text == "ABCDEFGHIJ"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([], "messages"),
            (None, "messages"),
            ("hi", "messages"),
            ([{}], "messages.role"),
            ([{"role": "user"}], "messages.0.content"),
            ([{"role": "user", "content": None}], "messages.0.content"),
            ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0.type"),
            ([{"role": "robot", "content": "x"}], "messages.role"),
        ],
    )
    def test_chat(self, server: Server, messages: Any, param: str) -> None:
        error = server.ask("POST", CHAT, {"messages": messages}).error(400)
        assert error["param"].replace(".0", "") == param.replace(".0", "")

    @pytest.mark.parametrize("content", ["", " ", "\n\t ", [], [{"type": "text", "text": ""}]])
    def test_empty_content_is_a_turn(self, server: Server, content: Any) -> None:
        """The template gives it a prompt of its own: there is something to go on from."""
        assert server.ask("POST", CHAT, {**chat(content), "max_tokens": 2}).json()["usage"]["completion_tokens"] == 2

    def test_whitespace_is_a_prompt(self, server: Server) -> None:
        usage = server.ask("POST", COMPLETIONS, {"prompt": " \n", "max_tokens": 2}).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 2)


class TestD12MaxTokens:
    """One token is one token; what is no positive whole number is refused by name; none means up to the context."""

    @pytest.mark.parametrize("value", [0, -1, "5", 2.5, True, [], {}, -(2**70), 10**400])
    @pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
    @pytest.mark.parametrize("stream", [False, True])
    def test_refused(self, server: Server, value: Any, name: str, stream: bool) -> None:
        error = server.ask("POST", CHAT, chat("hi", stream=stream, **{name: value})).error(400)
        assert error["param"] == name
        if name == "max_tokens":
            body = {"prompt": "hi", name: value, "stream": stream, "echo": True}
            assert server.ask("POST", COMPLETIONS, body).error(400)["param"] == name

    def test_one(self, server: Server) -> None:
        reading = agree(read_all(server, "play stops", max_tokens=1))
        assert (reading.text, reading.reason) == ("ABC", "length")
        assert reading.usage is not None and reading.usage["completion_tokens"] == 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_one_with_echo(self, server: Server, stream: bool) -> None:
        body = {"prompt": "play stops", "max_tokens": 1, "echo": True, "stream": stream}
        answer = server.ask("POST", COMPLETIONS, body)
        text = answer.text() if stream else answer.json()["choices"][0]["text"]
        assert text == "play stopsABC"

    @pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_tokens": 10**9}, {"max_tokens": 2**63}])
    def test_up_to_the_context(self, fields: dict[str, Any]) -> None:
        with Server("--kv-blocks", "4") as small:
            for stream in (False, True):
                answer = small.ask("POST", COMPLETIONS, {"prompt": "x" * 10, "stream": stream, **fields})
                if stream:
                    text, reason = (reading := of_chunks(answer.chunks())).text, reading.reason
                else:
                    text, reason = itemgetter("text", "finish_reason")(answer.json()["choices"][0])
                assert (len(text), reason) == (54 * len(" 0000"), "length")

    def test_max_completion_tokens_wins(self, server: Server) -> None:
        body = chat("hi", max_tokens=9, max_completion_tokens=2)
        assert server.ask("POST", CHAT, body).json()["usage"]["completion_tokens"] == 2


class TestD17HostileBodies:
    """400 that isn't worth repeating, and a server that goes on."""

    SURROGATES = (
        '{"messages":[{"role":"user","content":"\\ud83d"}]}',
        '{"messages":[{"role":"user","content":"x \\udc00 y"}]}',
        '{"messages":[{"role":"user","content":[{"type":"text","text":"\\ud83d"}]}]}',
        '{"messages":[{"role":"\\ud83d","content":"x"}]}',
        '{"messages":[{"role":"user","content":"x","name":"\\ud83d"}]}',
        '{"messages":[{"role":"user","content":"x"}],"stop":"\\ud83d"}',
        '{"messages":[{"role":"user","content":"x"}],"stop":["a","\\ud83d"]}',
        '{"messages":[{"role":"user","content":"x"}],"model":"\\ud83d"}',
        '{"messages":[{"role":"user","content":"x"}],"user":"\\ud83d"}',
        '{"messages":[{"role":"user","content":"x"}],"metadata":{"\\ud83d":"a"}}',
        '{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"\\ud83d"}}]}',
        '{"messages":[{"role":"user","content":"x"}],"\\ud83d":1}',
    )

    @pytest.mark.parametrize("document", SURROGATES)
    def test_lone_surrogates(self, server: Server, document: str) -> None:
        for stream in ("", '"stream":true,'):
            answer = server.ask("POST", CHAT, ("{" + stream + document[1:]).encode())
            assert answer.error(400)["type"] == "invalid_request_error"
        with WebSocketClient(server) as socket:
            socket.send_text('{"type":"generate","id":"a",' + document[1:])
            assert socket.receive_json()["type"] == "error"
            socket.send_json(type="generate", id="b", **chat("hi", max_tokens=1))
            socket.receive_until("done")

    @pytest.mark.parametrize("field", ["prompt", "stop", "model", "user"])
    def test_lone_surrogates_in_completions(self, server: Server, field: str) -> None:
        other = "" if field == "prompt" else ',"prompt":"x"'
        answer = server.ask("POST", COMPLETIONS, f'{{"{field}":"\\ud83d"{other}}}'.encode())
        assert answer.error(400)["type"] == "invalid_request_error"

    @pytest.mark.parametrize("text", [b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"a\x00b"])
    def test_invalid_utf8_and_nul(self, server: Server, text: bytes) -> None:
        for body in (
            b'{"messages":[{"role":"user","content":"%b"}]}' % text,
            b'{"prompt":"%b"}' % text,
            b'{"prompt":"x","user":"%b"}' % text,
            b'{"prompt":"x","%b":1}' % text,
            text,
        ):
            path = CHAT if b"messages" in body else COMPLETIONS
            assert server.ask("POST", path, body).error(400)["type"] == "invalid_request_error"

    def test_an_escaped_nul_is_text(self, server: Server) -> None:
        usage = server.ask("POST", COMPLETIONS, {"prompt": "a\0b", "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == 3

    @pytest.mark.parametrize(
        "document",
        [
            b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"max_tokens":2}',
            b'{"messages":[{"role":"user","content":"x"}],"messages":[{"role":"user","content":"x"}]}',
            b'{"messages":[{"role":"user","content":"x","content":"y"}]}',
            b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"m\\u0061x_tokens":1}',
            b'{"messages":[{"role":"user","content":"x"}],"metadata":{"a":"1","a":"1"}}',
        ],
    )
    def test_repeated_names(self, server: Server, document: bytes) -> None:
        """Refused, since parsers differ on which one counts."""
        error = server.ask("POST", CHAT, document).error(400)
        assert "twice" in error["message"]
        with WebSocketClient(server) as socket:
            socket.send_text('{"type":"generate","id":"a",' + document[1:].decode())
            assert "twice" in socket.receive_json()["error"]["message"]

    @pytest.mark.parametrize("field", ["messages", "prompt", "stop", "tools", "tool_choice", "metadata", "nonsense"])
    @pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
    def test_deep_nesting(self, server: Server, field: str, opening: str, closing: str) -> None:
        nested = opening * 10_000 + "1" + closing * 10_000
        base = '{"messages":[{"role":"user","content":"x"}],' if field != "messages" else "{"
        assert server.ask("POST", CHAT, f'{base}"{field}":{nested}}}'.encode()).error(400)
        base = '{"prompt":"x",' if field != "prompt" else "{"
        assert server.ask("POST", COMPLETIONS, f'{base}"{field}":{nested}}}'.encode()).error(400)
        assert server.ask("POST", COMPLETIONS, nested.encode()).error(400)
        with WebSocketClient(server) as socket:
            socket.send_text(f'{{"type":"generate","id":"a","{field}":{nested}}}')
            assert socket.receive_json()["type"] == "error"

    @pytest.mark.parametrize("depth", [600, *range(950, 980)])  # the last of which can't be decoded
    def test_deep_tools_are_to_blame(self, server: Server, depth: int) -> None:
        """Never the messages, which are flat."""
        schema = '{"a":' * depth + "{}" + "}" * depth
        for path, prompt, tool in (
            (CHAT, "messages", '{"type":"function","function":{"name":"f","parameters":%s}}'),
            ("/tokenize", "messages", '{"type":"function","function":{"name":"f","parameters":%s}}'),
            ("/v1/responses", "input", '{"type":"function","name":"f","parameters":%s}'),
            ("/v1/messages", "messages", '{"name":"f","input_schema":{"type":"object","a":%s}}'),
        ):
            limit = '"max_tokens":1,' if path == "/v1/messages" else ""
            body = (
                f'{{{limit}"model":"synthetic","{prompt}":[{{"role":"user","content":"x"}}],"tools":[{tool % schema}]}}'
            )
            answer = server.ask("POST", path, body.encode(), [("anthropic-version", "2023-06-01")])
            assert answer.status == 400
            error = answer.json()["error"]
            assert error["message"].startswith(("tools ", "the body is not valid JSON"))
            assert error.get("param") in ("tools", None)

    def test_deep_nesting_in_a_query(self, server: Server) -> None:
        for name in ("metadata", "logit_bias", "stream_options"):
            assert server.ask("GET", f"/v1/generate?prompt=x&{name}={'[' * 10_000}").error(400)["param"] == name

    @pytest.mark.parametrize(
        "name",
        ["max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "min_tokens", "priority",
         "frequency_penalty", "presence_penalty", "repetition_penalty", "top_logprobs", "stop_token_ids",
         "logit_bias", "stream"],
    )  # fmt: skip
    @pytest.mark.parametrize(
        "number", ["1e400", "-1e400", "9" * 400, "-" + "9" * 400, "9" * 5000, "1e-400000", "NaN", "Infinity", "0x10"]
    )
    def test_huge_numbers(self, server: Server, name: str, number: str) -> None:
        body = f'{{"messages":[{{"role":"user","content":"x"}}],"max_completion_tokens":1,"{name}":{number}}}'
        answer = server.ask("POST", CHAT, body.encode())
        if number == "1e-400000" and answer.status == 200:
            return  # it is zero
        error = answer.error(400)
        assert error["param"] is None or error["param"].startswith(name)
        with WebSocketClient(server) as socket:
            socket.send_text('{"type":"generate","id":"a",' + body[1:])
            assert socket.receive_json()["type"] == "error"

    @pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", "9" * 400, "1_0", "0x1", "", " 1"])
    @pytest.mark.parametrize("name", ["max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed"])
    def test_odd_numbers_in_a_query(self, server: Server, name: str, number: str) -> None:
        target = f"/v1/generate?prompt=x&{name}={number.replace(' ', '%20')}"
        assert server.ask("GET", target).error(400)["param"] == name

    def test_huge_numbers_among_ids(self, server: Server) -> None:
        for ids in ([-1], [10**9], [2**64], [1, 2**70], [[1, -1]]):
            assert server.ask("POST", COMPLETIONS, {"prompt": ids}).error(400)["param"].startswith("prompt")
            body = {"prompt": "x", "stop_token_ids": ids}
            assert server.ask("POST", COMPLETIONS, body).error(400)["param"].startswith("stop_token_ids")


# For every field of both APIs, values that aren't of its type, or not in its range.
WRONG: dict[str, list[Any]] = {
    "model": [5, [], {}, True],
    "stream": ["true", 1, 0, []],
    "stream_options": [1, "x", [], {"include_usage": 1}, {"x": True}],
    "max_tokens": ["1", 1.5, {}, True],
    "temperature": ["1", [], -0.1, 2.1, True],
    "top_p": ["1", -1, 0, 1.01],
    "top_k": ["1", 1.5, -2],
    "min_p": ["x", -0.1, 1.1],
    "n": [0, -1, 17, "1", 1.5],
    "stop": [1, [1], [""], "", [None], {"a": 1}, ["a"] * 17],
    "seed": ["1", 1.5, []],
    "min_tokens": [-1, "1", 0.5],
    "ignore_eos": [1, "true"],
    "stop_token_ids": [1, ["1"], [-1], [10**6], [1] * 257],
    "skip_special_tokens": [1, "no"],
    "priority": ["1", 1.5, [], True],
    "user": [1, {}],
    "metadata": ["x", {"a": 1}, [1]],
    "store": [1, True],
    "service_tier": [1],
    "frequency_penalty": ["x", 2.1, -2.1],
    "presence_penalty": ["x", 2.1, -2.1],
    "repetition_penalty": ["x", 0, -1, 101],
    "logit_bias": [[], {"1": "x"}, {"1": 101}, {"1": -101}, {"1000000": 1}, {"-1": 1}, {"a": 1}, {"01": 1}],
}
# fmt: off
WRONG_IN_CHAT: dict[str, list[Any]] = {
    "max_completion_tokens": [0, "1"],
    "logprobs": [1, "true"],
    "prompt_logprobs": [-1, 21, "1", 1.5],
    "top_logprobs": [-1, 21, "1", 2],  # the last one for want of logprobs
    "tools": ["x", [1], [{"type": "function"}], [{"type": "custom", "custom": {"name": "f"}}], [{"type": "function",
              "function": {"name": "no name"}}], [{"type": "function", "function": {"name": "f", "parameters": []}}]],
    "tool_choice": ["required", "any", {"type": "function"}, {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [1],
    "functions": ["x", [{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "response_format": ["text", {}, {"type": "yaml"}, {"type": "json_schema"}],
    "modalities": ["text", ["audio"]],
    "audio": [{"voice": "x"}],
    "prediction": [{"type": "content"}],
    "web_search_options": [{}],
    "reasoning_effort": ["low"],
    "verbosity": ["low"],
}
# fmt: on
WRONG_IN_COMPLETIONS: dict[str, list[Any]] = {
    "echo": [1, "true"],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21, "1", 1.5],
    "suffix": ["x", 1],
    "best_of": [2, "1"],
}


class TestEveryField:
    """Each works or is refused by name, alike on both APIs, over GET and over WebSocket."""

    @pytest.mark.parametrize("name", WRONG | WRONG_IN_CHAT)
    def test_chat(self, server: Server, name: str) -> None:
        for value in (WRONG | WRONG_IN_CHAT)[name]:
            answer = server.ask("POST", CHAT, chat("hi") | {name: value})
            assert (answer.error(400)["param"] or "").startswith(name), (value, answer.body)
            with WebSocketClient(server) as socket:
                socket.send_json(type="generate", id="a", **(chat("hi") | {name: value}))
                message = socket.receive_json()
            assert message["id"] == "a"
            assert (message["error"]["param"] or "").startswith(name), (value, message)

    @pytest.mark.parametrize("name", WRONG | WRONG_IN_COMPLETIONS)
    def test_completions(self, server: Server, name: str) -> None:
        for value in (WRONG | WRONG_IN_COMPLETIONS)[name]:
            answer = server.ask("POST", COMPLETIONS, {"prompt": "hi", name: value})
            assert (answer.error(400)["param"] or "").startswith(name), (value, answer.body)

    @pytest.mark.parametrize("name", ["unknown", "max_token", "Stream", "", "a.b", "é", "x" * 1000])
    def test_unknown_fields(self, server: Server, name: str) -> None:
        for path, body in ((CHAT, chat("hi")), (COMPLETIONS, {"prompt": "hi"})):
            error = server.ask("POST", path, {**body, name: 1}).error(400)
            assert (error["param"] or "") == name
            assert error["code"] == "unknown_parameter"

    def test_null_is_absent(self, server: Server) -> None:
        nulls: dict[str, Any] = dict.fromkeys(WRONG | WRONG_IN_CHAT)
        answer = server.ask("POST", CHAT, {**nulls, **chat("hi"), "max_tokens": 1})
        assert answer.status == 200
        nulls = dict.fromkeys(WRONG | WRONG_IN_COMPLETIONS)
        assert server.ask("POST", COMPLETIONS, {**nulls, "prompt": "hi", "max_tokens": 1}).status == 200


class TestD18Errors:
    """One shape for all of them, always JSON, always with a request id."""

    @pytest.mark.parametrize(
        "body", [b"{", b"", b"null", b"[]", b'"x"', b"{}", b"{'a':1}", b'{"a":1}x', b"\xef\xbb\xbf{}"]
    )
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_no_valid_body(self, server: Server, path: str, body: bytes) -> None:
        assert server.ask("POST", path, body).error(400)["type"] == "invalid_request_error"

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_unknown_model(self, server: Server, path: str) -> None:
        body: dict[str, Any] = chat("hi") if path == CHAT else {"prompt": "hi"}
        error = server.ask("POST", path, {**body, "model": "gpt-\u2603"}).error(404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert server.ask("GET", "/v1/models/nope").error(404)["code"] == "model_not_found"

    @pytest.mark.parametrize(
        "target", ["/playground", "/v1", "/v1/", "/v1/chat", "/v2/models", "/v1/chat/completions/", "/%2e%2e"]
    )
    def test_unknown_route(self, server: Server, target: str) -> None:
        assert server.ask("GET", target).error(404)["type"] == "not_found_error"
        assert server.ask("POST", target, {"a": 1}).error(404)["type"] == "not_found_error"

    @pytest.mark.parametrize(
        ("method", "target"),
        [("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", CHAT), ("POST", "/v1/models"), ("PATCH", "/health"),
         ("POST", "/v1/generate"), ("PURGE", "/v1/streams/x"), ("POST", "/metrics")],
    )  # fmt: skip
    def test_wrong_method(self, server: Server, method: str, target: str) -> None:
        answer = server.ask(method, target)
        assert answer.error(405)["type"] == "invalid_request_error"
        assert answer.header("allow")

    @pytest.mark.parametrize(
        "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
    )
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_wrong_content_type(self, server: Server, path: str, kind: str) -> None:
        assert server.ask("POST", path, b'{"prompt":"x"}', [("Content-Type", kind)]).error(415)

    @pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON"])
    def test_right_content_type(self, server: Server, kind: str) -> None:
        body = b'{"prompt":"x","max_tokens":1}'
        assert server.ask("POST", COMPLETIONS, body, [("Content-Type", kind)]).status == 200
        assert server.ask("POST", COMPLETIONS, body).status == 200

    @pytest.mark.parametrize("charset", ["latin-1", "ISO-8859-1", "utf-16", "x"])
    def test_a_charset_has_no_effect(self, server: Server, charset: str) -> None:
        """RFC 8259 8.1 and 11: JSON is UTF-8, and what a charset says of it is void. What isn't UTF-8 is never read as
        something else."""
        kind = [("Content-Type", f"application/json; charset={charset}")]
        body = chat("café", model="none")
        unknown = server.ask("POST", CHAT, json.dumps(body, ensure_ascii=False).encode(), kind).error(404)
        assert unknown["code"] == "model_not_found"
        for encoding in ("latin-1", "utf-16"):
            text = json.dumps(body, ensure_ascii=False).encode(encoding)
            assert server.ask("POST", CHAT, text, kind).error(400)["code"] == "invalid_json"

    def test_overload(self) -> None:
        with (
            Server("--max-streams", "1", "--resume-ttl", "0", "--synthetic-step-ms", "20") as server,
            server.connect() as first,
        ):
            first.request("POST", CHAT, chat("hi", stream=True))
            first.begin("POST")
            for path, body in ((CHAT, chat("hi")), (COMPLETIONS, {"prompt": "hi"})):
                answer = server.ask("POST", path, body)
                assert answer.error(503)["type"] == "overloaded_error"
                assert int(answer.header("retry-after") or 0) > 0


class TestD19ContextLength:
    """A prompt must leave room for one token, else 400 with the counts before any byte of a stream; max_tokens beyond
    the room is cut to it."""

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, LIMIT * 10])
    def test_too_long(self, small: Server, length: int, stream: bool) -> None:
        around = small.ask("POST", CHAT, chat("", max_tokens=1)).json()["usage"]["prompt_tokens"]
        for path, body, param in (
            (COMPLETIONS, {"prompt": "x" * length}, "prompt"),
            (COMPLETIONS, {"prompt": [7] * length}, "prompt"),
            (COMPLETIONS, {"prompt": ["a", "x" * length]}, "prompt"),
            (CHAT, chat("x" * (length - around)), "messages"),
        ):
            for extra in ({}, {"max_tokens": 1}, {"max_tokens": 10**6}):
                error = small.ask("POST", path, {**body, **extra, "stream": stream}).error(400)
                assert (error["code"], error["param"]) == ("context_length_exceeded", param)
                assert str(length) in error["message"] and str(LIMIT) in error["message"]
        assert small.metrics()['sluice_kv_blocks{state="used"}'] == 0

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("room", "asked"), [(1, None), (1, 1), (1, 10**6), (2, None), (2, 3), (40, 10**6), (40, 39)]
    )
    def test_what_fits_is_served_to_the_brim(self, small: Server, room: int, asked: int | None, stream: bool) -> None:
        around = small.ask("POST", CHAT, chat("", max_tokens=1)).json()["usage"]["prompt_tokens"]
        expected = room if asked is None else min(room, asked)
        for path, body in (
            (COMPLETIONS, {"prompt": "x" * (LIMIT - room)}),
            (CHAT, chat("x" * (LIMIT - room - around))),
        ):
            options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            answer = small.ask("POST", path, {**body, **options, "max_tokens": asked})
            usage = answer.chunks()[-1]["usage"] if stream else answer.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (LIMIT - room, expected)

    def test_over_websocket_and_get(self, small: Server) -> None:
        assert small.ask("GET", f"/v1/generate?prompt={'x' * 500}").error(400)["code"] == "context_length_exceeded"
        with WebSocketClient(small) as socket:
            socket.send_json(type="generate", id="a", **chat("x" * 500))
            assert socket.receive_json()["error"]["code"] == "context_length_exceeded"
        with WebSocketClient(small) as socket:
            socket.send_text("x" * 500)
            assert socket.closed().code == 1008
