"""The body of one streamed answer over HTTP/1.1: where its reader writes. The connection does the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http1 import Http1
from server.flow import Alarm
from server.readers import ClientReader

if TYPE_CHECKING:
    from server.connection import Connection


class HttpChannel:
    """A reader's way to the client: the body of one streamed answer."""

    __slots__ = ("_connection", "_http", "_keepalive", "_keepalive_s", "_write", "reader", "writable")

    reader: ClientReader

    def __init__(self, connection: Connection, http: Http1, keepalive: Alarm) -> None:
        self._connection = connection
        self._http = http
        self._keepalive = keepalive  # the connection set it: it rings for a ping
        self._keepalive_s = connection.host.deadlines.keepalive_s
        self._write = connection.transport.write
        self.writable = True

    def write(self, data: bytes) -> None:
        """One piece of the body."""
        self._write(self._http.body(data))
        self._keepalive.put_off(self._keepalive_s)

    def ping(self) -> None:
        """Show that the server lives."""
        self.write(self.reader.framing.ping)

    def finish(self) -> None:
        """The body is whole."""
        self._connection.channel_ended(whole=True)

    def cut(self) -> None:
        """It isn't, and won't be."""
        self._connection.channel_ended(whole=False)
