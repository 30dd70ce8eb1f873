"""Cases C08 and C14: what a WebSocket's handshake may offer, and whose page may open one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keys import bearer
from tests.support.played import KEY
from tests.support.serving import Server, WebSocketClient, WebSocketRefused

pytestmark = pytest.mark.synthetic

LISTED = "https://app.example"


@pytest.fixture(scope="module")
def listed(keys_file: Path) -> Iterator[Server]:
    with Server("--api-keys", str(keys_file), "--cors-origin", LISTED) as running:
        yield running


class TestC08Subprotocols:
    @pytest.mark.parametrize(
        "offers",
        [
            [],
            ["chat"],
            ["realtime, chat, v1.sluice"],
            ["realtime", "chat"],
            [f"openai-insecure-api-key.{KEY}"],
            ["realtime", f"openai-insecure-api-key.{KEY}, bearer.{KEY}"],
        ],
    )
    def test_none_is_chosen_and_none_echoed(self, keyed: Server, offers: list[str]) -> None:
        fields = [("Sec-WebSocket-Protocol", offer) for offer in offers]
        with WebSocketClient(keyed, headers=[*bearer(KEY), *fields]) as client:
            assert client.handshake.header("sec-websocket-protocol") is None
            assert KEY.encode() not in client.handshake.raw
            assert client.close().code == 1000

    def test_a_key_in_an_offer_opens_nothing_and_is_not_shown(self, keyed: Server) -> None:
        with pytest.raises(WebSocketRefused) as refusal:
            WebSocketClient(keyed, headers=[("Sec-WebSocket-Protocol", f"openai-insecure-api-key.{KEY}")])
        answer = refusal.value.answer
        assert answer.error(401)["code"] == "invalid_api_key"
        assert KEY.encode() not in answer.raw
        assert KEY not in keyed.log


class TestC14Origins:
    @pytest.mark.parametrize(
        ("origin", "allowed"),
        [
            ("https://evil.example", False),
            ("null", False),
            ("http://localhost:1", False),  # the server's name, another port
            (f"{LISTED}.evil.example", False),
            (f"{LISTED}:8443", False),
            ("http://app.example", False),
            (LISTED, True),
            ("http://localhost", True),  # the server's own pages; the test client's Host
            ("", True),
        ],
    )
    def test_with_a_key(self, listed: Server, origin: str, allowed: bool) -> None:
        fields = [*bearer(KEY), *([("Origin", origin)] if origin else [])]
        if allowed:
            with WebSocketClient(listed, headers=fields) as client:
                client.send_json(type="generate", id="a", prompt="x", max_tokens=1)
                assert client.receive_until("done", "error")[-1]["type"] == "done"
        else:
            with pytest.raises(WebSocketRefused) as refusal:
                WebSocketClient(listed, headers=fields)
            assert refusal.value.answer.error(403)["code"] == "origin_not_allowed"

    @pytest.mark.parametrize("origin", ["", LISTED, "https://evil.example"])
    def test_without_a_key_no_origin_helps(self, listed: Server, origin: str) -> None:
        with pytest.raises(WebSocketRefused) as refusal:
            WebSocketClient(listed, headers=[("Origin", origin)] if origin else [])
        refusal.value.answer.error(401)

    def test_the_same_list_answers_for_http(self, listed: Server) -> None:
        for origin, shown in ((LISTED, LISTED), ("https://evil.example", None)):
            answer = listed.ask("GET", "/v1/models", headers=[*bearer(KEY), ("Origin", origin)])
            assert answer.status == 200
            assert answer.header("access-control-allow-origin") == shown
