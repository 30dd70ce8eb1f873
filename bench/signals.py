"""How a benchmark ends early: Ctrl-C, Ctrl-\\, SIGTERM (`kill`, `timeout`, a CI's limit) and SIGHUP are one
exception.

It goes up through the context managers, so that no server, engine or scratch folder is left. Only the first signal
counts, as `timeout` sends two. What must not be cut in two, as starting a process and ending it, is `held`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asked for the end. A KeyboardInterrupt, as event loops and `subprocess` let that pass."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number


class _State:
    came = 0  # the first signal
    held = 0  # blocks that it waits for
    told = False


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`: 128 and the signal's number, as shells have it, when one ended it."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, or in a script's background
            signal.signal(number, _take)
    try:
        return work()
    except Ended as ended:
        begin = "\n" if sys.stderr.isatty() else ""  # behind ^C, or what is shown of the run
        print(f"{begin}ended by {signal.Signals(ended.number).name}", file=sys.stderr)
        return 128 + ended.number


@contextmanager
def held() -> Iterator[None]:
    """A signal that comes within the block counts behind it."""
    _State.held += 1
    try:
        yield
    finally:
        _State.held -= 1
        _tell()


def came() -> bool:
    """Whether the end was asked for."""
    return _State.came != 0


def _take(number: int, _: FrameType | None) -> None:
    _State.came = _State.came or number
    _tell()


def _tell() -> None:
    if _State.came and not _State.told and not _State.held:
        _State.told = True
        raise Ended(_State.came)
