"""An engine that a server works with: started as a child process, or attached to by its address; begun anew when it
dies. To whom it tells, it is one thing that is there or not."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import engine
from engine.client import EngineClient
from engine.wire import Hello, Step, Submit
from server.access_log import AccessLog

# An engine that dies young is started again after a growing pause, so that a broken one doesn't spin.
RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
LIVED_S = 30.0  # an engine that lived so long starts the pauses over
STOP_WAIT_S = 5.0  # for a child to end by itself when its socket closed


class EngineFailed(Exception):
    """The first engine never came up. `code` is what the server should exit with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Vocabulary:
    """What all engines behind one server must agree on, set by the first: streams may go on in any of them."""

    def __init__(self) -> None:
        self.tokenizer_hash = ""


class Listener(Protocol):
    """Who wants to know about the engine: its balancer."""

    def on_step(self, step: Step, more: bool) -> None: ...  # noqa: D102  (more: the next is told at once behind it)
    def on_engine_lost(self) -> None: ...  # noqa: D102
    def on_engine_ready(self) -> None: ...  # noqa: D102


class EngineLink:
    """Keeps one engine connected. `argv` starts a child, of `threads` if that is given; `url` attaches instead."""

    def __init__(
        self,
        argv: tuple[str, ...],
        url: str | None,
        secret: bytes,
        log: AccessLog,
        *,
        vocabulary: Vocabulary,
        on_restart: Callable[[], None],
        threads: int | None = None,
    ) -> None:
        self.hello: Hello | None = None
        self._listener: Listener | None = None
        self._argv = argv
        self._url = url
        self._secret = secret
        self._log = log
        self._on_restart = on_restart
        self._client: EngineClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._vocabulary = vocabulary
        self._threads = threads
        self._closing = False
        self._greeted = False  # by any engine
        self._lost: asyncio.Future[str] | None = None
        self._keeper: asyncio.Task[None] | None = None

    def listen(self, listener: Listener) -> None:
        """Tell `listener` everything from now on, the engine's gauges first."""
        self._listener = listener
        self.ask_gauges()

    def ask_gauges(self) -> None:
        """Have the engine say how it is."""
        if self._client is not None:
            self._client.ask_gauges()

    # What streams ask

    def submit(self, message: Submit) -> None:
        """Start a sequence."""
        if self._client is not None:
            self._client.submit(message)

    def credit(self, sequence_id: int, total: int) -> None:
        """Let a sequence reach `total` generated tokens."""
        if self._client is not None:
            self._client.credit(sequence_id, total)

    def cancel(self, sequence_ids: list[int]) -> None:
        """Forget sequences."""
        if self._client is not None:
            self._client.cancel(sequence_ids)

    # Its life

    async def start(self) -> Hello:
        """The first engine. Raises EngineFailed."""
        ready: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._lost = await self._connect(ready)
        waited: list[asyncio.Future[Any]] = [ready, self._lost]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            code = await self._reap()
            reason = self._lost.result() if code is None else f"it ended with code {code}; its own words are above"
            raise EngineFailed(f"the engine did not start: {reason}", 2 if code == 2 else 1)
        self.keep()
        return ready.result()

    def keep(self) -> None:
        """Begin engines anew when they are lost, until `close`; also after a `start` that failed."""
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        """Let go of the engine; a child ends."""
        self._closing = True
        if self._keeper is not None:
            self._keeper.cancel()
        if self._client is not None:
            self._client.close()
        await self._reap()

    async def _keep(self) -> None:
        """Start engines one after another, for as long as the server lives."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            assert self._lost is not None
            since = loop.time()
            reason = await self._lost
            was_up, self.hello, self._client = self.hello is not None, None, None
            self._log.event("engine_lost", reason=reason)
            if was_up and self._listener is not None:
                self._listener.on_engine_lost()
            await self._reap()
            failures = 0 if was_up and loop.time() - since > LIVED_S else failures + 1
            await asyncio.sleep(RESTART_PAUSES_S[min(failures - 1, len(RESTART_PAUSES_S) - 1)] if failures else 0)
            if self._url is None:
                self._on_restart()
            self._lost = await self._connect(None)

    async def _connect(self, ready: asyncio.Future[Hello] | None) -> asyncio.Future[str]:
        """One engine. The future returned ends, with the reason, when the engine is lost."""
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_hello(hello: Hello) -> None:
            self._greet(hello)
            if self.hello is not None and ready is not None and not ready.done():
                ready.set_result(hello)

        def on_lost(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        def on_step(step: Step, more: bool) -> None:
            if self._listener is not None:
                self._listener.on_step(step, more)

        def make() -> EngineClient:
            # Kept from here on: an engine that is there at once may say hello before its connection is given to us.
            self._client = EngineClient(on_hello=on_hello, on_step=on_step, on_lost=on_lost, secret=self._secret)
            return self._client

        loop = asyncio.get_running_loop()
        try:
            if self._url is None:
                self._process, sock = spawn(self._argv, self._threads)
                await loop.create_unix_connection(make, sock=sock)
            elif self._url.startswith("unix:"):
                await loop.create_unix_connection(make, self._url.removeprefix("unix:"))
            else:
                host, _, port = self._url.removeprefix("tcp://").rpartition(":")
                await loop.create_connection(make, host.strip("[]"), int(port))
        except (OSError, ValueError) as error:
            self._client = None
            on_lost(f"{self._url or 'the engine'}: {error}")
        return lost

    def _greet(self, hello: Hello) -> None:
        """Take an engine up, unless it speaks another vocabulary than the streams that wait for it."""
        known = self._vocabulary.tokenizer_hash
        if known and hello.tokenizer_hash != known:
            self._log.event("engine_refused", reason="it serves another tokenizer than the others, or the one before")
            assert self._client is not None
            self._client.close()
            return
        self._vocabulary.tokenizer_hash = hello.tokenizer_hash
        if self._url is not None and self._greeted:  # begun anew elsewhere; trying to reach it is no restart
            self._on_restart()
        self._greeted = True
        self.hello = hello
        self._log.event("engine_ready", model=hello.model, pool_tokens=hello.pool_tokens)
        if self._listener is not None:
            self._listener.on_engine_ready()
            assert self._client is not None
            self._client.ask_gauges()

    async def _reap(self) -> int | None:
        """Wait for the child's end, by force if need be; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(None, process.wait, STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return await loop.run_in_executor(None, process.wait)


def spawn(argv: tuple[str, ...], threads: int | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start an engine as a child; with our end of its socket, at whose close it ends."""
    ours, theirs = socket.socketpair()
    root = str(Path(engine.__file__).parent.parent)
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
    if threads is not None:
        environment.setdefault("OMP_NUM_THREADS", str(threads))  # torch's too
    # -P: a folder named engine in the user's working directory is not ours.
    command = [sys.executable, "-P", "-m", "engine", "--fd", str(theirs.fileno()), *argv]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    ours.setblocking(False)
    return process, ours


def threads_each(engines: int) -> int | None:
    """Threads of each engine, where several share this machine's processors."""
    return max(1, (os.cpu_count() or 1) // engines) if engines > 1 else None
