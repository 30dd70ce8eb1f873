"""What every benchmark says of its machine and its figures."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CORES = sorted(os.sched_getaffinity(0))  # that we may use


def describe() -> str:
    """Processor, cores that we may use, system, Python and date, on one line."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    processor = named[1] if named else platform.processor() or platform.machine()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    cpus = f"{len(CORES)} CPUs" if len(CORES) > 1 else "one CPU for everything"
    return f"{processor}, {cpus}, {platform.system()}, Python {platform.python_version()}, {date}"


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and the least and the most in brackets."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of them, from least to most, doesn't exceed."""
    return ordered[round(share * (len(ordered) - 1))]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its columns aligned so that it reads well in a terminal too."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows)])
