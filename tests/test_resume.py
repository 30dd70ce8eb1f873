"""Coming back to a stream, by every means: byte-identical, once each, and never somebody else's. Black-box."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.probes import GENERATED, crowd, outcomes, wait_idle, words
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import Answer, Server, WebSocketClient, chat, joined, until

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNT = 80
DETACHED = 'sluice_streams{state="detached"}'
JSON = ("Accept", "application/json")
TEXT = ["né", '"', "\\", "\n", "😀", "a\u2028b", {"hex": "e4b8"}, {"hex": "ad"}, "</script>", "\x00", "end"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "odd text", "tokens": TEXT},
        {"match": "fails", "tokens": ["a", "b", {"error": "on purpose"}]},
        {"match": "waits", "tokens": ["a", "b", {"pause_ms": 400}, "c", {"pause_ms": 400}, "d"]},
    ]
    with Server("--synthetic-step-ms", "2", "--drain-timeout", "0", scripts=scripts) as server:
        yield server


def blocks(answer: Answer) -> list[bytes]:
    """The bytes of each server-sent event."""
    *events, rest = bytes(answer.body).split(b"\n\n")
    assert rest == b""
    return [event + b"\n\n" for event in events]


def lines(answer: Answer) -> list[bytes]:
    """The bytes of each line."""
    return bytes(answer.body).splitlines(keepends=True)


def whole(server: Server, content: str = "hi", accept: tuple[str, str] = EVENT_STREAM, **fields: Any) -> Answer:
    """A stream that was read to its end."""
    body = chat(content, stream=True, **({"max_tokens": COUNT} | fields))
    answer = server.ask("POST", CHAT, body, [accept])
    assert answer.end == "whole"
    return answer


class TestFinishedStream:
    """Its log is held, and each reader gets exactly the bytes behind its position."""

    @pytest.mark.parametrize("content", ["hi", "odd text", "fails"])
    def test_sse_from_every_position(self, server: Server, content: str) -> None:
        answer = whole(server, content, n=2)
        name, events = answer.header("x-stream-id"), blocks(answer)
        lines = [event.rstrip(b"\n").split(b"\n") for event in events]
        last_lines = [f"id: {name}:{position}".encode() for position in range(len(events) - 1)]
        assert [line[-1] for line in lines] == [*last_lines, b"data: [DONE]"]
        assert lines[-1][0] == f"id: {name}:{len(events) - 1}".encode()
        for after in range(0, len(events) - 1, 5):
            last = ("Last-Event-ID", f"{name}:{after}")
            expected = b"".join(events[after + 1 :])
            for rest in (
                server.ask("GET", f"/v1/streams/{name}", None, [last]),
                server.ask("GET", f"/v1/streams/{name}?after={after}"),
                server.ask("GET", f"/v1/streams/{name}?after={after}", None, [EVENT_STREAM]),
                server.ask("GET", "/v1/generate?prompt=whatever", None, [last]),
                server.ask("POST", CHAT, chat(content, stream=True), [last]),
                server.ask("POST", COMPLETIONS, {"prompt": "x", "stream": True}, [last]),
            ):
                assert (rest.status, rest.end) == (200, "whole")
                assert bytes(rest.body) == expected
                assert rest.header("x-stream-id") == name
        assert bytes(server.ask("GET", f"/v1/streams/{name}").body) == bytes(answer.body)

    def test_coming_back_starts_no_second_generation(self, server: Server) -> None:
        name = whole(server).header("x-stream-id")
        before = server.metrics()
        for _ in range(5):
            server.ask("POST", CHAT, chat("hi", stream=True), [("Last-Event-ID", f"{name}:3")])
        after = server.metrics()
        assert after[GENERATED] == before[GENERATED]
        assert outcomes(after) == outcomes(before)

    @pytest.mark.parametrize("content", ["hi", "odd text", "fails"])
    def test_ndjson_from_every_position(self, server: Server, content: str) -> None:
        answer = whole(server, content, NDJSON)
        name, events = answer.header("x-stream-id"), lines(answer)
        assert answer.header("x-stream-from") == "0"
        for after in range(0, len(events) - 1, 3):
            rest = server.ask("GET", f"/v1/streams/{name}?after={after}")
            assert rest.header("x-stream-from") == str(after + 1)
            assert bytes(rest.body) == b"".join(events[after + 1 :])

    @pytest.mark.parametrize("content", ["hi", "odd text"])
    def test_plain_text_from_every_byte(self, server: Server, content: str) -> None:
        answer = whole(server, content, PLAIN)
        name, data = answer.header("x-stream-id"), bytes(answer.body)
        for skip in range(0, len(data), max(1, len(data) // 30)):
            rest = server.ask("GET", f"/v1/streams/{name}?after_bytes={skip}")
            assert (bytes(rest.body), rest.end) == (data[skip:], "whole")
        assert server.ask("GET", f"/v1/streams/{name}?after_bytes={len(data)}").status == 204

    def test_plain_text_of_two_choices_is_refused(self, server: Server) -> None:
        name = whole(server, n=2).header("x-stream-id")
        for query, field in (("?after_bytes=0", "after_bytes"), ("", "Accept")):
            error = server.ask("GET", f"/v1/streams/{name}{query}", None, [PLAIN]).error(400)
            assert (error["param"], "one choice" in error["message"]) == (field, True)

    def test_plain_text_of_a_failed_stream_never_looks_whole(self, server: Server) -> None:
        body = chat("fails", stream=True)
        answer = server.ask("POST", CHAT, body, [PLAIN])
        assert (bytes(answer.body), answer.end) == (b"ab", "cut")
        for skip in range(3):
            rest = server.ask("GET", f"/v1/streams/{answer.header('x-stream-id')}?after_bytes={skip}")
            assert (bytes(rest.body), rest.end) == (b"ab"[skip:], "cut")

    @pytest.mark.parametrize("started", [EVENT_STREAM, NDJSON, PLAIN])
    def test_in_another_framing(self, server: Server, started: tuple[str, str]) -> None:
        name = whole(server, "odd text", started).header("x-stream-id")
        sse, ndjson, plain = (
            server.ask("GET", f"/v1/streams/{name}", None, [accept]) for accept in (EVENT_STREAM, NDJSON, PLAIN)
        )
        assert sse.chunks() == ndjson.lines()[:-1]
        assert sse.text() == bytes(plain.body).decode()
        for accept in ("*/*", "text/html"):
            own = server.ask("GET", f"/v1/streams/{name}", None, [("Accept", accept)])
            assert (own.header("content-type") or "").startswith(started[1])

    def test_past_the_end(self, server: Server) -> None:
        """204 stops EventSource; a POST gets an empty stream, since 204 makes fetch-event-source retry for ever."""
        answer = whole(server)
        name, end = answer.header("x-stream-id"), len(blocks(answer)) - 1
        for after in (end, end + 1, end + 1000):
            last = [("Last-Event-ID", f"{name}:{after}")]
            assert server.ask("GET", f"/v1/streams/{name}", None, last).status == 204
            assert server.ask("GET", f"/v1/streams/{name}?after={after}").status == 204
            assert server.ask("GET", "/v1/generate?prompt=x", None, last).status == 204
            posted = server.ask("POST", CHAT, chat("hi", stream=True), last)
            assert (posted.status, bytes(posted.body)) == (200, b"")
            assert (posted.header("content-type") or "").startswith("text/event-stream")

    def test_what_names_no_stream(self, server: Server) -> None:
        name = whole(server).header("x-stream-id") or ""
        other = ("A" if name[0] != "A" else "B") + name[1:]
        for last, status in (
            (f"{other}:1", 404), ("nonsense", 400), (name, 400), (f"{name}:-1", 400), (f"{name}:x", 400),
            (f"{name}:{10**20}", 400),
        ):  # fmt: skip
            for method, target, body in (
                ("POST", CHAT, chat("hi", stream=True)),
                ("POST", COMPLETIONS, {"prompt": "x", "stream": True}),
                ("GET", "/v1/generate?prompt=x", None),
            ):
                server.ask(method, target, body, [("Last-Event-ID", last)]).error(status)
        for target, status in (
            (other, 404), ("x", 404), (f"{name}?after=x", 400), (f"{name}?after=1.5", 400), (f"{name}?nonsense=1", 400),
            (f"{name}?after=-2", 400), (f"{name}?after_bytes=3", 400), (f"{name}?after={'9' * 30}", 400),
            (f"{name}?after=1&after=2", 400),
        ):  # fmt: skip
            server.ask("GET", f"/v1/streams/{target}").error(status)
        assert server.ask("GET", f"/v1/streams/{name}?after_bytes=3", None, [JSON]).error(400)["param"] == "after_bytes"
        server.ask("GET", f"/v1/streams/{name}", None, [("Last-Event-ID", f"{other}:1")]).error(400)
        server.ask("DELETE", f"/v1/streams/{other}").error(404)


class TestRunningStream:
    @pytest.mark.parametrize("accept", [EVENT_STREAM, NDJSON])
    def test_cut_again_and_again(self, server: Server, accept: tuple[str, str]) -> None:
        """At random positions, back by random means; the parts are the whole, and nothing was made twice."""
        chosen = random.Random(1)
        made = server.metrics()[GENERATED]
        parts: list[bytes] = []
        with server.connect() as client:
            client.request("POST", CHAT, chat("cut", stream=True, max_tokens=COUNT), [accept])
            name = client.begin("POST").header("x-stream-id")
            parts += self._some(client, accept, chosen)
        for _ in range(8):
            with server.connect() as client:
                after = len(parts) - 1
                last = [("Last-Event-ID", f"{name}:{after}"), accept]
                if chosen.random() < 0.5:
                    client.request("POST", CHAT, chat("cut", stream=True), last)
                    client.begin("POST")
                else:
                    client.request("GET", f"/v1/streams/{name}", None, last)
                    client.begin()
                parts += self._some(client, accept, chosen)
        rest = server.ask("GET", f"/v1/streams/{name}?after={len(parts) - 1}")
        parts += blocks(rest) if accept is EVENT_STREAM else lines(rest)
        whole = server.ask("GET", f"/v1/streams/{name}")
        assert b"".join(parts) == bytes(whole.body)
        text = whole.text() if accept is EVENT_STREAM else joined(whole.lines()[:-1])
        assert words(text) == COUNT
        assert server.metrics()[GENERATED] == made + COUNT

    @staticmethod
    def _some(client: Any, accept: tuple[str, str], chosen: random.Random) -> list[bytes]:
        end = b"\n\n" if accept is EVENT_STREAM else b"\n"
        count = chosen.randint(1, 7)
        answer = client.read_until(lambda answer: answer.body.count(end) >= count)
        parts = bytes(answer.body).split(end)[:-1][:count]  # more may have come: those were lost on their way
        client.reset() if chosen.random() < 0.5 else client.close()
        return [part + end for part in parts]

    def test_two_readers(self, server: Server) -> None:
        """Both get every byte; the second one begins late."""
        with crowd(server, 3) as (one, two, three):
            one.request("POST", CHAT, chat("readers", stream=True, max_tokens=COUNT))
            name = one.begin("POST").header("x-stream-id")
            one.read_events(5)
            two.request("GET", f"/v1/streams/{name}")
            two.begin()
            one.read_events(20)
            three.request("GET", f"/v1/streams/{name}?after=10")
            three.begin()
            two.reset()  # one's leaving is not the others' end
            first = one.finish()
            assert bytes(three.finish().body) == b"".join(blocks(first)[11:])
            assert words(first.text()) == COUNT
        assert bytes(server.ask("GET", f"/v1/streams/{name}").body) == bytes(first.body)

    def test_the_furthest_reader_earns_the_credit(self, server: Server) -> None:
        with server.connect(receive_buffer=4096) as stalled:
            stalled.request("POST", CHAT, chat("furthest", stream=True, max_tokens=600))
            name = stalled.begin("POST").header("x-stream-id")
            assert words(server.ask("GET", f"/v1/streams/{name}").text()) == 600
            assert words(stalled.finish().text()) == 600  # the log holds it

    def test_not_there_yet(self, server: Server) -> None:
        with server.connect() as client:
            client.request("POST", CHAT, chat("waits", stream=True))
            name = client.begin("POST").header("x-stream-id")
            assert "not come yet" in server.ask("GET", f"/v1/streams/{name}?after=1000").error(400)["message"]
            client.finish()

    def test_over_websocket(self, server: Server) -> None:
        with WebSocketClient(server) as socket:
            socket.send_json(type="generate", id="a", **chat("socket", max_tokens=COUNT))
            started = socket.receive_json()
            seen = [socket.receive_json() for _ in range(10)]
        server.wait_metric(DETACHED, 1)
        with WebSocketClient(server) as socket:
            socket.send_json(type="resume", id="b", stream=started["stream"], after=seen[-1]["n"])
            messages = socket.receive_until("done", "error")
            assert messages[0] == {"type": "started", "id": "b", "stream": started["stream"]}
            tokens = [*seen, *(m for m in messages if m["type"] == "token")]
            assert words("".join(m["text"] for m in tokens)) == COUNT
            assert [m["n"] for m in tokens] == sorted({m["n"] for m in tokens})
            for stream, code in ((started["stream"][:-1] + "~", "stream_not_found"), ("x", "stream_not_found")):
                socket.send_json(type="resume", id="c", stream=stream, after=0)
                assert socket.receive_json()["error"]["code"] == code
        text = server.ask("GET", f"/v1/streams/{started['stream']}").text()  # read in another way, too
        assert text == "".join(m["text"] for m in tokens)

    @pytest.mark.parametrize("content", ["hi", "odd text", "fails"])
    def test_over_websocket_from_every_position(self, server: Server, content: str) -> None:
        """Of a stream that has ended, and that began elsewhere; the end is told again each time, past it too."""
        name = whole(server, content, max_tokens=20).header("x-stream-id")
        with WebSocketClient(server) as socket:

            def resumed(after: int) -> list[dict[str, Any]]:
                socket.send_json(type="resume", id="a", stream=name, after=after)
                started, *messages = socket.receive_until("done", "error")
                assert started == {"type": "started", "id": "a", "stream": name}
                return messages

            *every, end = resumed(-1)
            assert "".join(m["text"] for m in every) == server.ask("GET", f"/v1/streams/{name}").text()
            assert end["type"] == ("error" if content == "fails" else "done")
            for after in (*range(every[-1]["n"] + 3), 10**6):
                assert resumed(after) == [*(m for m in every if m["n"] > after), end]


class TestPolling:
    def test_the_whole_of_it(self, server: Server) -> None:
        answer = server.ask("GET", f"/v1/generate?prompt=poll&max_tokens={COUNT}", None, [JSON])
        assert answer.status == 202
        name = answer.json()["stream"]
        assert answer.header("x-stream-id") == name
        events: list[dict[str, Any]] = []
        document: dict[str, Any] = {"outcome": None}
        while document["outcome"] is None:
            document = server.ask("GET", f"/v1/streams/{name}?after={len(events) - 1}&wait=10", None, [JSON]).json()
            assert document.keys() == {"stream", "status", "events", "next", "outcome"}
            assert document["events"], "an empty list before the time is over"
            events += document["events"]
            assert document["next"] == len(events)
        assert [event["n"] for event in events] == list(range(len(events)))
        assert document["status"] == "finished" and document["outcome"] == "length"
        assert events.pop()["data"] == "[DONE]"
        sse = server.ask("GET", f"/v1/streams/{name}", None, [EVENT_STREAM])
        assert [event["data"] for event in events] == sse.chunks()
        assert words(joined(sse.chunks())) == COUNT
        document = server.ask("GET", f"/v1/streams/{name}?after={len(events)}&wait=30", None, [JSON]).json()
        assert (document["events"], document["outcome"]) == ([], "length")  # at once: nothing more will come

    def test_waiting_ends_with_the_time_or_with_an_event(self, server: Server) -> None:
        name = server.ask("GET", "/v1/generate?prompt=waits", None, [JSON]).json()["stream"]
        until(lambda: self._poll(server, name, "after=-1")["next"] == 3, "both tokens before the pause")
        document = self._poll(server, name, "after=2&wait=0.05")
        assert (document["events"], document["next"], document["outcome"]) == ([], 3, None)
        document = self._poll(server, name, "after=2&wait=30")
        assert document["events"][0]["data"]["choices"][0]["delta"]["content"] == "c"
        self._poll(server, name, "after=3&wait=30")

    @pytest.mark.parametrize("query", ["wait=31", "wait=-1", "wait=x", "wait=nan", "after=x", "wait=1e1"])
    def test_what_is_no_poll(self, server: Server, query: str) -> None:
        name = whole(server).header("x-stream-id")
        server.ask("GET", f"/v1/streams/{name}?{query}", None, [JSON]).error(400)

    def test_not_where_resuming_is_off(self) -> None:
        """Nobody is connected between two polls, and such a stream would end there: it isn't begun. A poll beside a
        reader is answered, and takes nothing from it."""
        with Server("--resume-ttl", "0", "--synthetic-step-ms", "5") as server, server.connect() as client:
            error = server.ask("GET", "/v1/generate?prompt=poll", None, [JSON]).error(400)
            assert (error["code"], error["param"]) == ("polling_off", "Accept")
            assert "--resume-ttl" in error["message"]
            client.request("POST", CHAT, chat("read", stream=True, max_tokens=COUNT))
            name = client.begin("POST").header("x-stream-id")
            client.read_events(3)
            assert self._poll(server, str(name), "after=-1")["events"]
            assert words(client.finish().text()) == COUNT
            ended = outcomes(wait_idle(server))
            assert (ended["refused"], ended["length"], ended["cancelled"]) == (1, 1, 0)

    @staticmethod
    def _poll(server: Server, name: str, query: str) -> Any:
        return server.ask("GET", f"/v1/streams/{name}?{query}", None, [JSON]).json()


class TestWhatIsNoLongerHeld:
    def test_nobody_came_back(self) -> None:
        """After `--resume-ttl` a stream without a reader is cancelled, and gone."""
        with Server("--synthetic-step-ms", "5", "--resume-ttl", "0.3") as server:
            with server.connect() as client:
                client.request("POST", CHAT, chat("hi", stream=True, max_tokens=10_000))
                name = client.begin("POST").header("x-stream-id")
                client.read_events(3)
            assert outcomes(wait_idle(server))["cancelled"] == 1
            last = [("Last-Event-ID", f"{name}:1")]
            for answer in (
                server.ask("GET", f"/v1/streams/{name}"),
                server.ask("GET", f"/v1/streams/{name}", None, [JSON]),
                server.ask("GET", f"/v1/streams/{name}", None, last),
                server.ask("POST", CHAT, chat("hi", stream=True), last),
                server.ask("DELETE", f"/v1/streams/{name}"),
            ):
                assert answer.error(410)["code"] == "stream_gone"
            with WebSocketClient(server) as socket:
                socket.send_json(type="resume", id="a", stream=name, after=1)
                assert socket.receive_json()["error"]["code"] == "stream_gone"
            assert server.metrics()['sluice_resumes_total{result="gone"}'] == 6

    def test_a_finished_one_is_forgotten_in_time(self) -> None:
        with Server("--resume-ttl", "0.3") as server:
            name = server.ask("POST", CHAT, chat("hi", stream=True, max_tokens=3)).header("x-stream-id")
            assert server.ask("GET", f"/v1/streams/{name}").status == 200
            until(lambda: server.ask("GET", f"/v1/streams/{name}").status == 410, "forgotten")

    def test_old_positions_are_dropped(self) -> None:
        with Server("--log-bytes-per-stream", "4096") as server:
            answer = server.ask("POST", CHAT, chat("hi", stream=True, max_tokens=1000))
            assert words(answer.text()) == 1000
            name, events = answer.header("x-stream-id"), blocks(answer)
            error = server.ask("GET", f"/v1/streams/{name}?after=3").error(410)
            assert error["code"] == "position_gone"
            first = int(error["message"].rpartition(" ")[2])
            assert 900 < first < 1000
            server.ask("GET", f"/v1/streams/{name}?after={first - 2}").error(410)
            rest = server.ask("GET", f"/v1/streams/{name}?after={first - 1}")
            assert bytes(rest.body) == b"".join(events[first:])

    def test_all_logs_together(self) -> None:
        """The oldest finished streams go first."""
        with Server("--log-bytes", "100000") as server:
            names = [whole(server, f"hi {n}").header("x-stream-id") for n in range(20)]
            statuses = [server.ask("GET", f"/v1/streams/{name}").status for name in names]
            assert statuses == sorted(statuses, reverse=True)
            assert {statuses[0], statuses[-1]} == {410, 200}


class TestKeys:
    """Slots are counted for each key, and given back with the reader; nobody reads another's stream."""

    ALICE, BOB = ("Authorization", "Bearer secret-of-alice"), ("X-Api-Key", "secret-of-bob")

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
        alice, bob = (hashlib.sha256(f"secret-of-{name}".encode()).hexdigest() for name in ("alice", "bob"))
        path.write_text(f'[keys.alice]\nsha256 = "{alice}"\nmax_streams = 2\n[keys.bob]\nsha256 = "{bob}"\n')
        with Server("--api-keys", str(path), "--synthetic-step-ms", "5", "--drain-timeout", "0") as server:
            yield server

    def test_slots(self, server: Server) -> None:
        body = chat("hi", stream=True, max_tokens=10_000)
        with crowd(server, 3) as clients:
            names = []
            for client in clients[:2]:
                client.request("POST", CHAT, body, [self.ALICE])
                names.append(client.begin("POST").header("x-stream-id"))
            refused = server.ask("POST", CHAT, body, [self.ALICE])
            assert refused.error(429)["type"] == "rate_limit_error"
            assert refused.header("retry-after")
            assert server.ask("POST", CHAT, chat("hi", max_tokens=2), [self.BOB]).status == 200
            clients[0].reset()
            server.wait_metric(DETACHED, 1)
            clients[2].request("POST", CHAT, body, [self.ALICE])  # the slot is free again
            third = clients[2].begin("POST").header("x-stream-id")
            server.ask("GET", f"/v1/streams/{names[0]}", None, [self.ALICE]).error(429)  # and taken again
            for name in (third, names[1]):
                assert server.ask("DELETE", f"/v1/streams/{name}", None, [self.ALICE]).status == 200
            with server.connect() as back:
                back.request("GET", f"/v1/streams/{names[0]}", None, [self.ALICE])
                assert back.begin().status == 200
                back.read_events(3)
                assert server.ask("DELETE", f"/v1/streams/{names[0]}", None, [self.ALICE]).status == 200
            for _ in range(5):  # each of them gives its slot back
                assert server.ask("POST", CHAT, chat("hi", max_tokens=2), [self.ALICE]).status == 200
        wait_idle(server)

    def test_a_foreign_stream_is_unknown(self, server: Server) -> None:
        name = server.ask("POST", CHAT, chat("hi", stream=True, max_tokens=3), [self.ALICE]).header("x-stream-id")
        last = ("Last-Event-ID", f"{name}:1")
        for answer in (
            server.ask("GET", f"/v1/streams/{name}", None, [self.BOB]),
            server.ask("GET", f"/v1/streams/{name}", None, [self.BOB, JSON]),
            server.ask("DELETE", f"/v1/streams/{name}", None, [self.BOB]),
            server.ask("POST", CHAT, chat("hi", stream=True), [self.BOB, last]),
            server.ask("GET", "/v1/generate?prompt=x", None, [self.BOB, last]),
        ):
            assert answer.error(404)["code"] == "stream_not_found"
        with WebSocketClient(server, headers=[self.BOB]) as socket:
            socket.send_json(type="resume", id="a", stream=name, after=0)
            assert socket.receive_json()["error"]["code"] == "stream_not_found"
        assert server.ask("GET", f"/v1/streams/{name}", None, [self.ALICE]).status == 200

    @pytest.mark.parametrize(
        "key", [None, ("Authorization", "Bearer wrong"), ("Authorization", "Basic eDp5"), ("X-Api-Key", ""),
                ("Authorization", "Bearer"), ("Authorization", "secret-of-alice")],
    )  # fmt: skip
    def test_without_a_known_key(self, server: Server, key: tuple[str, str] | None) -> None:
        headers = [key] if key else []
        for method, target in (
            ("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/v1/generate?prompt=x"),
            ("GET", "/v1/streams/x"), ("GET", "/nowhere"), ("GET", "/v1/ws"),
        ):  # fmt: skip
            answer = server.ask(method, target, chat("hi") if method == "POST" else None, headers)
            assert answer.error(401)["type"] == "authentication_error"
            assert answer.header("www-authenticate") == "Bearer"
        assert server.ask("GET", "/health", None, headers).status == 200
        assert server.ask("GET", "/ready", None, headers).status == 200
        assert "secret-of" not in server.log
