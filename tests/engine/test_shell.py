"""The engine's sockets: real ones, with the shell in a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.block_pool import BlockPool
from engine.core import Core
from engine.scheduler import Scheduler
from engine.sequence import Sampled, Slice
from engine.shell import Shell, bind, read_token
from engine.wire import Cancel, Credit, FrameReader, Hello, Sampling, Stats, Step, Submit, ToEngine, encode
from tests.support.engines import ChainRunner

DEADLINE_S = 20.0
SECRET = b"a shared secret"


class CountingRunner(ChainRunner):
    """Counts up from the prompt's first id: thousands of steps cost nothing."""

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        sequences = [part.sequence for part in slices if part.sample]
        return [Sampled((sequence.tokens[0] + sequence.generated) % 256) for sequence in sequences]


def expected(prompt: list[int], count: int) -> list[int]:
    return [(prompt[0] + i) % 256 for i in range(count)]


class Wire:
    """A server's end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(DEADLINE_S)
        self.socket = sock
        self._reader = FrameReader(engine_side=False)
        self._messages: list[Hello | Step] = []

    def send(self, *messages: ToEngine) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def receive(self) -> Hello | Step | None:
        """The next message; None when the engine closed."""
        while not self._messages:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._messages += self._reader.feed(data)  # type: ignore[arg-type]
        return self._messages.pop(0)

    def step(self, until: Callable[[Step], bool]) -> Step:
        """The first step for which `until` holds."""
        while True:
            message = self.receive()
            assert isinstance(message, Step)
            if until(message):
                return message

    def tokens(self, id_: int) -> list[int]:
        """All tokens of a sequence, until its end is told."""
        got: list[int] = []
        while True:
            message = self.receive()
            assert isinstance(message, Step)
            got += [token for i, token in zip(message.ids, message.tokens, strict=True) if i == id_]
            if any(end.id == id_ for end in message.ends):
                return got


class Engine:
    """A shell that runs in a thread until its parent closes."""

    def __init__(self, *, secret: bytes = b"") -> None:
        pool = BlockPool(4096, 16)
        self.core = Core(
            CountingRunner(4096, 16, context=65536),
            pool,
            Scheduler(pool, step_tokens_max=512, running_max=64),
            version="test",
        )
        self.shell = Shell(self.core, secret=secret)
        ours, theirs = socket.socketpair()
        self.parent = Wire(ours)
        self.shell.attach(theirs, parent=True)
        self.opened = [ours]
        self.thread = threading.Thread(target=self.shell.run, daemon=True)

    def start(self) -> None:
        self.thread.start()
        assert isinstance(self.parent.receive(), Hello)

    def connect(self, address: tuple[str, int] | str) -> Wire:
        sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
        sock.connect(address)
        self.opened.append(sock)
        return Wire(sock)

    def stop(self) -> None:
        self.parent.socket.close()
        self.thread.join(DEADLINE_S)
        for sock in self.opened:
            sock.close()
        for sock in [*self.shell._connections, *[k.fileobj for k in self.shell._selector.get_map().values()]]:
            sock.close()  # type: ignore[union-attr]
        self.shell._selector.close()
        assert not self.thread.is_alive()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
def guarded() -> Iterator[Engine]:
    engine = Engine(secret=SECRET)
    yield engine
    engine.stop()


def submit(id_: int, *, max_tokens: int = 5, credit: int = 10**6) -> Submit:
    return Submit(id_, [1, 2, 3], Sampling(max_tokens=max_tokens), credit)


def listen(engine: Engine, path: Path) -> str:
    address = str(path / "engine.sock")
    engine.shell.listen(bind(f"unix:{address}"))
    return address


def test_the_parents_end_is_the_engines_end(engine: Engine) -> None:
    engine.start()
    engine.parent.send(submit(1, max_tokens=60_000))
    engine.parent.step(lambda step: bool(step.ids))
    engine.parent.socket.close()
    engine.thread.join(DEADLINE_S)
    assert not engine.thread.is_alive()
    assert not engine.core._peers


def test_tokens_go_to_the_server_that_asked(engine: Engine, tmp_path: Path) -> None:
    address = listen(engine, tmp_path)
    engine.start()
    other = engine.connect(address)
    assert isinstance(other.receive(), Hello)
    engine.parent.send(submit(1))
    other.send(Submit(1, [9], Sampling(max_tokens=3), 100))
    assert engine.parent.tokens(1) == expected([1, 2, 3], 5)
    assert other.tokens(1) == expected([9], 3)


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", encode(Stats())[:-1] + b"\xc1"])
def test_garbage_drops_that_server_only(engine: Engine, tmp_path: Path, garbage: bytes) -> None:
    address = listen(engine, tmp_path)
    engine.start()
    broken = engine.connect(address)
    assert isinstance(broken.receive(), Hello)
    broken.send(submit(1, credit=1, max_tokens=50))
    broken.step(lambda step: step.gauges.parked == 1)
    broken.socket.sendall(garbage)
    assert broken.receive() is None
    engine.parent.send(submit(1))
    assert engine.parent.tokens(1) == expected([1, 2, 3], 5)
    engine.parent.send(Stats())
    assert engine.parent.step(lambda step: True).gauges.blocks_used == 0


def test_a_message_may_come_in_pieces(engine: Engine) -> None:
    engine.start()
    for byte in encode(submit(1)):
        engine.parent.socket.sendall(bytes([byte]))
    assert engine.parent.tokens(1) == expected([1, 2, 3], 5)


def test_credit_and_cancel_work_while_steps_run(engine: Engine) -> None:
    engine.start()
    engine.parent.send(submit(1, credit=2, max_tokens=60_000), submit(2, max_tokens=60_000))
    engine.parent.step(lambda step: step.gauges.parked == 1)
    engine.parent.send(Credit([(1, 3)]))
    engine.parent.step(lambda step: 1 in step.ids)
    engine.parent.send(Cancel([1, 2]))
    gauges = engine.parent.step(lambda step: step.gauges.running + step.gauges.parked == 0).gauges
    assert gauges.blocks_used == 0


def test_a_server_that_does_not_read_its_steps_delays_nobody(engine: Engine, tmp_path: Path) -> None:
    address = listen(engine, tmp_path)
    engine.start()
    silent = engine.connect(address)
    silent.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for id_ in range(1, 33):
        silent.send(submit(id_, max_tokens=2000))
    for id_ in range(1, 6):
        engine.parent.send(submit(id_))
        assert engine.parent.tokens(id_) == expected([1, 2, 3], 5)
    # It reads at last, and nothing was lost.
    assert isinstance(silent.receive(), Hello)
    assert silent.tokens(1) == expected([1, 2, 3], 2000)


def test_a_server_that_leaves_in_mid_stream_leaves_nothing_behind(engine: Engine, tmp_path: Path) -> None:
    address = listen(engine, tmp_path)
    engine.start()
    leaving = engine.connect(address)
    leaving.send(submit(1, max_tokens=60_000))
    leaving.receive()
    leaving.step(lambda step: bool(step.ids))
    leaving.socket.close()
    engine.parent.send(submit(2, max_tokens=60_000))
    engine.parent.step(lambda step: step.gauges.running == 1 and bool(step.ids))
    engine.parent.send(Cancel([2]))
    assert engine.parent.step(lambda step: step.gauges.running == 0).gauges.blocks_used == 0


# The secret


def test_the_right_secret_in_pieces_opens_the_wire(guarded: Engine) -> None:
    listener = bind("tcp://127.0.0.1:0")
    guarded.shell.listen(listener)
    guarded.start()
    server = guarded.connect(listener.getsockname())
    frames = SECRET + encode(submit(1))
    server.socket.sendall(frames[:5])
    server.socket.sendall(frames[5:])
    assert isinstance(server.receive(), Hello)
    assert server.tokens(1) == expected([1, 2, 3], 5)


@pytest.mark.parametrize("greeting", [b"b" * len(SECRET), b"", SECRET[:-1] + b"x" + encode(Stats()), b"x" * 100_000])
def test_a_wrong_secret_is_dropped_and_told_nothing(guarded: Engine, greeting: bytes) -> None:
    listener = bind("tcp://127.0.0.1:0")
    guarded.shell.listen(listener)
    guarded.start()
    stranger = guarded.connect(listener.getsockname())
    with contextlib.suppress(OSError):  # it may be dropped before it has said all
        stranger.socket.sendall(greeting)
        stranger.socket.shutdown(socket.SHUT_WR)
    assert stranger.receive() is None
    guarded.parent.send(submit(1))
    assert guarded.parent.tokens(1) == expected([1, 2, 3], 5)


def test_half_a_secret_is_told_nothing(guarded: Engine) -> None:
    listener = bind("tcp://127.0.0.1:0")
    guarded.shell.listen(listener)
    guarded.start()
    stranger = guarded.connect(listener.getsockname())
    stranger.socket.sendall(SECRET[:-1])
    guarded.parent.send(submit(1))
    assert guarded.parent.tokens(1) == expected([1, 2, 3], 5)
    stranger.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        stranger.socket.recv(1)


# Addresses


def test_a_unix_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    with bind(f"unix:{tmp_path}/engine.sock"):
        assert (tmp_path / "engine.sock").stat().st_mode & 0o777 == 0o600


def test_a_socket_that_a_dead_engine_left_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/engine.sock"
    bind(address).close()
    with bind(address), pytest.raises(OSError, match="in use"):
        bind(address)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "precious"
    file.write_text("text")
    with pytest.raises(OSError, match="in use"):
        bind(f"unix:{file}")
    assert file.read_text() == "text"


@pytest.mark.parametrize("address", ["http://x:1", "tcp://host", "tcp://:1", "tcp://host:x", "engine.sock", ""])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="tcp://host:port"):
        bind(address)


def test_a_token_file_holds_one_secret(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"  secret\n")
    assert read_token(str(file)) == b"secret"
    file.write_bytes(b"\n")
    with pytest.raises(ValueError, match="no token"):
        read_token(str(file))
