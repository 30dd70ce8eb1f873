"""Outlets of every shape, with lengths around every bound; a process with sanitizers runs it. Its argument: the module.

What is right is said by test_outlet.py; here nothing may be read or written outside its memory.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.outlets import load_outlet

LENGTHS = (0, 1, 125, 126, 4085, 4086, 4087, 4096)
POSITIONS = (0, 1, 9, 10, 2**64 - 1)


def main(path: str) -> None:
    """Raises nothing, and prints nothing."""
    module: Any = load_outlet(Path(path))
    make, prefetch = module.Outlet, module.prefetch
    draw = random.Random(1)
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is
    theirs.setblocking(False)
    rests: list[bytes] = []
    for envelope, before, text in itertools.product(range(3), LENGTHS, LENGTHS):
        pieces = [os.urandom(before), *(draw.choice((0, 1, 2, os.urandom(draw.choice(LENGTHS)))) for _ in range(7))]
        outlet = make(ours.fileno(), envelope, tuple(pieces[: draw.randint(0, 8)]), rests.append)
        soon_gone = [outlet, object(), "text", 1][: draw.randint(0, 4)]
        outlet.touches(*soon_gone * draw.randint(0, 9))
        prefetch({id_: draw.choice((outlet, None)) for id_ in range(draw.randint(0, 99))}, list(range(90)))
        for position in POSITIONS:
            outlet.send(os.urandom(text), position)
        with contextlib.suppress(BlockingIOError):
            while draw.random() < 0.9 and theirs.recv(1 << 20):
                pass
    assert rests
    for bad in (
        (0, 3, (), None),
        (0, 0, (b"",) * 9, None),
        (0, 0, (3,), None),
        (0, 0, (-(2**70),), None),
        (0, 0, ("",)),
    ):
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            make(*bad)
            raise AssertionError(bad)
    theirs.close()
    outlet = make(ours.fileno(), 0, (0,), rests.append)
    outlet.send(b"gone", 1)
    rests.append(outlet)  # type: ignore[arg-type]  # a cycle
    del outlet, rests
    gc.collect()


if __name__ == "__main__":
    main(sys.argv[1])
