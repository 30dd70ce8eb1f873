"""Keys from outside: made by the command, renewed by SIGHUP, lent to pages as tokens, and never shown anywhere."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.keys import add_key, bearer
from tests.support.probes import QUEUED
from tests.support.serving import Server, WebSocketClient, WebSocketRefused, chat, until

pytestmark = pytest.mark.synthetic

COMPLETIONS = "/v1/completions"
LISTED = "https://app.example"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


@pytest.fixture
def alice(keys: Path) -> str:
    return add_key(keys, "alice")


@pytest.fixture
def server(keys: Path, alice: str) -> Iterator[Server]:
    flags = ("--api-keys", str(keys), "--cors-origin", LISTED, "--drain-timeout", "1")
    with Server(*flags, scripts=[{"match": "[raise]", "tokens": [{"raise": "x"}]}], faults_expected=True) as running:
        yield running


def status(server: Server, secret: str) -> int:
    answer = server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1}, bearer(secret))
    assert answer.status == 200 or answer.error(answer.status)
    return answer.status


def hang_up(server: Server, result: str) -> None:
    before = server.log.count(f"keys result={result}")
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.log.count(f"keys result={result}") == before + 1, "the keys are read again")


class TestSighup:
    def test_keys_come_and_go_without_touching_streams(self, server: Server, keys: Path, alice: str) -> None:
        with server.connect() as client, WebSocketClient(server, headers=bearer(alice)) as socket:
            client.request(
                "POST", COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 10**5}, headers=bearer(alice)
            )
            client.begin()
            keys.unlink()
            bob = add_key(keys, "bob")
            assert (status(server, alice), status(server, bob)) == (200, 401)
            hang_up(server, "reloaded")
            assert (status(server, alice), status(server, bob)) == (401, 200)
            client.read_events(500)  # what was begun goes on
            socket.send_json(type="generate", id="a", prompt="x")  # and nothing more begins, on no open socket either
            assert socket.receive_until("error", "done")[-1]["error"]["code"] == "invalid_api_key"

    def test_a_bad_file_changes_nothing(self, server: Server, keys: Path, alice: str) -> None:
        keys.write_text("[keys.alice]\nsha256 = 'no hash'")
        hang_up(server, '"kept the old ones"')
        assert status(server, alice) == 200

    def test_limits_change(self, server: Server, keys: Path, alice: str) -> None:
        keys.write_text(keys.read_text() + "rate_limit_requests = 1\n")
        hang_up(server, "reloaded")
        assert [status(server, alice) for _ in range(2)] == [200, 429]


class TestAccessTokens:
    def token(self, server: Server, secret: str) -> str:
        answer = server.ask("POST", "/v1/access-tokens", None, bearer(secret))
        assert answer.status == 200
        assert answer.header("cache-control") == "no-store"
        return str(answer.json()["token"])

    def test_event_source_and_websocket_go_by_one(self, server: Server, alice: str) -> None:
        server.ask("POST", "/v1/access-tokens").error(401)
        token = self.token(server, alice)
        answer = server.ask("GET", f"/v1/generate?prompt=x&max_tokens=3&token={token}", None, [("Origin", LISTED)])
        assert answer.status == 200 and answer.events()[-1].data == "[DONE]"
        stream = answer.header("x-stream-id")
        again = server.ask("GET", f"/v1/streams/{stream}?after=0&token={token}")
        assert again.body == answer.body[answer.body.index(b":0\n\n") + 4 :]
        with WebSocketClient(server, f"/v1/ws?token={token}", headers=[("Origin", LISTED)]) as socket:
            socket.send_text("x")
            assert isinstance(socket.receive(), str)
        server.ask("POST", f"{COMPLETIONS}?token={token}", {"prompt": "x"}).error(401)
        server.ask("DELETE", f"/v1/streams/{stream}?token={token}").error(401)
        assert token not in server.log

    def test_a_token_of_nobody(self, server: Server) -> None:
        server.ask("GET", "/v1/generate?prompt=x&token=AAAA").error(401)
        with pytest.raises(WebSocketRefused):
            WebSocketClient(server, "/v1/ws?token=AAAA")


def test_keys_are_shown_nowhere(server: Server, alice: str) -> None:
    """Not in the log of whatever goes well or wrong, not in answers, not in the process's arguments."""
    wrong = "sk-sluice-" + "w" * 43
    answers = bytearray()
    for secret in (alice, wrong):
        for headers in (bearer(secret), [("X-Api-Key", secret)], [("Authorization", secret)], [("Cookie", secret)]):
            for method, target in (
                ("GET", "/v1/models"),
                ("GET", "/v1/models/x"),
                ("GET", f"/v1/generate?prompt=x&max_tokens=1&nothing={'n' * 9}"),
                ("GET", "/metrics"),
                ("GET", "/v1/streams/none"),
                ("PUT", "/v1/models"),
            ):
                answers += server.ask(method, target, None, headers).raw
            for body in ({"prompt": "[raise]"}, {"prompt": "x", "max_tokens": 1}, {"prompt": 5}, b"{"):
                answers += server.ask("POST", COMPLETIONS, body, headers).raw
    with pytest.raises(WebSocketRefused) as refusal:
        WebSocketClient(server, headers=bearer(wrong))
    answers += refusal.value.answer.raw
    pids = [server.process.pid, *server.engine_pids]
    listed = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for pid in pids for name in ("cmdline", "environ"))
    for secret in (alice, wrong):
        assert secret.encode() not in answers
        assert secret not in server.log
        assert secret.encode() not in listed


