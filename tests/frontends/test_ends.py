"""`--frontends N`: a process, an engine or all of them die, drain or are told to stop. Black-box."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.frontends import CHAT, LONG, PACE, Frontends, begin, both
from tests.support.http2 import Peer
from tests.support.probes import RUNNING, alive, wait_idle, words
from tests.support.readings import PLAIN
from tests.support.serving import chat, until

pytestmark = pytest.mark.synthetic


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
                answer = server.ask_at(pid, "GET", f"/v1/streams/{name}", headers=[("Last-Event-ID", f"{name}:2")])
                assert answer.error(404)["code"] == "stream_not_found"
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
