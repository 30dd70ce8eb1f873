"""server.outlet: the compiled way of a token sends byte for byte what the other way writes, in the same order, and
leaves to that way and to the transport whatever is not a token's plain event."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import server
from protocols.http1 import Http1, Request, chunk
from protocols.websocket import WebSocket
from server import outlet as outlets
from server.api.websocket import BareMessages, TokenMessages
from server.framing import DONE, Framing, Ndjson, Plain, Sse
from server.log import Event
from server.outcome import CANCELLED, Outcome
from server.outlet import BARE, BLOCK, CHUNK, FRAME, PLAIN_TEXT, POSITION, TEXT, ahead, outlet
from server.readers import ClientReader
from server.stream import Frame, Stream, escaped
from tests.support.outlets import compile_outlet, load_outlet
from tests.support.tables import Rig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the outlet is Linux's")

HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXTS = st.one_of(st.text(min_size=1, max_size=40), st.text("ab\\\n", min_size=1, max_size=200))
POSITIONS = st.one_of(st.integers(1, 12), st.integers(1, 2**40))


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every test has the source's own, installed or not."""
    before = outlets.make, outlets.prefetch
    module = load_outlet(compile_outlet(tmp_path_factory.mktemp("outlet")))
    outlets.make, outlets.prefetch = module.Outlet, module.prefetch
    yield
    outlets.make, outlets.prefetch = before


