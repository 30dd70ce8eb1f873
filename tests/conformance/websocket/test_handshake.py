"""The opening handshake: RFC 6455 section 4."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import base64

import pytest
from conformance_kit.frames import PING, WebSocket, accept_for, frame, handshake, upgrade
from conformance_kit.rules import http1_only, not_offered, row, rule
from conformance_kit.sockets import goes_on
from conformance_kit.target import Target

RFC = "RFC 6455 section "
KEY = "dGhlIHNhbXBsZSBub25jZQ=="


@http1_only
@rule("Sec-WebSocket-Accept proves that the key was read", RFC + "4.2.2")
def test_accept(target: Target) -> None:
    with target.connect() as connection:
        answer = handshake(connection, upgrade(target, key=KEY))
        assert answer.status == 101, answer
        assert answer.header("sec-websocket-accept") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", answer


@http1_only
@rule("every key has its own accept", RFC + "4.2.2")
@pytest.mark.parametrize("number", range(4))
def test_accept_of_other_keys(target: Target, number: int) -> None:
    key = base64.b64encode(bytes(range(number, number + 16))).decode()
    with target.connect() as connection:
        answer = handshake(connection, upgrade(target, key=key))
        assert answer.header("sec-websocket-accept") == accept_for(key), answer


@http1_only
@rule("a 101 has Upgrade: websocket and Connection: Upgrade", RFC + "4.2.2")
def test_fields_of_the_101(target: Target) -> None:
    with WebSocket(target) as socket:
        assert socket.handshake.members("upgrade") == ["websocket"], socket.handshake
        assert "upgrade" in socket.handshake.members("connection"), socket.handshake


@http1_only
@rule("a 101 has no body, and no framing of one", "RFC 9110 section 15.2.2, RFC 9112 section 6.2")
@pytest.mark.parametrize("name", ["Content-Length", "Transfer-Encoding"])
def test_101_has_no_framing(target: Target, name: str) -> None:
    with WebSocket(target) as socket:
        assert socket.handshake.header(name) is None, socket.handshake


@rule("what the client didn't offer isn't chosen", RFC + "4.2.2")
@pytest.mark.parametrize("name", ["Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol"])
def test_nothing_unasked_for(target: Target, name: str) -> None:
    with WebSocket(target) as socket:
        assert socket.handshake.header(name) is None, socket.handshake


GOOD = [
    row("upgrade in capitals", ("Upgrade: WebSocket",), text="the value websocket is compared without case", source=RFC + "4.2.1", marks=(http1_only,)),
    row("connection in lower case", ("Connection: upgrade",), text="connection options are compared without case", source=RFC + "4.2.1", marks=(http1_only,)),
    row("connection list", ("Connection: keep-alive, Upgrade",), text="Connection is a list (Firefox sends this)", source=RFC + "4.2.1", marks=(http1_only,)),
    row("connection on two lines", ("Connection: keep-alive", "Connection: Upgrade"), text="a list may come on several lines", source="RFC 9110 section 5.3", marks=(http1_only,)),
    row("upgrade list", ("Upgrade: websocket, foo/2",), text="Upgrade is a list", source="RFC 9110 section 7.8", level="should", marks=(http1_only,)),
    row("header names in lower case", ("upgrade: websocket", "connection: Upgrade", f"sec-websocket-key: {KEY}", "sec-websocket-version: 13"), text="field names are case-insensitive", source="RFC 9110 section 5.1", marks=(http1_only,)),
    row("white space", ("Upgrade: \t websocket ", "Sec-WebSocket-Version:   13  "), text="white space around a value is no part of it", source="RFC 9112 section 5", marks=(http1_only,)),
    row("cookies", ("Cookie: a=1; b=2",), text="other fields are ignored", source=RFC + "4.2.1"),
    row("same origin", ("Origin: SCHEME://AUTHORITY",), text="a browser's page from this very origin gets in", source=RFC + "10.2"),
    row("Content-Length: 0", ("Content-Length: 0",), text="a request without a body may say so", source="RFC 9110 section 8.6", level="should", marks=(http1_only,)),
    row("unknown extension", ("Sec-WebSocket-Extensions: x-foo; a=1",), text="an unknown extension is declined, and the handshake goes on", source=RFC + "9.1"),
]  # fmt: skip


@pytest.mark.parametrize("fields", GOOD)
def test_understood(target: Target, fields: tuple[str, ...]) -> None:
    with WebSocket(target, *fields) as socket:
        assert socket.handshake.header("sec-websocket-extensions") is None
        goes_on(target, socket)


NOT_13 = frozenset({400, 426})
BAD = [
    row("no key", ("Sec-WebSocket-Key:",), {400}, text="without a key there is no handshake: 400", source=RFC + "4.2.1 and 4.2.2", marks=(http1_only,)),
    row("short key", ("Sec-WebSocket-Key: AAAA",), {400}, text="a key is 16 bytes in base64", source=RFC + "4.2.1", level="should", marks=(http1_only,)),
    row("key of 15 bytes", ("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAA",), {400}, text="a key is 16 bytes in base64", source=RFC + "4.2.1", level="should", marks=(http1_only,)),
    row("key of 17 bytes", ("Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAAA=",), {400}, text="a key is 16 bytes in base64", source=RFC + "4.2.1", level="should", marks=(http1_only,)),
    row("key that is no base64", ("Sec-WebSocket-Key: !!!!!!!!!!!!!!!!!!!!!!==",), {400}, text="a key is 16 bytes in base64", source=RFC + "4.2.1", level="should", marks=(http1_only,)),
    row("two keys", (f"Sec-WebSocket-Key: {KEY}", f"Sec-WebSocket-Key: {KEY}"), {400}, text="the key comes once", source=RFC + "11.3.1", level="should", marks=(http1_only,)),
    row("no version", ("Sec-WebSocket-Version:",), NOT_13, text="the version must be 13", source=RFC + "4.2.1"),
    row("version 0", ("Sec-WebSocket-Version: 0",), NOT_13, text="the version must be 13", source=RFC + "4.2.1"),
    row("version 7", ("Sec-WebSocket-Version: 7",), NOT_13, text="the version must be 13", source=RFC + "4.2.1"),
    row("version 14", ("Sec-WebSocket-Version: 14",), NOT_13, text="the version must be 13", source=RFC + "4.2.1"),
    row("version 013", ("Sec-WebSocket-Version: 013",), NOT_13, text="a version has no leading zeros", source=RFC + "4.3", level="should"),
    row("version of letters", ("Sec-WebSocket-Version: x",), NOT_13, text="the version must be 13", source=RFC + "4.2.1"),
    row("two versions", ("Sec-WebSocket-Version: 13, 8",), NOT_13, text="the version is one number", source=RFC + "4.3", level="should"),
    row("malformed extensions", ("Sec-WebSocket-Extensions: a b; ,=",), {400}, text="extensions that don't fit the grammar fail the handshake", source=RFC + "9.1", level="should"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "statuses"), BAD)
def test_refused(target: Target, fields: tuple[str, ...], statuses: set[int]) -> None:
    """A plain answer in place of the 101, whole, and the connection closes or goes on as HTTP."""
    with target.connect() as connection:
        answer = handshake(connection, upgrade(target, *fields))
        assert answer.status in statuses and answer.end == "whole", answer


@rule("a refused version is told which one is spoken", RFC + "4.4")
@pytest.mark.parametrize("version", ["0", "7", "14", "99"])
def test_version_is_told(target: Target, version: str) -> None:
    with target.connect() as connection:
        answer = handshake(connection, upgrade(target, f"Sec-WebSocket-Version: {version}"))
        assert "13" in answer.members("sec-websocket-version"), answer


NO_UPGRADE = [
    row("no Upgrade field", "GET PATH HTTP/1.1", ("Upgrade:",), text="no Upgrade, no WebSocket", source=RFC + "4.2.1"),
    row("other Upgrade", "GET PATH HTTP/1.1", ("Upgrade: foo",), text="no Upgrade to websocket, no WebSocket", source=RFC + "4.2.1"),
    row("no Connection field", "GET PATH HTTP/1.1", ("Connection:",), text="without Connection: Upgrade the field is for the hop before", source=RFC + "4.2.1"),
    row("Connection without upgrade", "GET PATH HTTP/1.1", ("Connection: keep-alive",), text="without Connection: Upgrade the field is for the hop before", source=RFC + "4.2.1"),
    row("POST", "POST PATH HTTP/1.1", (), text="the handshake is a GET", source=RFC + "4.2.1"),
    row("HTTP/1.0", "GET PATH HTTP/1.0", (), text="the handshake is HTTP/1.1 or higher", source=RFC + "4.2.1"),
]  # fmt: skip


@http1_only
@pytest.mark.parametrize(("line", "fields"), NO_UPGRADE)
def test_no_upgrade(target: Target, line: str, fields: tuple[str, ...]) -> None:
    """No 101; what else it gets is the route's own business."""
    with target.connect() as connection:
        answer = handshake(connection, upgrade(target, *fields, line=line))
        assert answer.status != 101, answer


