"""What loading took and serving has no use for goes back to the system. May import the standard library only.

glibc keeps for this process what was freed, 50 to 100 MB of a model of 256; and the code that torch's libraries ran to
register themselves stays mapped, some 75 MB of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Iterator

_SMAPS = "/proc/self/smaps"  # Linux's


def give_back() -> None:
    """Called once all is loaded. Where a system has no such thing, that part is left out."""
    gc.collect()
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.malloc_trim(0)
    with contextlib.suppress(AttributeError, OSError):
        madvise, forget = libc.madvise, mmap.MADV_DONTNEED
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start, size in _unchanged():
            madvise(start, size, forget)


def _unchanged() -> Iterator[tuple[int, int]]:
    """Address and size of each mapping of a file that nobody writes to and whose pages are the file's. They stay in the
    system's cache, and come back one by one as they are touched. A page that was written to before, as the loader does
    with addresses, would come back without that."""
    with open(_SMAPS, encoding="utf-8", errors="replace") as file:
        text = file.read()
    candidate: tuple[int, int] | None = None
    own_kib = 0  # of pages that are this process's alone
    for line in text.splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            fields = rest.split(maxsplit=4)
            is_file = len(fields) == 5 and fields[4].startswith("/") and not fields[4].startswith("/dev/")
            start, _, end = first.partition("-")
            place = int(start, 16), int(end, 16) - int(start, 16)
            candidate, own_kib = place if is_file and "w" not in fields[0] else None, 0
        elif first in ("Anonymous:", "Swap:"):
            own_kib += int(rest.split()[0])
        elif first == "VmFlags:" and candidate is not None and not own_kib:
            yield candidate