class Pair:
    """A transport over a real socket: what it is handed waits; `read` is what the client has."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.handed = b""
        self.high: list[int] = []

    def get_extra_info(self, _: str) -> socket.socket:
        return self.ours

    def set_write_buffer_limits(self, high: int) -> None:
        self.high.append(high)

    def write(self, data: bytes) -> None:
        self.handed += data

    def read(self) -> bytes:
        found = b""
        try:
            while data := self.theirs.recv(1 << 20):
                found += data
        except BlockingIOError:
            pass
        return found

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def websocket() -> Any:
    """One that is open, as what a session frames by."""
    (request,) = Http1(max_header=4096).receive(HANDSHAKE)[:1]
    assert isinstance(request, Request)
    opened = WebSocket(request, max_message=100)
    opened.accept()
    return SimpleNamespace(frame=opened.text)


def typed(stream: Stream) -> Stream:
    stream.grammar.frames = [Frame(b'{"delta":"', b'","sequence_number":', "some.delta", b',"z":"%d"}')]
    return stream


def as_it_is(data: bytes) -> bytes:
    return data


SHAPES: dict[str, tuple[int, Callable[[bytes], bytes], Callable[[], Framing]]] = {
    "SSE": (CHUNK, chunk, lambda: Sse(Rig().start())),
    "SSE, typed": (CHUNK, chunk, lambda: Sse(typed(Rig().start()))),
    "NDJSON": (CHUNK, chunk, lambda: Ndjson(Rig().start())),
    "NDJSON, typed, HTTP/1.0": (BARE, as_it_is, lambda: Ndjson(typed(Rig().start()))),
    "text": (CHUNK, chunk, lambda: Plain(Rig().start())),
    "WebSocket": (FRAME, as_it_is, lambda: cast(Framing, TokenMessages(Rig().start(), 'a"\u2028', websocket()))),
    "WebSocket, bare": (FRAME, as_it_is, lambda: cast(Framing, BareMessages(websocket()))),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_those_of_the_other_way(shape: str) -> None:
    envelope, frame, make = SHAPES[shape]
    framing = make()
    pair = Pair()
    made = outlet(cast(Any, pair), envelope, framing.pieces())
    assert made is not None
    plain = PLAIN_TEXT in (framing.pieces() or ())

    @given(TEXTS, POSITIONS)
    def look(text: str, position: int) -> None:
        event = Event(0, escaped(text))
        sent = made.send(event.text, position)
        assert sent != (plain and b"\\" in event.text)
        assert pair.read() == (frame(framing.one(event, position)) if sent else b"")
        assert pair.handed == b""

    look()
    pair.close()


@pytest.mark.parametrize("envelope", [BARE, CHUNK, FRAME])
@pytest.mark.parametrize("size", [1, 15, 16, 125, 126, 255, 256, 4085, 4086])
def test_at_every_length_of_an_envelope(pair: Pair, envelope: int, size: int) -> None:
    made = outlet(cast(Any, pair), envelope, (TEXT,))
    text = os.urandom(size)
    socket_ = websocket()
    frame = {BARE: as_it_is, CHUNK: chunk, FRAME: socket_.frame}[envelope]
    assert made is not None
    assert made.send(text, 1)
    assert pair.read() == frame(text)


def test_what_is_no_tokens_plain_event_is_not_for_it(pair: Pair) -> None:
    made = outlet(cast(Any, pair), CHUNK, (b"x" * 4000, TEXT, POSITION))
    plain = outlet(cast(Any, pair), CHUNK, (PLAIN_TEXT,))
    assert made is not None
    assert plain is not None
    assert not made.send(b"", 1)  # an empty chunk would end the body
    assert not made.send(b"a", 0)  # the first event has more around it
    assert not made.send(b"a" * 100, 1)  # too long
    assert not plain.send(b"\\n", 1)
    assert pair.read() == pair.handed == b""
    assert made.sent_at == 0.0


def test_what_the_socket_does_not_take_the_transport_has(pair: Pair) -> None:
    made = outlet(cast(Any, pair), CHUNK, (b"b" * 500, TEXT))
    assert made is not None
    events = 0
    while not pair.handed:
        assert made.send(b"t" * 500, 1)
        events += 1
    assert pair.read() + pair.handed == chunk(b"b" * 500 + b"t" * 500) * events


def test_a_socket_that_is_gone_is_the_transports_affair(pair: Pair) -> None:
    made = outlet(cast(Any, pair), CHUNK, (TEXT,))
    assert made is not None
    pair.theirs.close()
    assert made.send(b"a", 1)
    assert pair.handed == chunk(b"a")


def test_a_fault_of_the_transport_is_seen(pair: Pair) -> None:
    def fail(data: bytes) -> None:
        raise RuntimeError("write behind write_eof")

    pair.write = fail  # type: ignore[method-assign]
    made = outlet(cast(Any, pair), CHUNK, (TEXT,))
    assert made is not None
    pair.theirs.close()
    with pytest.raises(RuntimeError, match="behind write_eof"):
        made.send(b"a", 1)


def test_its_time_is_the_loops(pair: Pair) -> None:
    import uvloop

    made = outlet(cast(Any, pair), CHUNK, (TEXT,))
    assert made is not None
    loop = uvloop.new_event_loop()
    try:
        before = loop.time()
        made.send(b"a", 1)
        assert abs(made.sent_at - before) < 1.0
    finally:
        loop.close()


def test_readers_stop_as_soon_as_anything_waits(pair: Pair) -> None:
    """A byte that waits in the transport would be overtaken."""
    assert outlet(cast(Any, pair), CHUNK, (TEXT,)) is not None
    assert pair.high == [0]


@pytest.mark.parametrize("lacks", ["pieces", "socket", "compiler"])
def test_there_is_none(pair: Pair, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacks == "socket":
        monkeypatch.setattr(pair, "get_extra_info", lambda _: None)
    if lacks == "compiler":
        monkeypatch.setattr(outlets, "make", None)
    assert outlet(cast(Any, pair), CHUNK, None if lacks == "pieces" else (TEXT,)) is None
    assert outlets.sender() == ("python" if lacks == "compiler" else "compiled")
    assert pair.high == []


@pytest.mark.parametrize("version", [outlets.VERSION - 1, None])
def test_what_was_compiled_of_an_older_source_is_not_used(version: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    older = SimpleNamespace(Outlet=object, **({} if version is None else {"VERSION": version}))
    monkeypatch.setitem(sys.modules, "server._outlet", older)
    monkeypatch.setattr(server, "_outlet", older, raising=False)
    assert outlets._find() == (None, None)


def test_several_choices_have_none() -> None:
    stream = Rig().start(n=2)
    assert len(stream.grammar.frames) == 2
    assert Sse(stream).pieces() is Ndjson(stream).pieces() is None
    assert TokenMessages(stream, "a", websocket()).pieces() is None
    assert Plain(Rig().start(), 5).pieces() is None  # some of whose text is to be left out


@pytest.mark.parametrize(
    "bad",
    [
        (0, 3, (), print),
        (0, -1, (), print),
        (0, 0, (b"",) * 9, print),
        (0, 0, (3,), print),
        (0, 0, (b"a" * 5000,), print),
    ],
)
def test_what_it_can_not_be(bad: tuple[Any, ...]) -> None:
    assert outlets.make is not None
    with pytest.raises(ValueError, match=r"at most|no mark|no envelope"):
        outlets.make(*bad)
    with pytest.raises(TypeError):
        outlets.make(0, 0, ("text",), print)  # type: ignore[arg-type]


def test_a_cycle_through_its_transport_is_garbage() -> None:
    pair = Pair()
    pair.__dict__["kept"] = outlet(cast(Any, pair), CHUNK, (TEXT,))
    seen = weakref.ref(pair)
    pair.close()
    del pair
    gc.collect()
    assert seen() is None


# With a reader


class Channel:
    """A reader's, whose other way is the transport's."""

    def __init__(self, pair: Pair, full: Callable[[], bool]) -> None:
        self._pair, self._full = pair, full
        self.ended = ""

    @property
    def gate(self) -> Channel:
        return self

    @property
    def writable(self) -> bool:
        return not self._full()

    def write(self, data: bytes) -> None:
        self._pair.write(chunk(data))

    def write_each(self, pieces: list[bytes]) -> None:
        self._pair.write(b"".join(map(chunk, pieces)))

    def finish(self) -> None:
        self.ended = "whole"

    def cut(self) -> None:
        self.ended = "cut"


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_that_stalls_gets_every_byte_once_and_in_order(seed: int) -> None:
    """Whatever way an event took, and wherever the client stood still: what is read is what the framing says."""
    draw = random.Random(seed)
    stream, pair = Rig().start(), Pair()
    pair.ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    framing = Sse(stream)
    channel = Channel(pair, full=lambda: bool(pair.handed))
    reader = ClientReader(stream, framing, cast(Any, channel))
    stream.attach(reader)
    reader.pump()
    seen, pair.handed = pair.handed, b""
    reader.send_by(outlet(cast(Any, pair), CHUNK, framing.pieces()))

    def drain() -> None:
        """The client reads, then the transport writes what it was handed."""
        nonlocal seen
        seen += pair.read() + pair.handed
        pair.handed = b""

    for number in range(400):
        kind = draw.random()
        if kind < 0.9:
            stream.append(Event(0, b"t%d" % number + b"x" * draw.randrange(200)))
        elif kind < 0.95:
            stream.append(Event(0, b"y" * 5000))  # too long
        else:
            stream.append(Event(0, b"p", b'{"with":"logprobs"}'))
        stream.wake()
        if draw.random() < 0.05:
            drain()
            reader.pump()
    while reader.cursor < stream.log.end or pair.handed:
        drain()
        reader.pump()
    stream.append(Event(-1, b"", DONE))
    stream.wake()
    drain()
    events = stream.log.slice(0, stream.log.end)
    expected = b"".join(framing.one(event, position) for position, event in enumerate(events))
    assert body_of(seen) == expected
    pair.close()


def test_a_reader_that_left_sends_nothing_to_who_has_the_socket_now() -> None:
    stream, pair = Rig().start(), Pair()
    framing = Sse(stream)
    reader = ClientReader(stream, framing, cast(Any, Channel(pair, full=lambda: False)))
    stream.attach(reader)
    reader.send_by(outlet(cast(Any, pair), CHUNK, framing.pieces()))
    for number in range(2):
        stream.append(Event(0, b"t%d" % number))
        stream.wake()
    assert pair.read()
    reader.leave()
    stream.append(Event(0, b"late"))
    reader.pump()
    assert pair.read() == b""
    pair.close()


# What is asked for ahead


@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
@pytest.mark.parametrize("compiler", [True, False])
def test_ids_come_as_they_are_whatever_is_known_of_them(
    pair: Pair, count: int, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        monkeypatch.setattr(outlets, "prefetch", None)
    made = outlet(cast(Any, pair), CHUNK, (TEXT,))
    assert made is not None
    made.touches(made, pair, [])  # and the list is gone
    ids = random.Random(count).sample(range(1000), count)
    known = {id_: made for id_ in ids if id_ % 3}
    assert list(ahead(ids, known)) == ids
    assert list(ahead(ids, {**known, 5: cast(Any, None)})) == ids
    assert pair.read() == b""


def test_what_can_not_be_asked_for() -> None:
    prefetch: Any = outlets.prefetch
    for wrong in ((), ({},), ([], {}), ({}, ()), ({}, [], 1)):
        with pytest.raises(TypeError):
            prefetch(*wrong)
    with pytest.raises(TypeError, match="unhashable"):
        prefetch({}, [[]])


def test_the_table_keeps_no_outlet_of_a_reader_that_left_or_of_a_stream_that_ended(pair: Pair) -> None:
    rig = Rig()
    for end in ("left", "ended"):
        stream = rig.start()
        framing = Sse(stream)
        reader = ClientReader(stream, framing, cast(Any, Channel(pair, full=lambda: False)))
        stream.attach(reader)
        reader.send_by(outlet(cast(Any, pair), CHUNK, framing.pieces()))
        assert list(rig.table.outlets.values()) == [reader.outlet]
        if end == "left":
            reader.leave()
        else:
            stream.finish(Outcome(CANCELLED))
        assert rig.table.outlets == {}


def body_of(data: bytes) -> bytes:
    """The data of chunks."""
    body, at = b"", 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        body += data[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return body


@pytest.mark.timeout(120)
def test_it_does_not_leave_its_memory(tmp_path: Path) -> None:
    """Built with sanitizers that end the process at an access outside a block, or at undefined arithmetic."""
    path = compile_outlet(tmp_path, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    library = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONMALLOC": "malloc",  # so that every object is a block of its own
    }
    driver = [sys.executable, str(Path(__file__).with_name("outlet_driver.py")), str(path)]
    done = subprocess.run(driver, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
