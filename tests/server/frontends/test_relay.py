"""A stream of another process, as a reader here sees it: pieces as they came, credit in halves of a window, its end."""

from __future__ import annotations

from server.frontends.relay import OWNER_DIED, Packed, Relay, RelayedMessages, RelayFraming
from server.frontends.wire import WINDOW_BYTES, Closed, End, Leave, Opened, Take
from server.outcome import CANCELLED, Outcome
from server.readers import ClientReader

OPENED = Opened(7, 200, (), "stream", b"text/event-stream", b": ping\n", True)
PIECE = bytes(WINDOW_BYTES // 4)


class Channel:
    def __init__(self) -> None:
        self.writable = True
        self.written: list[bytes] = []
        self.end = ""

    @property
    def gate(self) -> Channel:
        """Its own."""
        return self

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def write_each(self, pieces: list[bytes]) -> None:
        self.write(b"".join(pieces))

    def finish(self) -> None:
        self.end = "whole"

    def cut(self) -> None:
        self.end = "cut"


class Rig:
    def __init__(self) -> None:
        self.told: list[Take | End | Leave] = []
        self.relay = Relay(OPENED, self.told.append)
        self.channel = Channel()
        self.reader = ClientReader(self.relay, RelayFraming(OPENED), self.channel)

    def attach(self) -> None:
        self.relay.attach(self.reader)
        self.reader.pump()


def test_pieces_that_came_before_the_reader_are_written_first() -> None:
    rig = Rig()
    rig.relay.push(b"a")
    rig.attach()
    rig.relay.push(b"b")
    assert rig.channel.written == [b"a", b"b"] and rig.told == []


def test_what_was_written_is_told_in_halves_of_a_window() -> None:
    rig = Rig()
    rig.attach()
    for _ in range(4):
        rig.relay.push(PIECE)
    assert rig.told == [Take(7, WINDOW_BYTES // 2)] * 2


def test_a_channel_that_takes_no_more_takes_no_credit() -> None:
    rig = Rig()
    rig.attach()
    rig.channel.writable = False
    for _ in range(4):
        rig.relay.push(PIECE)
    assert rig.told == [] and rig.channel.written == []
    rig.channel.writable = True
    rig.reader.pump()
    assert b"".join(rig.channel.written) == PIECE * 4 and rig.told == [Take(7, WINDOW_BYTES)]


def test_what_was_written_is_not_kept() -> None:
    rig = Rig()
    rig.attach()
    for _ in range(1000):
        rig.relay.push(PIECE)
    assert rig.relay.log.size < 3 * (len(PIECE) + 200)


def test_a_whole_body_and_one_that_was_cut() -> None:
    for whole, end in ((True, "whole"), (False, "cut")):
        rig = Rig()
        rig.attach()
        rig.relay.push(b"a")
        rig.relay.close(Closed(7, whole))
        assert rig.channel.end == end and rig.channel.written == [b"a"]
        assert rig.told == []


def test_an_owner_that_died_cuts_behind_what_came() -> None:
    rig = Rig()
    rig.relay.push(b"a")
    rig.relay.lost()
    rig.attach()
    assert rig.channel.written == [b"a"] and rig.channel.end == "cut"
    assert rig.relay.outcome is not None and rig.relay.outcome.message == OWNER_DIED


def test_a_reader_that_leaves_is_told_once_and_a_cancel_is_the_owners() -> None:
    rig = Rig()
    rig.attach()
    rig.relay.finish(Outcome(CANCELLED, "by its client"))
    assert rig.told == [End(7, "by its client")] and rig.relay.outcome is None
    rig.reader.leave()
    rig.reader.leave()
    assert rig.told[1:] == [Leave(7)]


def test_messages_are_framed_where_the_socket_is() -> None:
    class Socket:
        writable = True

        def frame(self, payload: bytes) -> bytes:
            return b"<%b>" % payload

    rig = Rig()
    packed = Packed()
    rig.relay.push(packed.frame(b"one") + packed.frame(b""))
    rig.relay.push(packed.frame(b"two"))
    framing = RelayedMessages(Socket())  # type: ignore[arg-type]
    assert b"".join([framing.one(event, n) for n, event in enumerate(rig.relay.log.slice(0, 2))]) == b"<one><><two>"
