"""`--frontends N`: one process that serves nobody, and keeps the others.

It starts the engines, forks the frontends once the engines are there, and begins anew whatever dies. It has no event
loop and no threads, so that a fork is a whole process; it waits for a word, a signal or an end, and does one thing.
"""

from __future__ import annotations

import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import NoReturn

from server.access_log import AccessLog
from server.config import Config
from server.engines import RESTART_PAUSES_S, STOP_WAIT_S, EngineFailed, spawn, threads_each
from server.frontends.frontend import GO, LEAVING, RELOAD, STOP, Frontend
from server.gateway.access_tokens import new_secret
from server.gateway.key_file import KeysError, read_keys
from server.gateway.ledger import Ledger, LedgerFull
from server.listening import listen, say_ready, turn_away
from server.tls import Certificates

BACKLOG = 4096
LIVED_S = 30.0  # what lived so long is begun anew at once
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
Run = Callable[[Config, Frontend], int]


class Child:
    """An engine or a frontend, alive or to be begun anew."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.socket: socket.socket | None = None  # None: not alive
        self.ready = False
        self.failures = 0
        self.began_at = 0.0
        self.begin_at: float | None = None  # when it is to be begun anew

    def died(self, now: float) -> None:
        """It ended; a growing pause keeps one that can't live from spinning."""
        lived = self.ready and now - self.began_at > LIVED_S
        self.failures = 0 if lived else self.failures + 1
        self.begin_at = now + (RESTART_PAUSES_S[min(self.failures, len(RESTART_PAUSES_S)) - 1] if self.failures else 0)
        self.ready = False


