"""`--frontends N`: idempotency keys, stored responses, limits and metrics are of all processes together. Black-box."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support.frontends import CHAT, LONG, PACE, Frontends, begin, begin_and_end, both
from tests.support.keys import add_key, bearer
from tests.support.probes import DETACHED, PARKED, RUNNING, outcomes, started, wait_idle
from tests.support.serving import chat, until

pytestmark = pytest.mark.synthetic


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
        other = server.ask_at(pid, "POST", CHAT, {**body, "max_tokens": 21}, [("Idempotency-Key", "once")])
        assert other.error(422)["code"] == "idempotency_key_reused"
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
        ask = server.ask_at
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
            return server.ask_at(
                server.frontends[number % 2], "POST", CHAT, chat("x", max_tokens=1), bearer(secret)
            ).status

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
            answer = server.ask_at(first, "POST", CHAT, chat("x", max_tokens=400, ignore_eos=True), bearer(alice))
            assert answer.status == 200
            answer = server.ask_at(second, "POST", CHAT, chat("x", max_tokens=1), bearer(alice))
            left = int(answer.header("x-ratelimit-remaining-tokens") or -1)
            assert 400 < left < 620, left


class TestMetrics:
    def test_a_scrape_is_of_all_whichever_process_answers(self, server: Frontends) -> None:
        wait_idle(server)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pid: begin_and_end(server, pid), server.frontends))

        def scrape(pid: int) -> dict[str, float]:
            lines = server.ask_at(pid, "GET", "/metrics").body.decode().splitlines()
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
        server.ask_at(there, "DELETE", f"/v1/streams/{name}")
        wait_idle(server)