@http1_only
@rule("the handshake needs a Host, like every HTTP/1.1 request", RFC + "4.2.1")
def test_no_host(target: Target) -> None:
    with target.connect() as connection:
        assert handshake(connection, upgrade(target, host=False)).status == 400


@rule("another path is plain HTTP's business: no 101, a whole answer", RFC + "4.2.2, C07", "should")
def test_other_path(service: Target) -> None:
    with service.connect() as connection:
        answer = handshake(connection, upgrade(service, line=f"GET {service.prefix}/no/such/path HTTP/1.1"))
        if answer.status == connection.switched:
            not_offered("the application opens a WebSocket on every path")
        assert answer.status in {403, 404, 400, 405} and answer.end == "whole", answer


@rule(
    "frames that come in one packet with the handshake are not lost",
    RFC + "4.1 (a client waits), proxies join",
    "should",
)
def test_frames_behind_the_request(target: Target) -> None:
    with WebSocket(target, behind=frame(PING, b"early")) as socket:
        assert socket.pong() == b"early"


@rule("a handshake in pieces of one byte is the same handshake", "RFC 9112 section 2.1")
def test_in_pieces(target: Target) -> None:
    with target.connect() as connection:
        assert handshake(connection, upgrade(target), one_by_one=True).status == connection.switched


