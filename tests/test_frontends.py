"""`--frontends N`: several processes on one port are one server, whichever of them a request reaches. Black-box."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support.frontends import Frontends
from tests.support.http2 import Peer, make_certificate
from tests.support.probes import DETACHED, PARKED, RUNNING, alive, outcomes, settle, started, wait_idle, words
from tests.support.readings import NDJSON, PLAIN
from tests.support.serving import REPOSITORY, Answer, Client, chat, joined, lone_engine, until
from tests.test_gateway import add_key, bearer

pytestmark = pytest.mark.synthetic

CHAT = "/v1/chat/completions"
LONG = 100_000
PACE = ("--synthetic-step-ms", "5")
JSON = ("Accept", "application/json")


@pytest.fixture(scope="module")
def server() -> Iterator[Frontends]:
    with Frontends(*PACE) as running:
        yield running


def begin(client: Client, max_tokens: int = 40, *, prompt: str = "x", events: int = 3) -> tuple[str, Answer]:
    """A stream by GET, of which some events are here; its id."""
    client.request("GET", f"/v1/generate?prompt={prompt}&max_tokens={max_tokens}")
    answer = client.begin()
    client.read_events(events)
    name = answer.header("x-stream-id")
    assert name
    return name, answer


def both(server: Frontends) -> tuple[int, int]:
    """The two processes, in no order: what is shown for one pair holds for the other."""
    first, second = server.frontends
    return first, second


def test_one_ready_line_one_port_and_all_serve(server: Frontends) -> None:
    assert server.ready_line == f"sluice ready on http://127.0.0.1:{server.port}"
    assert server.log.count(" start token_sender=") == 1
    assert len(server.frontends) == 2 and len(server.engines) == 1
    for pid in server.frontends:
        with server.client(pid) as client:
            client.request("GET", "/ready")
            assert client.answer().status == 200


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
        with server.client(here) as client:
            client.request("GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", f"{name}:0")])
            whole = client.answer()
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
        answers = []
        for pid in (there, here):
            with server.client(pid) as client:
                client.request("GET", f"/v1/streams/{name}", headers=[accept])
                answers.append(client.answer())
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
        with server.client(there) as client:
            client.request("POST", CHAT, chat("x", stream=True), [("Last-Event-ID", f"{name}:0")])
            assert words(client.answer("POST").text()) == 40
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
        with server.client(there) as client:
            client.request("GET", f"/v1/streams/{name}")
            assert words(client.answer().text()) == 50

    def test_what_is_not_there_is_404_and_of_another_key_as_well(self, server: Frontends, tmp_path: Path) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, 2)
        unknown = ("z" if name[0] != "z" else "y") + name[1:]
        for pid in (here, there):
            with server.client(pid) as client:
                client.request("GET", f"/v1/streams/{unknown}")
                assert client.answer().error(404)["code"] == "stream_not_found"
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
            with server.client(here) as other:
                other.request("DELETE", f"/v1/streams/{name}")
                assert other.answer("DELETE").json()["outcome"] == "cancelled"
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
        with server.client(there) as client:
            client.request("DELETE", f"/v1/streams/{name}")
            client.answer("DELETE")
        wait_idle(server)


class TestCancelAndPoll:
    def test_delete_from_elsewhere_is_seen_by_the_reader(self, server: Frontends) -> None:
        here, there = both(server)
        with server.client(here) as client:
            name, _ = begin(client, LONG)
            with server.client(there) as other:
                other.request("DELETE", f"/v1/streams/{name}")
                assert other.answer("DELETE").json() == {"stream": name, "status": "finished", "outcome": "cancelled"}
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
            with server.client(there) as client:
                client.request("GET", f"/v1/streams/{name}?after={after}&wait=5", headers=[JSON])
                news = client.answer().json()
            seen += [event["n"] for event in news["events"]]
            after, outcome = news["next"] - 1, news["outcome"]
        assert seen == list(range(len(seen))) and outcome == "length"


def test_one_idempotency_key_is_one_generation_wherever_it_is_sent(server: Frontends) -> None:
    before = started(server.metrics())
    body = chat("again", stream=True, max_tokens=20)
    names, bodies = set(), set()
    for pid in server.frontends * 2:
        with server.client(pid) as client:
            client.request("POST", CHAT, body, [("Idempotency-Key", "once")])
            answer = client.answer("POST")
            names.add(answer.header("x-stream-id"))
            bodies.add(bytes(answer.body))
    assert len(names) == len(bodies) == 1
    assert started(server.metrics()) == before + 1
    for pid in server.frontends:
        with server.client(pid) as client:
            client.request("POST", CHAT, {**body, "max_tokens": 21}, [("Idempotency-Key", "once")])
            assert client.answer("POST").error(422)["code"] == "idempotency_key_reused"
        with server.client(pid) as client:
            whole = chat("whole", max_tokens=5)
            client.request("POST", CHAT, whole, [("Idempotency-Key", f"whole {pid}")])
            assert client.answer("POST").json()["usage"]["completion_tokens"] == 5
    wait_idle(server)


def test_a_client_that_leaves_its_whole_answer_elsewhere_is_felt() -> None:
    with Frontends(*PACE, "--resume-ttl", "0.5") as server:
        for number in range(4):  # by the names' hashes, some of these are for the one process and some for the other
            with server.client(server.frontends[0]) as client:
                client.request("POST", CHAT, chat("x", max_tokens=LONG), [("Idempotency-Key", f"leave {number}")])
                server.wait_metric(RUNNING, 1)
            server.wait_metric(RUNNING, 0)
        assert outcomes(wait_idle(server))["cancelled"] == 4
        assert server.log.count("outcome=cancelled") == 4 and "status=" not in server.log


class TestResponses:
    def test_stored_ones_are_found_and_gone_on_from_everywhere(self, server: Frontends) -> None:
        here, there = both(server)

        def ask(pid: int, method: str, target: str, body: object = None) -> Answer:
            with server.client(pid) as client:
                client.request(method, target, body)
                return client.answer(method)

        first = ask(here, "POST", "/v1/responses", {"input": "one", "max_output_tokens": 4}).json()
        target = f"/v1/responses/{first['id']}"
        assert ask(there, "GET", target).json() == first
        items = ask(there, "GET", f"{target}/input_items").json()
        assert [item["content"][0]["text"] for item in items["data"]] == ["one"]
        streamed = ask(there, "GET", f"{target}?stream=true&starting_after=1")
        assert bytes(streamed.body) == bytes(ask(here, "GET", f"{target}?stream=true&starting_after=1").body)
        for pid in (here, there):
            second = ask(
                pid,
                "POST",
                "/v1/responses",
                {"input": "two", "max_output_tokens": 4, "previous_response_id": first["id"]},
            ).json()
            assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
            reference = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "x"}]
            assert ask(pid, "POST", "/v1/responses", {"input": reference, "max_output_tokens": 2}).status == 200
        background = ask(here, "POST", "/v1/responses", {"input": "b", "background": True}).json()
        refused = ask(there, "POST", "/v1/responses", {"input": "x", "previous_response_id": background["id"]}).error(
            400
        )
        assert refused["code"] == "previous_response_in_progress"
        assert ask(there, "POST", f"/v1/responses/{background['id']}/cancel").json()["status"] == "cancelled"
        assert ask(there, "DELETE", target).json()["deleted"] is True
        for pid in (here, there):
            assert ask(pid, "GET", target).error(404)["code"] == "response_not_found"
        wait_idle(server)


class TestLimits:
    def statuses(self, server: Frontends, secret: str, count: int) -> list[int]:
        """Of so many generations at once, on connections of which each process has some."""

        def ask(number: int) -> int:
            with server.client(server.frontends[number % 2]) as client:
                client.request("POST", CHAT, chat("x", max_tokens=1), bearer(secret))
                return client.answer("POST").status

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, range(count)))

    def test_requests_and_streams_are_counted_over_all_processes(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys.toml"
        alice = add_key(keys, "alice", "--rate-limit-requests", "4")
        bob = add_key(keys, "bob", "--max-streams", "3")
        with Frontends(*PACE, "--api-keys", str(keys), "--drain-timeout", "1") as server:
            began = time.monotonic()
            found = self.statuses(server, alice, 12)
            dripped = int((time.monotonic() - began) / 15)  # one in a quarter of a minute
            assert 4 <= found.count(200) <= 4 + dripped and set(found) == {200, 429}
            held = []
            for number in range(3):
                client = server.client(server.frontends[number % 2])
                client.request("GET", f"/v1/generate?prompt=x&max_tokens={LONG}", headers=bearer(bob))
                assert client.begin().status == 200
                held.append(client)
            assert self.statuses(server, bob, 6) == [429] * 6
            held.pop().close()
            until(lambda: server.metrics()[DETACHED] == 1, "one has left")
            assert self.statuses(server, bob, 1) == [200]
            # The slots of a process that dies are given back.
            server.kill_frontend(server.frontends[0])
            until(lambda: 200 in self.statuses(server, bob, 2), "a slot is free")
            for client in held:
                client.close()

    def test_tokens_made_anywhere_are_charged_everywhere(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys.toml"
        alice = add_key(keys, "alice", "--rate-limit-tokens", "1000")
        with Frontends("--api-keys", str(keys)) as server:
            first, second = both(server)
            with server.client(first) as client:
                client.request("POST", CHAT, chat("x", max_tokens=400, ignore_eos=True), bearer(alice))
                assert client.answer("POST").status == 200
            with server.client(second) as client:
                client.request("POST", CHAT, chat("x", max_tokens=1), bearer(alice))
                answer = client.answer("POST")
            left = int(answer.header("x-ratelimit-remaining-tokens") or -1)
            assert 400 < left < 620, left


class TestMetrics:
    def test_a_scrape_is_of_all_whichever_process_answers(self, server: Frontends) -> None:
        wait_idle(server)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pid: begin_and_end(server, pid), server.frontends))

        def scrape(pid: int) -> dict[str, float]:
            with server.client(pid) as client:
                client.request("GET", "/metrics")
                lines = client.answer().body.decode().splitlines()
            return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

        def sees_two(pid: int) -> bool:
            return scrape(pid)['sluice_connections{protocol="http1"}'] == 2

        here, there = both(server)
        # Connections that tests before this one, or a scrape before this one, closed may be counted still.
        until(lambda: scrape(here) == scrape(there), "both say the same")
        one = scrape(here)
        assert started(one) == sum(outcomes(one).values())
        with server.client(here) as client:
            name, _ = begin(client, LONG)
            for pid in (here, there):
                seen = scrape(pid)
                assert seen[RUNNING] + seen[PARKED] == 1
                assert seen['sluice_kv_blocks{state="used"}'] > 0
                until(partial(sees_two, pid), "this connection and the scrape's own")
        with server.client(there) as client:
            client.request("DELETE", f"/v1/streams/{name}")
            client.answer("DELETE")
        wait_idle(server)


def begin_and_end(server: Frontends, pid: int) -> None:
    with server.client(pid) as client:
        begin(client, 5)
        client.finish()


class TestDeath:
    def test_of_an_owner_is_told_to_those_who_read_elsewhere_and_the_rest_goes_on(self) -> None:
        with Frontends(*PACE) as server:
            here, there = both(server)
            with (
                server.client(here) as owner,
                server.client(there) as lucky,
                server.client(there) as sse,
                server.client(there) as plain,
                server.websocket(there) as socket,
                server.reach(there, lambda: Peer(server.port)) as peer,
            ):
                name, _ = begin(owner, LONG)
                other, _ = begin(lucky, 400)
                sse.request("GET", f"/v1/streams/{name}")
                sse.begin()
                sse.read_events(3)
                plain.request("GET", f"/v1/streams/{name}", headers=[PLAIN])
                plain.begin()
                socket.send_json(type="resume", id="a", stream=name)
                socket.receive_until("token")
                stream = peer.ask(f"/v1/streams/{name}")
                peer.wait(lambda: len(peer.bodies[stream]) > 500)
                server.kill_frontend(here)
                assert owner.finish().end in ("cut", "reset")
                assert sse.finish().end == plain.finish().end == "cut"
                error = socket.receive_until("done", "error")[-1]["error"]
                assert (error["code"], "died" in error["message"]) == ("error", True)
                peer.wait(lambda: stream in peer.resets)
                assert words(lucky.finish().text()) == 400
                assert other != name
            server.wait_metric(RUNNING, 0)  # the engine has forgotten the dead one's sequences
            for pid in server.frontends:
                with server.client(pid) as client:
                    client.request("GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", f"{name}:2")])
                    assert client.answer().error(404)["code"] == "stream_not_found"
                with server.client(pid) as client:
                    begin(client, 3)
                    assert words(client.finish().text()) == 3
            assert "died process=" in server.log.replace('"', "")
            wait_idle(server)

    def test_of_the_engine_leaves_streams_of_all_processes_to_go_on(self) -> None:
        with Frontends(*PACE) as server:
            clients = [server.client(pid) for pid in server.frontends]
            for client in clients:
                begin(client, 600)
            os.kill(server.engines[0], signal.SIGKILL)
            for client in clients:
                with client:
                    assert words(client.finish().text()) == 600
            assert server.metrics()["sluice_engine_restarts_total"] == 1

    def test_of_the_supervisor_is_everybodys(self) -> None:
        with Frontends(*PACE) as server:
            pids = server.engine_pids
            assert len(pids) == 3
            os.kill(server.process.pid, signal.SIGKILL)
            until(lambda: not any(map(alive, pids)), "all have ended")


class TestTheEnd:
    def test_sigterm_drains_all_and_streams_are_read_to_their_end(self) -> None:
        with Frontends(*PACE) as server:
            here, there = both(server)
            with server.client(here) as client, server.client(there) as other:
                name, _ = begin(client, 300)
                other.request("GET", f"/v1/streams/{name}")
                other.begin()
                server.terminate()
                until(lambda: server.log.count(" drain ") == 2, "both drain")
                refused = server.ask("POST", CHAT, chat("x"))
                assert refused.error(503) and refused.header("retry-after")
                assert server.ask("GET", "/ready").status == 503
                again = server.ask("GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", f"{name}:0")])
                assert words(client.finish().text()) == words(other.finish().text()) == 300
                assert words(again.text()) > 0 and again.end == "whole"
            assert server.wait() == 0

    def test_the_deadline_is_told_in_band_everywhere(self) -> None:
        with Frontends(*PACE, "--drain-timeout", "0.3") as server:
            here, there = both(server)
            with server.client(here) as client, server.client(there) as other:
                name, _ = begin(client, LONG)
                other.request("GET", f"/v1/streams/{name}")
                other.begin()
                server.terminate()
                for each in (client, other):
                    answer = each.finish()
                    assert answer.end == "whole" and answer.chunks()[-1]["error"]["code"] == "error"
            assert server.wait() == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_second_signal_ends_all_now(self, number: int) -> None:
        with Frontends(*PACE) as server:
            pids = server.engine_pids
            with server.client(server.frontends[0]) as client:
                begin(client, LONG)
                server.process.send_signal(number)
                until(lambda: server.log.count(" drain ") == 2, "both drain")
                server.process.send_signal(number)
                assert client.finish().chunks()[-1]["error"]["code"] == "error"
            assert server.wait() == 1
            until(lambda: not any(map(alive, pids)), "all have ended")

    def test_a_signal_to_all_processes_at_once_is_one_signal(self) -> None:
        """As a service manager, or Ctrl-C in a terminal, sends it."""
        with Frontends(*PACE, own_group=True) as server:
            with server.client(server.frontends[0]) as client:
                begin(client, 100)
                group = server.process.pid
                assert {os.getpgid(pid) for pid in (*server.frontends, *server.engines)} == {group}
                os.killpg(group, signal.SIGTERM)
                assert words(client.finish().text()) == 100
            assert server.wait() == 0


def test_a_unix_socket_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with Frontends("--uds", str(path)) as server:
        assert server.ready_line == f"sluice ready on unix:{path}"
        names = set()
        for _ in range(40):
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                sock.sendall(b"GET /v1/generate?prompt=x&max_tokens=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                with sock.makefile("rb") as file:
                    head = file.read().decode()
            names.add(head.partition("X-Stream-Id: ")[2].split()[0][-1])
        assert names <= {"a", "b"} and names
    assert not path.exists()


def test_certificates_and_keys_are_read_again_by_all(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    keys = tmp_path / "keys.toml"
    alice = add_key(keys, "alice")
    with Frontends(
        "--tls-cert", str(certificate), "--tls-key", str(key), "--api-keys", str(keys), "--metrics-access", "open"
    ) as server:
        bob = add_key(keys, "bob")
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.log.count("keys result=reloaded") == 2, "read by both")
        assert server.log.count("certificates result=reloaded") == 2
        for pid in server.frontends:
            for secret in (alice, bob):
                with server.reach(pid, lambda: Peer(server.port, certificate)) as peer:
                    fields, _ = peer.answer(peer.ask("/v1/models", fields=[("authorization", f"Bearer {secret}")]))
                    assert fields[":status"] == "200"


def test_engines_that_run_elsewhere(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    with lone_engine(address), Frontends("--engine-url", address, engine=None) as server:
        assert server.engines == []
        for pid in server.frontends:
            begin_and_end(server, pid)


class TestWhatCantStart:
    def run(self, *flags: str) -> tuple[int, str]:
        argv = [sys.executable, "-m", "server", "--engine", "synthetic", "--frontends", "2", *flags]
        ended = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        return ended.returncode, ended.stderr

    def test_a_port_in_use_is_refused_once(self, server: Frontends) -> None:
        code, said = self.run("--port", str(server.port))
        assert code == 1 and said.count("can't listen") == 1

    def test_bad_files_are_bad_usage(self, tmp_path: Path) -> None:
        keys = tmp_path / "keys.toml"
        keys.write_text("[keys]\n")
        code, said = self.run("--port", "0", "--api-keys", str(keys))
        assert code == 2 and said.count("server:") == 1
        script = tmp_path / "script.json"
        script.write_text(json.dumps({"scripts": 1}))
        code, said = self.run("--port", "0", "--synthetic-script", str(script))
        assert code == 2 and "its own words are above" in said

    def test_more_than_there_are_places(self) -> None:
        code, said = self.run("--frontends", "63")
        assert code == 2 and "at most 62" in said