class EngineChild(Child):
    """`address`: where the frontends find it."""

    def __init__(self, index: int, folder: str, config: Config) -> None:
        super().__init__(f"engine {index}")
        self.address = f"unix:{folder}/engine-{index}.sock"
        self.process: Popen[bytes]
        self._argv = ("--listen", self.address, *config.engine_argv)
        self._threads = threads_each(config.engines)

    def begin(self) -> None:
        """Start it."""
        self.process, self.socket = spawn(self._argv, self._threads)

    def reap(self) -> int:
        """Its exit code, by force if need be."""
        try:
            return self.process.wait(STOP_WAIT_S)
        except TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class FrontendChild(Child):
    """One server process."""

    def __init__(self, index: int) -> None:
        super().__init__(f"frontend {index}")
        self.index = index
        self.pid = 0
        self.leaves = False

    def reap(self) -> int:
        """Its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Supervisor:
    """`run`: a frontend's whole life, in a process of its own."""

    def __init__(self, config: Config, run: Run) -> None:
        self._config = config
        self._run = run
        self._log = AccessLog(config.log_format, clock=time.monotonic)
        self._selector = selectors.DefaultSelector()
        self._folder = tempfile.mkdtemp(prefix="sluice-")
        count = 0 if config.engine_urls or config.conformance_echo else config.engines
        self._engines = [EngineChild(index, self._folder, config) for index in range(count)]
        self._frontends = [FrontendChild(index) for index in range(config.frontends)]
        self._ledger = Ledger(config.frontends)
        self._secret = new_secret()
        self._listener: socket.socket
        self._away = False  # newcomers are turned away from a Unix socket, whose path may be another server's now
        self._stops = 0  # signals that asked for the end
        self._exit_code = 0
        self._ready = False

    def serve(self) -> int:
        """Until a signal comes; the exit code. Raises what keeps a server from starting."""
        try:
            self._check()
            self._listener = self._bind()
            return self._serve(self._take_signals())
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self, wakeup: socket.socket) -> int:
        try:
            for engine in self._engines:
                self._begin_engine(engine)
            if not self._engines:
                self._begin_frontends()
            while any(child.socket for child in self._frontends) or not self._over:
                self._wait(wakeup)
        finally:
            self._end_engines()
            if self._config.uds and not self._away:
                Path(self._config.uds).unlink(missing_ok=True)
        return max(self._exit_code, int(self._stops > 1))

    @property
    def _over(self) -> bool:
        return self._stops > 0 or self._exit_code > 0

    def _check(self) -> None:
        """What each process will read, so that what is wrong with it is said once."""
        config = self._config
        if config.api_keys:
            self._reserve()
        if config.tls_cert and config.tls_key:
            Certificates(Path(config.tls_cert), Path(config.tls_key))

    def _reserve(self) -> None:
        assert self._config.api_keys is not None
        try:
            self._ledger.reserve(key.name for key in read_keys(self._config.api_keys))
        except LedgerFull as full:
            raise KeysError(f"{self._config.api_keys}: with --frontends {full}") from None

    def _bind(self) -> socket.socket:
        """A Unix socket to be shared, or a port that is held for the frontends, which nobody else may have. Whoever
        has no listener gets no connections."""
        config = self._config
        if config.uds:
            listener = listen(config)
            listener.listen(BACKLOG)
            return listener
        with listen(config) as probe:  # without sharing: another server's port is refused
            port = probe.getsockname()[1]
        return listen(config, port=port, shared=True)

    def _take_signals(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._wakeup = theirs
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        self._selector.register(ours, selectors.EVENT_READ)
        return ours

    # One thing at a time

    def _wait(self, wakeup: socket.socket) -> None:
        children: list[EngineChild | FrontendChild] = [*self._engines, *self._frontends]
        due = [child for child in children if child.begin_at is not None]
        wait_s = min((child.begin_at - time.monotonic() for child in due if child.begin_at is not None), default=None)
        for key, _ in self._selector.select(wait_s if wait_s is None else max(0.0, wait_s)):
            if key.fileobj is wakeup:
                for number in wakeup.recv(64):
                    self._on_signal(number)
            elif key.data.socket is key.fileobj:
                self._hear(key.data)
        if not self._over:
            for child in due:
                if child.begin_at is not None and child.begin_at <= time.monotonic():
                    self._begin_engine(child) if isinstance(child, EngineChild) else self._begin_frontend(child)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._tell(RELOAD)
        elif number in (signal.SIGTERM, signal.SIGINT):
            self._stop(0)

    def _stop(self, exit_code: int) -> None:
        self._stops += exit_code == 0
        self._exit_code = max(self._exit_code, exit_code)
        self._tell(STOP)

    def _tell(self, word: bytes) -> None:
        for child in self._frontends:
            if child.socket is not None:
                with suppress(OSError):  # it has just died, which its end of the socket is about to say
                    child.socket.send(word)

    def _hear(self, child: EngineChild | FrontendChild) -> None:
        assert child.socket is not None
        try:
            said = child.socket.recv(64 * 1024)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._on_death(child)
        elif not child.ready:  # an engine's hello, or a frontend's word
            child.ready = True
            if isinstance(child, FrontendChild):
                self._say_ready()
            elif all(engine.ready for engine in self._engines) and not self._ready:
                self._begin_frontends()
        if isinstance(child, FrontendChild) and LEAVING in said:
            self._let_go(child)

    def _let_go(self, child: FrontendChild) -> None:
        """It has nothing left to do. The last one still accepts whoever has connected, and nobody else connects."""
        child.leaves = True
        if all(each.leaves for each in self._frontends if each.socket is not None):
            self._away = True
            turn_away(self._listener)
        assert child.socket is not None
        with suppress(OSError):  # as in _tell
            child.socket.send(GO)

    def _say_ready(self) -> None:
        if not self._ready and all(child.ready for child in self._frontends):
            self._ready = True
            say_ready(self._log, self._config, self._listener)

    def _on_death(self, child: EngineChild | FrontendChild) -> None:
        assert child.socket is not None
        self._selector.unregister(child.socket)
        child.socket.close()
        child.socket = None
        code = child.reap()
        if isinstance(child, FrontendChild):
            self._ledger.forget(child.index)
        if self._over:
            return
        if not self._ready:
            if isinstance(child, EngineChild):
                said = f"it ended with code {code}; its own words are above"
                raise EngineFailed(f"the engine did not start: {said}", 2 if code == 2 else 1)
            self._stop(code if code > 0 else 1)
            return
        self._log.event("died", process=child.name, code=code)
        child.died(time.monotonic())

    # Beginnings and ends

    def _begin_engine(self, child: EngineChild) -> None:
        if child.began_at:
            self._ledger.count_restart()
        child.begin_at = None
        child.began_at = time.monotonic()
        child.begin()
        assert child.socket is not None
        self._selector.register(child.socket, selectors.EVENT_READ, child)

    def _begin_frontends(self) -> None:
        gc.collect()
        gc.freeze()  # the children share these pages for as long as nobody writes to them
        for child in self._frontends:
            self._begin_frontend(child)

    def _begin_frontend(self, child: FrontendChild) -> None:
        child.begin_at = None
        child.began_at = time.monotonic()
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes to all in this moment must not be heard by the new process, whose handlers are still ours.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        child.pid = os.fork()
        if child.pid == 0:
            ours.close()
            self._be_frontend(child, theirs)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        theirs.close()
        ours.setblocking(False)
        child.socket = ours
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _be_frontend(self, child: FrontendChild, control: socket.socket) -> NoReturn:
        """In the new process: let go of all that is the supervisor's, and serve. Signals are the supervisor's to hear,
        also those that a terminal or a service manager sends to all."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wakeup.close()
        uds, config = self._config.uds, self._config
        port = 0 if uds else self._listener.getsockname()[1]
        if not uds:
            self._listener.close()
        self._ledger.take(child.index)
        frontend = Frontend(
            index=child.index,
            count=config.frontends,
            folder=self._folder,
            port=port,
            listener=self._listener if uds else None,
            engine_urls=config.engine_urls or tuple(engine.address for engine in self._engines),
            control=control,
            ledger=self._ledger,
            token_secret=self._secret,
        )
        code = 1
        try:
            code = self._run(config, frontend)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # not the supervisor's own way out

    def _end_engines(self) -> None:
        for engine in self._engines:
            if engine.socket is not None:
                engine.socket.close()
        for engine in self._engines:
            if engine.socket is not None:
                engine.reap()
