"""What all connections of a server share, whichever protocol they speak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.gateway.forwarded import TrustedProxies
from server.http import Program
from server.turns import Turns

if TYPE_CHECKING:
    from server.connection import Connection


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds of silence in each phase of a connection."""

    header_s: float = 10.0  # from a request's first byte to the end of its head
    body_s: float = 30.0  # between two pieces of a body
    idle_s: float = 75.0  # before a connection's first byte, and between requests
    # In a drain, before a connection's first byte: whoever has just connected is about to ask, and expects no close
    # without a word, as clients must between two requests (RFC 9112 9.5). Many round trips.
    first_request_s: float = 1.0
    keepalive_s: float = 15.0  # before a quiet stream gets a ping
    write_stall_s: float = 120.0  # in which not one byte is drained


@dataclass(slots=True)
class Host:
    """What all connections of a server share."""

    program: Program
    deadlines: Deadlines
    loop: asyncio.AbstractEventLoop
    max_header: int
    max_body: int
    max_ws_message: int
    abort_on_half_close: bool
    connections_max: int
    new_request_id: Callable[[], str]
    connections: set[Connection]
    trusted: TrustedProxies = field(default_factory=lambda: TrustedProxies(""))
    draining: bool = False
    turns: Turns = field(init=False)

    def __post_init__(self) -> None:
        self.turns = Turns(self.loop)

    @property
    def first_wait_s(self) -> float:
        """For a connection's first byte."""
        return self.deadlines.first_request_s if self.draining else self.deadlines.idle_s
