"""`python -m bench.sampled FILE -m MODULE …`: a module, with a look at what it is doing after every few ms of its CPU.

SIGUSR2 begins, and again ends and writes FILE: JSON of [file, line, function, samples]. A sample belongs to the Python
function that runs, or that called the compiled code which does: the handler runs when that returns. What has no name or
no file (a comprehension, a named tuple's constructor, the interpreter's frozen modules) counts in the function that
called it. It costs next to nothing, so nothing is distorted, as it is by cProfile; and it counts CPU time, so it
doesn't matter who else runs.
"""

import json
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

INTERVAL_S = 0.001  # the kernel rounds it up to its tick
path, module = sys.argv[1], sys.argv[3]
seen: Counter[tuple[str, int, str]] = Counter()
running = False


def _is_nameless(code: CodeType) -> bool:
    return "<" in (code.co_name[0], code.co_filename[0])


def look(_: int, frame: FrameType | None) -> None:
    """One sample."""
    while frame is not None and frame.f_back is not None and _is_nameless(frame.f_code):
        frame = frame.f_back
    if frame is not None:
        code = frame.f_code
        seen[code.co_filename, code.co_firstlineno, code.co_name] += 1


def toggle(_: int, __: FrameType | None) -> None:
    """Begin, or end and write."""
    global running
    running = not running
    signal.setitimer(signal.ITIMER_PROF, INTERVAL_S if running else 0.0, INTERVAL_S)
    if not running:
        written = Path(path).with_suffix(".part")
        written.write_text(json.dumps([[*place, count] for place, count in seen.items()]))
        written.rename(path)


signal.signal(signal.SIGPROF, look)
signal.signal(signal.SIGUSR2, toggle)
sys.argv = sys.argv[3:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
