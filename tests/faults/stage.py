"""What all players of a round share: the server, the ledgers, the count of what was done, and the failures."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.ledger import Ledger
from tests.faults.oracle import Expected, Oracle
from tests.faults.plan import Ask, Plan
from tests.support.serving import Header, Server

SECRET = "secret-of-the-faults"

# Errors of the Messages API have no code.
POSITION_GONE = (b"position_gone", b"the first one that is held is")


def pause(seconds: float) -> None:
    """A moment that the plan drew. It is no wait for anything: what comes of acting just then is what is tested."""
    time.sleep(max(0.0, seconds))


@dataclass
class Stage:
    """One round."""

    server: Server
    plan: Plan
    tally: Counter[str] = field(default_factory=Counter)
    ledgers: dict[str, tuple[Ledger, Ask, Expected]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    engine_kills: int = 0
    drained: bool = False
    _staying: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.plan.setting.kv_blocks)

    @property
    def headers(self) -> list[Header]:
        """What every request carries."""
        return [] if self.plan.setting.key_streams is None else [("Authorization", f"Bearer {SECRET}")]

    def ledger(self, stream: str, ask: Ask, asked_at: float) -> Ledger:
        """Of a stream, that is begun when it was not known; nobody asked for it before `asked_at`."""
        with self._lock:
            if stream not in self.ledgers:
                self.ledgers[stream] = (Ledger(stream, asked_at), ask, self.oracle.expected(ask))
                self.tally["streams"] += 1
            return self.ledgers[stream][0]

    def count(self, what: str) -> None:
        """Something was done."""
        with self._lock:
            self.tally[what] += 1

    def stay(self, close: Callable[[], None]) -> None:
        """A connection that stays open, unread, until `clear`."""
        with self._lock:
            self._staying.append(close)

    def clear(self) -> None:
        """Close what stayed."""
        while self._staying:
            self._staying.pop()()

    def play(self, what: str, work: Callable[..., Any], *args: Any) -> threading.Thread:
        """Begin `work` in a thread of its own; what it raises is a failure of the round."""

        def run() -> None:
            try:
                work(*args)
            except ConnectionRefusedError:  # listening has ended; who is connected gets an answer, in a drain too
                if not self.drained:
                    self.failures.append(f"{what}: {traceback.format_exc()}")
            except Exception:
                self.failures.append(f"{what}: {traceback.format_exc()}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    # Which answers may come instead of a stream

    def refused(self, status: int, body: bytes) -> None:
        """A new stream was not begun: whether that can be."""
        setting = self.plan.setting
        self.count(f"refused {status}")
        assert status, "no answer"
        engine_dies = setting.kills_s or any("dies" in script for script in setting.scripts)
        if status == 503:
            assert engine_dies or self.drained or setting.streams_max < 1000, (status, body)
        else:
            assert status == 429 and setting.key_streams is not None, (status, body)

    def not_resumed(self, ledger: Ledger, status: int, body: bytes) -> None:
        """A reader was not let in: whether that can be."""
        setting = self.plan.setting
        self.count(f"not resumed {status}")
        assert status, "no answer"
        if status == 410 and any(sign in body for sign in POSITION_GONE):
            assert setting.log_bytes_per_stream < 1024 * 1024, body
        elif status == 410:
            assert time.monotonic() - ledger.asked_at >= setting.resume_ttl_s, f"gone too early: {ledger.stream}"
        else:
            assert status == 429 and setting.key_streams is not None, (status, body)