def test_a_key_for_another_model(keys: Path) -> None:
    secret = add_key(keys, "alice", "--model", "another")
    with Server("--api-keys", str(keys)) as server:
        assert status(server, secret) == 403
        assert server.ask("GET", "/v1/models", None, bearer(secret)).json()["data"] == []
        with pytest.raises(WebSocketRefused) as refusal:
            WebSocketClient(server, headers=bearer(secret))
        assert refusal.value.answer.error(403)["code"] == "model_not_allowed"


def test_one_key_with_hundreds_queued_keeps_no_other_waiting(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    alice, bob = add_key(keys, "alice"), add_key(keys, "bob")
    flags = ("--api-keys", str(keys), "--max-running", "4", "--synthetic-step-ms", "2", "--drain-timeout", "0")
    with Server(*flags) as server, WebSocketClient(server, headers=bearer(alice)) as socket:
        for number in range(250):
            socket.send_json(type="generate", id=str(number), prompt="x" * 50, max_tokens=400)
        until(lambda: server.metrics()[QUEUED] > 200, "most of them wait")
        before = server.metrics()[QUEUED]
        for _ in range(2):
            answer = server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 2}, bearer(bob))
            assert answer.status == 200
        # Each of the two waited for a place, which at most a few of the others got meanwhile.
        assert server.metrics()[QUEUED] > before - 50


def test_a_burst_of_many_connections_gets_the_exact_count(tmp_path: Path) -> None:
    """What comes at once is what the bucket holds, and what drips in while the burst lasts."""
    keys = tmp_path / "keys.toml"
    alice = add_key(keys, "alice", "--rate-limit-requests", "30")
    bob = add_key(keys, "bob", "--max-streams", "5")
    long = {"prompt": "x", "stream": True, "max_tokens": 10**5}

    def ask(_: int) -> int:
        with server.connect() as client:
            client.request("POST", "/v1/chat/completions", chat("x", max_tokens=1), bearer(alice))
            return client.answer().status

    with Server("--api-keys", str(keys), "--drain-timeout", "1") as server:
        with ThreadPoolExecutor(16) as threads:
            statuses = list(threads.map(ask, range(100)))
        refilled = 100 - 30 - statuses.count(429)
        assert set(statuses) == {200, 429}
        assert 0 <= refilled <= 10  # one in two seconds
        clients = [server.connect() for _ in range(20)]
        try:
            for client in clients:
                client.request("POST", COMPLETIONS, long, bearer(bob))
            assert sorted(client.begin().status for client in clients) == [200] * 5 + [429] * 15
        finally:
            for client in clients:
                client.close()


@pytest.mark.parametrize(
    ("trusted", "answers"),
    [
        # Nobody, a proxy's client from elsewhere, and one that wrote what it liked before the proxy did.
        ("127.0.0.1", {"": 200, "192.0.2.7": 403, "127.0.0.1, 192.0.2.7": 403}),
        ("127.0.0.1,192.0.2.0/24", {"127.0.0.1, 192.0.2.7": 200, "198.51.100.1, 192.0.2.7": 403}),
        ("10.0.0.1", {"192.0.2.7": 200}),  # written by one that isn't trusted: it counts for nothing
    ],
)
def test_the_client_behind_a_proxy_is_who_asks(trusted: str, answers: dict[str, int]) -> None:
    with Server("--forwarded-allow-ips", trusted) as server:
        for forwarded, expected in answers.items():
            headers = [("X-Forwarded-For", value) for value in forwarded.split(", ") if value]
            assert server.ask("GET", "/metrics", None, headers).status == expected, forwarded
            server.ask("GET", "/v1/models", None, headers)
            if expected == 403:
                client = forwarded.split(", ")[0 if "/" in trusted else -1]
                until(lambda client=client: f"client={client} " in server.log, "the log names the client")
