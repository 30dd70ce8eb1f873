"""What a server process asks of the other processes of the same server. A single one has none to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from server.http import Call, Response, Streaming


class Unreachable(Exception):
    """The process that was asked is not there, or died before it answered."""


@dataclass(frozen=True, slots=True)
class Told:
    """A response that another process stores. `final` is empty while it is being made."""

    items: bytes
    final: bytes


class Elsewhere(Protocol):
    """All may raise Unreachable."""

    several: bool  # there are others

    def home_of(self, name: str) -> int | None:
        """The process that has what bears this name; None: this one, or none at all."""
        ...

    def home_for(self, key: str, name: str) -> int | None:
        """The process that answers for a client's own name for a request; None: this one."""
        ...

    async def answer(self, home: int, call: Call) -> Response | Streaming:
        """Another process's answer, whole, its headers included."""
        ...

    async def show(self, home: int, call: Call, id_: str, stream_id: str, after: int) -> Response | Streaming:
        """A stream of another process as the messages of a WebSocket's generation, or a refusal."""
        ...

    async def stored(self, home: int, key: str, response_id: str) -> Told | None:
        """A response that another process stores."""
        ...

    async def item(self, home: int, key: str, item_id: str) -> dict[str, Any] | None:
        """An item that came out of such a response."""
        ...

    async def count(self) -> list[bytes]:
        """What every other process has counted, as /metrics shows it, without what is of the engines. Raises
        TimeoutError."""
        ...

    async def status(self, *, names_keys: bool) -> list[bytes]:
        """The same as /status shows it."""
        ...


class Alone:
    """There is no other process."""

    several = False

    def home_of(self, name: str) -> int | None:
        """See Elsewhere."""
        return None

    def home_for(self, key: str, name: str) -> int | None:
        """See Elsewhere."""
        return None

    async def answer(self, home: int, call: Call) -> Response | Streaming:
        """See Elsewhere."""
        raise Unreachable

    async def show(self, home: int, call: Call, id_: str, stream_id: str, after: int) -> Response | Streaming:
        """See Elsewhere."""
        raise Unreachable

    async def stored(self, home: int, key: str, response_id: str) -> Told | None:
        """See Elsewhere."""
        raise Unreachable

    async def item(self, home: int, key: str, item_id: str) -> dict[str, Any] | None:
        """See Elsewhere."""
        raise Unreachable

    async def count(self) -> list[bytes]:
        """See Elsewhere."""
        return []

    async def status(self, *, names_keys: bool) -> list[bytes]:
        """See Elsewhere."""
        return []
