"""`--frontends N`: a stream of one process is read, resumed, held back and cancelled through any other. Black-box."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.frontends import CHAT, LONG, PACE, Frontends, begin, both
from tests.support.http2 import Peer
from tests.support.keys import add_key, bearer
from tests.support.probes import DETACHED, RUNNING, settle, started, wait_idle, words
from tests.support.readings import NDJSON, PLAIN
from tests.support.serving import Answer, chat, joined

pytestmark = pytest.mark.synthetic
JSON = ("Accept", "application/json")


class TestResume:
    def test_of_a_cut_stream_byte_for_byte_over_http1(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, answer = begin(client, 200, events=5)
            first = bytes(answer.body)
        last = Answer(body=bytearray(first)).events()[-1].id
        with server.client(there) as client:
            client.request("GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", last)])
            rest = client.answer()
            assert (rest.status, rest.end, rest.header("x-stream-id")) == (200, "whole", name)
            assert rest.header("x-request-id") and rest.header("cache-control") == "no-cache, no-transform"
        whole = server.ask_at(here, "GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", f"{name}:0")])
        with server.client(there) as client:  # again, now that it has ended
            client.request("GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", f"{name}:0")])
            assert bytes(client.answer().body) == bytes(whole.body)
        assert bytes(whole.body).endswith(bytes(rest.body)) and rest.events()[-1].data == "[DONE]"
        assert words(joined(Answer(body=bytearray(first)).chunks()[:5]) + rest.text()) == 200

    @pytest.mark.parametrize("accept", [NDJSON, PLAIN], ids=["ndjson", "plain"])
    def test_in_other_framings(self, server: Frontends, accept: tuple[str, str]) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client)
        answers = [server.ask_at(pid, "GET", f"/v1/streams/{name}", headers=[accept]) for pid in (there, here)]
        assert answers[0].end == "whole" and answers[0].body == answers[1].body
        assert answers[0].header("x-stream-from") == answers[1].header("x-stream-from")
        if accept == PLAIN:
            assert words(bytes(answers[0].body).decode()) == 40

    def test_by_a_post_with_last_event_id_and_past_the_end(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client)
            client.finish()
        before = started(server.metrics())
        for method, target, body, status in (
            ("POST", CHAT, chat("x", stream=True), 200),
            ("GET", f"/v1/streams/{name}", None, 204),
        ):
            with server.client(there) as client:
                client.request(method, target, body, [("Last-Event-ID", f"{name}:999")])
                answer = client.answer(method)
                assert (answer.status, bytes(answer.body)) == (status, b"")
        answer = server.ask_at(there, "POST", CHAT, chat("x", stream=True), [("Last-Event-ID", f"{name}:0")])
        assert words(answer.text()) == 40
        assert started(server.metrics()) == before

    def test_over_http2_both_ways(self, server: Frontends) -> None:
        here, there = both(server)
        with server.reach(here, lambda: Peer(server.port)) as peer:
            stream = peer.ask("/v1/generate?prompt=x&max_tokens=200")
            peer.wait(lambda: len(peer.bodies[stream]) > 1000)
            name = peer.fields[stream]["x-stream-id"]
            with server.reach(there, lambda: Peer(server.port)) as other:
                streams = [other.ask(f"/v1/streams/{name}", fields=[("last-event-id", f"{name}:3")]) for _ in range(3)]
                bodies = {other.answer(each)[1] for each in streams}
            _, whole = peer.answer(stream)
        (body,) = bodies
        assert whole.endswith(body) and len(Answer(body=bytearray(body)).events()) == 199

    def test_over_websocket_to_its_end_and_behind_it(self, server: Frontends) -> None:
        here, there = both(server)
        with server.websocket(here) as socket:
            socket.send_json(type="generate", id="a", **chat("x", max_tokens=100))
            opening = [socket.receive_json() for _ in range(6)]
        name, seen = opening[0]["stream"], opening[1:]
        with server.websocket(there) as socket:
            socket.send_json(type="resume", id="b", stream=name, after=seen[-1]["n"])
            first, *rest, last = socket.receive_until("done", "error")
            assert first == {"type": "started", "id": "b", "stream": name}
            assert last["finish_reason"] == "length" and last["usage"]["completion_tokens"] == 100
            tokens = [message["n"] for message in [*seen, *rest]]
            assert tokens == list(range(tokens[0], tokens[0] + 100))
            assert words("".join(message["text"] for message in [*seen, *rest])) == 100
            socket.send_json(type="resume", id="c", stream=name, after=tokens[-1] + 50)  # the id's end, and beyond
            assert [m["type"] for m in socket.receive_until("done", "error")] == ["started", "done"]
            socket.send_json(type="generate", id="b", **chat("x", max_tokens=2))  # the name is free again
            assert socket.receive_until("done", "error", id_="b")[-1]["type"] == "done"

    def test_a_stream_begun_on_a_websocket_is_read_over_http(self, server: Frontends) -> None:
        here, there = both(server)
        with server.websocket(here) as socket:
            socket.send_json(type="generate", id="a", **chat("x", max_tokens=50))
            name = socket.receive_json()["stream"]
        assert words(server.ask_at(there, "GET", f"/v1/streams/{name}").text()) == 50

    def test_what_is_not_there_is_404_and_of_another_key_as_well(self, server: Frontends, tmp_path: Path) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, 2)
        unknown = ("z" if name[0] != "z" else "y") + name[1:]
        for pid in (here, there):
            assert server.ask_at(pid, "GET", f"/v1/streams/{unknown}").error(404)["code"] == "stream_not_found"
        with server.websocket(there) as socket:
            socket.send_json(type="resume", id="a", stream=unknown)
            assert socket.receive_json()["error"]["code"] == "stream_not_found"
        keys = tmp_path / "keys.toml"
        alice, bob = add_key(keys, "alice"), add_key(keys, "bob")
        with Frontends(*PACE, "--api-keys", str(keys)) as guarded:
            one, other = both(guarded)
            with guarded.client(one) as client:
                client.request("GET", "/v1/generate?prompt=x&max_tokens=5", headers=bearer(alice))
                name = client.answer().header("x-stream-id") or ""
            for secret, status in ((alice, 200), (bob, 404)):
                with guarded.client(other) as client:
                    client.request("GET", f"/v1/streams/{name}", headers=bearer(secret))
                    assert client.answer().status == status
            with guarded.client(one) as client:
                client.request("POST", "/v1/access-tokens", {}, bearer(alice))
                token = client.answer("POST").json()["token"]
            with guarded.client(other) as client:  # a token of one process is good at all
                client.request("GET", f"/v1/streams/{name}?token={token}")
                assert client.answer().status == 200


class TestPressure:
    def test_a_reader_elsewhere_that_stalls_parks_the_stream(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, LONG)
        with server.reach(there, lambda: server.connect(receive_buffer=4096)) as client:
            client.request("GET", f"/v1/streams/{name}")
            settle(server, client)
            assert server.ask_at(here, "DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
            answer = client.answer()
        assert answer.end == "whole" and answer.chunks()[-1]["error"]["code"] == "cancelled"
        assert words(joined(answer.chunks()[:-1])) > 64

    def test_a_reader_elsewhere_that_leaves_detaches_the_stream(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, LONG)
        with server.client(there) as client:
            client.request("GET", f"/v1/streams/{name}")
            client.begin()
            client.read_events(5)
            assert server.metrics()[DETACHED] == 0
        server.wait_metric(DETACHED, 1)
        with server.websocket(there) as socket:
            socket.send_json(type="resume", id="a", stream=name, after=0)
            socket.receive_until("token")
            server.wait_metric(RUNNING, 1)
        server.wait_metric(DETACHED, 1)
        server.ask_at(there, "DELETE", f"/v1/streams/{name}")
        wait_idle(server)


class TestCancelAndPoll:
    def test_delete_from_elsewhere_is_seen_by_the_reader(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, LONG)
            cancelled = server.ask_at(there, "DELETE", f"/v1/streams/{name}").json()
            assert cancelled == {"stream": name, "status": "finished", "outcome": "cancelled"}
            assert client.finish().chunks()[-1]["error"]["code"] == "cancelled"

    def test_a_websockets_cancel_reaches_the_owner(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, LONG)
        with server.websocket(there) as socket:
            socket.send_json(type="resume", id="a", stream=name, after=1)
            socket.receive_until("token")
            socket.send_json(type="cancel", id="a")
            assert socket.receive_until("done", "error")[-1]["error"]["code"] == "cancelled"
        wait_idle(server)

    def test_polling_goes_to_the_owner(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            client.request("GET", "/v1/generate?prompt=x&max_tokens=30", headers=[JSON])
            answer = client.answer()
            assert answer.status == 202
            name = answer.json()["stream"]
        seen, after, outcome = [], -1, None
        while outcome is None:
            news = server.ask_at(there, "GET", f"/v1/streams/{name}?after={after}&wait=5", headers=[JSON]).json()
            seen += [event["n"] for event in news["events"]]
            after, outcome = news["next"] - 1, news["outcome"]
        assert seen == list(range(len(seen))) and outcome == "length"
