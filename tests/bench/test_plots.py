"""Pictures of runs that were kept: each figure is in them, and the same figures give the same files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.plots import BASELINE, SHARES, draw
from tests.support.serving import REPOSITORY

MACHINE: dict[str, Any] = {"machine": "a machine", "load": 0.5}


def transports() -> dict[str, Any]:
    def run(scale: float) -> dict[str, Any]:
        at = [scale * share for share in SHARES]
        return {"cpu_us": scale, "memory_kib": 2 * scale, "ttft_at_ms": at, "itl_at_ms": at}

    names = ("SSE, HTTP/1.1", "WebSocket")
    return MACHINE | {"figures": {n: {str(c): [run(c), run(2 * c)] for c in (1, 64, 512)} for n in names}}


def peers() -> dict[str, Any]:
    samples = [
        {
            "round": number, "contender": name, "mode": mode, "step_ms": step, "streams": streams,
            "cpu_us": 7.0 + number, "gap_p50_ms": 20.0, "gap_p99_ms": 25.0,
        }
        for number in range(2)
        for name in (BASELINE, "sluice", "Node")
        for mode in ("sse", "ws")
        for step in (20.0, 0.0)
        for streams in (512, 2000)
    ]  # fmt: skip
    return MACHINE | {"samples": samples}


@pytest.mark.parametrize(
    ("kept", "names", "words"),
    [
        (transports(), ["transports-cost", "transports-latency"], ["SSE, HTTP/1.1", "WebSocket", "a machine"]),
        (peers(), ["peers-cost", "peers-cost-unpaced", "peers-latency"], ["C writer", "Node", "sluice", "WebSocket"]),
    ],
)
def test_every_picture_names_what_it_shows_and_is_reproducible(
    tmp_path: Path, kept: dict[str, Any], names: list[str], words: list[str]
) -> None:
    first, second = (draw(kept, str(tmp_path / folder)) for folder in ("a", "b"))
    assert sorted(path.stem for path in first) == names
    for one, other in zip(first, second, strict=True):
        text = one.read_text()
        assert text == other.read_text()
        assert any(word in text for word in words) and "a machine" in text
    together = "".join(path.read_text() for path in first)
    assert all(word in together for word in words)


def test_without_matplotlib_nothing_is_measured_in_vain() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from bench.transports import main; main(['--plots', 'x'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "pip install -e '.[bench]'" in done.stderr and done.stdout == ""
