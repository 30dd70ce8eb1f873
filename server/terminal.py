"""A terminal as a screen: the alternate one, without a cursor, each frame in one write over the one before, so that
nothing flickers; keys as they are pressed. However it is left, the terminal is as it was."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from server.top_view import Size

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # alternate screen, no cursor, no wrapping
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
# Terminals that know mode 2026 show what is between at once; others pass it over.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """Usable with `with`, in the main thread, where stdin and stdout are a terminal. SIGTERM and SIGHUP end it by
    SystemExit, Ctrl-C by KeyboardInterrupt; Ctrl-Z stops the process, and what was shown is shown again after it."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._modes: list[Any] = []
        self._shown = b""
        self._handlers: dict[int, Any] = {}
        self._told, self._tell = os.pipe()  # a signal came: what waits for a key looks up

    def __enter__(self) -> Self:
        for number in _ENDING:
            self._handle(number, self._on_end)
        self._handle(signal.SIGINT, signal.default_int_handler)
        self._handle(signal.SIGTSTP, self._on_stop)
        self._handle(signal.SIGWINCH, lambda number, frame: self._wake())
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._told)
        os.close(self._tell)

    @property
    def size(self) -> Size:
        """As it is now."""
        size = shutil.get_terminal_size()  # LINES and COLUMNS, for a terminal that doesn't know
        with contextlib.suppress(OSError):
            known = os.get_terminal_size(self._out)
            size = known if known.columns and known.lines else size
        return Size(size.columns, size.lines)

    def show(self, lines: list[str]) -> None:
        """A frame: each line as wide as the screen at most."""
        text = "\r\n".join(f"{line}\x1b[K" for line in lines)
        self._shown = f"{_BEGIN}\x1b[H{text}\x1b[J{_END}".encode(sys.stdout.encoding, "replace")
        self._write(self._shown)

    def key(self, seconds: float) -> str:
        """The keys that were pressed by then; "" for none, and (before the time is over) when the size changed."""
        ready, _, _ = select.select([self._in, self._told], [], [], max(0.0, seconds))
        if self._told in ready:
            os.read(self._told, 1024)
        if self._in not in ready:
            return ""
        pressed = b""
        with contextlib.suppress(OSError):  # what is read of a terminal that is gone
            pressed = os.read(self._in, 1024)
        if not pressed:
            raise EOFError("the terminal is gone")
        return pressed.decode("utf-8", "replace")

    def _take(self) -> None:
        self._modes = termios.tcgetattr(self._in)
        tty.setcbreak(self._in)
        self._write(_ENTER.encode() + self._shown)

    def _give_back(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # it may be gone
            self._write(_LEAVE.encode())
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._modes)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._out, data) :]

    def _wake(self) -> None:
        os.write(self._tell, b".")

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handlers[number] = signal.signal(number, handler)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._give_back()
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # here it stands until SIGCONT
        signal.signal(signal.SIGTSTP, ours)
        self._take()
        self._wake()