@rule("a plain request before the handshake on the same connection is no hindrance", "RFC 9110 section 7.8")
def test_behind_a_plain_request(target: Target) -> None:
    with target.connect() as connection:
        connection.send(target.request())
        connection.answer(target.method)
        if connection.persistent:
            connection.send(upgrade(target))
            assert connection.begin("GET", upgrade=True).status == connection.switched


PROTOCOLS = [
    row("one", ("a.b",), text="one offered value, or none, is chosen", source=RFC + "4.2.2, C08"),
    row("several", ("a, b ,c",), text="one offered value, or none, is chosen", source=RFC + "4.2.2, C08"),
    row("on two lines", ("a", "b"), text="the offer may come on several lines", source=RFC + "11.3.4, C08"),
    row("with a secret", ("realtime, key.sk-secret-123",), text="a secret that was smuggled as a subprotocol is never sent back", source="C08"),
]  # fmt: skip


@pytest.mark.parametrize("offers", PROTOCOLS)
def test_subprotocols(target: Target, offers: tuple[str, ...]) -> None:
    with WebSocket(target, *[f"Sec-WebSocket-Protocol: {offer}" for offer in offers]) as socket:
        chosen = socket.handshake.header("sec-websocket-protocol")
        offered = [part.strip() for offer in offers for part in offer.split(",")]
        assert chosen is None or (chosen in offered and "secret" not in chosen), socket.handshake


@rule("a wrong key is refused as plain HTTP before the 101, in JSON, with 401", RFC + "4.2.2, C07")
@pytest.mark.parametrize("field", ["Authorization: Bearer wrong", "Authorization:"], ids=["wrong", "none"])
def test_api_key(service: Target, field: str) -> None:
    if not service.settings.api_key:
        not_offered("no key was given (--api-key)")
    with service.connect() as connection:
        answer = handshake(connection, upgrade(service, field))
        assert (answer.status, answer.end) == (401, "whole") and answer.json()["error"], answer


@rule("a page of another origin is refused with 403 before the 101, unless it is allowed", RFC + "10.2, C14", "should")
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_foreign_origin(service: Target, origin: str) -> None:
    with service.connect() as connection:
        answer = handshake(connection, upgrade(service, f"Origin: {origin}"))
        assert answer.status == 403, answer


