"""The one reader that all polls of a stream share."""

from __future__ import annotations

from server.readers import Poller
from server.stream import Stream
from server.table import StreamTable


def poller_of(table: StreamTable, stream: Stream) -> Poller:
    """The stream's poller; it stays attached for a lease after each poll."""
    if not isinstance(stream.poller, Poller):
        stream.poller = Poller(stream, table.limits.resume_ttl_s, table.call_later)
    return stream.poller
