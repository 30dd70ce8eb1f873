"""server.listening: what happens to clients while a listener goes away."""

from __future__ import annotations

import socket
import sys

from server.listening import turn_away
from tests.support.http_client import DEADLINE_S

SYN_SENT = 2  # the first byte of tcp_info (linux/tcp_states.h)


def test_who_has_connected_is_accepted_and_nobody_else_connects() -> None:
    with socket.socket() as listener, socket.socket() as early, socket.socket() as late:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(DEADLINE_S)
        early.connect(listener.getsockname())
        turn_away(listener)
        late.setblocking(False)
        late.connect_ex(listener.getsockname())
        if sys.platform == "linux":
            assert late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == SYN_SENT
        accepted, address = listener.accept()
        with accepted:
            assert address == early.getsockname()
            early.sendall(b"asks")
            assert accepted.recv(4) == b"asks"