DEFLATE = "permessage-deflate"
OFFERS = [
    ("plain", DEFLATE),
    ("client_max_window_bits", DEFLATE + "; client_max_window_bits"),
    ("client 15", DEFLATE + "; client_max_window_bits=15"),
    ("client 9", DEFLATE + "; client_max_window_bits=9"),
    ("client 8", DEFLATE + "; client_max_window_bits=8"),
    ("server 15", DEFLATE + "; server_max_window_bits=15"),
    ("server 10", DEFLATE + "; server_max_window_bits=10"),
    ("server 9", DEFLATE + "; server_max_window_bits=9"),
    ("server 8", DEFLATE + "; server_max_window_bits=8"),
    ("both", DEFLATE + "; client_max_window_bits=12; server_max_window_bits=12"),
    ("server_no_context_takeover", DEFLATE + "; server_no_context_takeover"),
    ("client_no_context_takeover", DEFLATE + "; client_no_context_takeover"),
    ("all", DEFLATE + "; client_no_context_takeover; server_no_context_takeover; server_max_window_bits=10; client_max_window_bits"),
    ("two offers", DEFLATE + "; server_max_window_bits=8, " + DEFLATE),
    ("unknown before", "x-foo, " + DEFLATE),
    ("quoted value", DEFLATE + '; server_max_window_bits="10"'),
    ("Safari's", "x-webkit-deflate-frame, " + DEFLATE),
]  # fmt: skip


@pytest.mark.parametrize(
    "offer", [row(name, offer, text="a well-formed offer is accepted, answered with another, or declined; never an error", source="RFC 7692 section 7.1, C02") for name, offer in OFFERS]
)  # fmt: skip
def test_deflate_offers(target: Target, offer: str) -> None:
    """The answer follows from the offer."""
    with WebSocket(target, f"Sec-WebSocket-Extensions: {offer}") as socket:
        check_response(socket.handshake.header("sec-websocket-extensions"), offer)
        goes_on(target, socket)


def check_response(chosen: str | None, offer: str) -> None:
    """RFC 7692 7.1: what a response may say, given the offers."""
    if chosen is None:
        return
    assert chosen.partition(";")[0].strip() == DEFLATE, chosen
    found = dict(part.strip().partition("=")[::2] for part in chosen.split(";")[1:])
    assert set(found) <= {
        "server_no_context_takeover",
        "client_no_context_takeover",
        "server_max_window_bits",
        "client_max_window_bits",
    }
    for bits in ("server_max_window_bits", "client_max_window_bits"):
        assert bits not in found or 8 <= int(found[bits]) <= 15, chosen
    assert "client_max_window_bits" not in found or "client_max_window_bits" in offer, chosen
    if offer.count(DEFLATE) == 1:
        asked = [part.strip() for part in offer.split(DEFLATE)[1].split(",")[0].split(";")[1:]]
        wanted = {name: value.strip('"') for name, _, value in (part.partition("=") for part in asked)}
        assert "server_no_context_takeover" not in wanted or "server_no_context_takeover" in found, chosen
        if "server_max_window_bits" in wanted:
            assert "server_max_window_bits" in found, f"{chosen}: the asked window isn't confirmed"
            assert int(found["server_max_window_bits"]) <= int(wanted["server_max_window_bits"]), chosen
        if wanted.get("client_max_window_bits") and "client_max_window_bits" in found:
            assert int(found["client_max_window_bits"]) <= int(wanted["client_max_window_bits"]), chosen


MALFORMED = [
    ("bits 7", "; server_max_window_bits=7"),
    ("bits 16", "; server_max_window_bits=16"),
    ("bits 0", "; client_max_window_bits=0"),
    ("bits of letters", "; client_max_window_bits=abc"),
    ("bits with a leading zero", "; client_max_window_bits=09"),
    ("negative bits", "; client_max_window_bits=-9"),
    ("empty bits", "; server_max_window_bits="),
    ("server bits without a value", "; server_max_window_bits"),
    ("a value where none belongs", "; server_no_context_takeover=1"),
    ("twice", "; server_no_context_takeover; server_no_context_takeover"),
    ("twice with values", "; server_max_window_bits=10; server_max_window_bits=11"),
    ("unknown parameter", "; foo=1"),
]  # fmt: skip


@pytest.mark.parametrize(
    "parameters", [row(name, value, text="an offer with an invalid parameter is declined (or the request refused), never accepted, never a 5xx", source="RFC 7692 section 7, C02") for name, value in MALFORMED]
)  # fmt: skip
def test_deflate_malformed(target: Target, parameters: str) -> None:
    with target.connect() as connection:
        answer = handshake(connection, upgrade(target, f"Sec-WebSocket-Extensions: {DEFLATE}{parameters}"))
        if answer.status == connection.switched:
            assert answer.header("sec-websocket-extensions") is None, answer
        else:
            assert answer.status == 400, answer
