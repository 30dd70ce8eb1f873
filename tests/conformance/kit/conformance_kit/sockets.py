"""Verdicts on WebSockets: a server that fails a connection, and one that goes on with it."""

from __future__ import annotations

from conformance_kit.frames import PING, Closed, Frame, WebSocket, frame
from conformance_kit.target import Target

DROPPED, NO_CODE = 1006, 1005
CALL = b"are you there"


def fails(target: Target, data: bytes, *codes: int, one_by_one: bool = False, fields: tuple[str, ...] = ()) -> None:
    """`data` ends the connection: with a close frame that has one of `codes`, or one without a code, or none (RFC 6455
    7.1.7: telling the code is a SHOULD)."""
    with WebSocket(target, *fields) as socket:
        socket.send(data, one_by_one=one_by_one)
        found = socket.closed()
        allowed = set(codes) if target.settings.ours else {*codes, DROPPED, NO_CODE}
        assert found.code in allowed, f"expected a close with {sorted(codes)}, not {found}"
        assert socket.ended(), "the TCP connection was left open"


def goes_on(target: Target, socket: WebSocket, *, message: bytes = b"") -> None:
    """What was sent is no fault: the message (if one was) is answered, by an echo with itself, and a ping by a pong."""
    if message:
        found = socket.receive()
        if target.settings.ws_echo:
            assert isinstance(found, Frame) and found.payload == message, f"expected {message!r}, not {found}"
        elif isinstance(found, Closed):
            assert found.code == 1000, f"the message was answered with {found}"
            return
    if not target.settings.ws_echo and message:
        return  # an application may go on to speak, or close
    socket.send(frame(PING, CALL))
    while (pong := socket.pong()) != CALL:  # earlier pings may be answered still
        assert isinstance(pong, bytes), f"expected a pong, not {pong}"
