"""A WebSocket visit: generations begun or resumed on it, and what is shown of them."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

from wsproto.utilities import LocalProtocolError

from tests.faults.ledger import Attendance, Cut, Ledger
from tests.faults.plan import SMALL_BUFFER_BYTES, TO_THE_END, Ask, Visit
from tests.faults.stage import Stage, pause
from tests.support.serving import Closed, WebSocketClient, WebSocketRefused, chat

# What may be said in place of `started`.
REFUSALS = {"rate_limit_exceeded": 429, "overloaded": 503}
NOT_RESUMED = {"rate_limit_exceeded": 429, "stream_gone": 410, "position_gone": 410}
SILENCE_S = Visit("").patience_s


class SocketPlayer:
    """`cancel_due(count)`: whether it is time to cancel the first generation."""

    def __init__(self, stage: Stage, visit: Visit, cancel_due: Callable[[int | None], bool]) -> None:
        self._stage = stage
        self._visit = visit
        self._cancel_due = cancel_due
        self._ledgers: dict[str, Ledger] = {}
        self._asked: set[str] = set()  # ids that were neither started nor refused yet
        self._open: set[str] = set()  # ids that were started and have no end yet
        self._last: dict[str, int] = {}  # the last position shown of each
        self._attendances: list[tuple[Ledger, Attendance]] = []
        self._count = 0  # messages of the first one

    def begin(self, ask: Ask, mates: int, on_stream: Callable[[Ledger], None]) -> Ledger | None:
        """Generations side by side; the first one's ledger, if it was begun."""
        self._ask, self._on_stream, self._after = ask, on_stream, -1
        self._asked_at = time.monotonic()
        self._resumed: Ledger | None = None
        messages = [{"type": "generate", "id": str(n), **generation_fields(ask)} for n in range(mates + 1)]
        self._play(messages)
        return self._ledgers.get("0")

    def resume(self, ledger: Ledger, after: int) -> None:
        """Go on behind `after`."""
        self._resumed, self._after = ledger, after
        self._play([{"type": "resume", "id": "0", "stream": ledger.stream, "after": after}])

    def _play(self, messages: list[dict[str, Any]]) -> None:
        visit = self._visit
        buffer = SMALL_BUFFER_BYTES if visit.small else None
        try:
            socket = WebSocketClient(self._stage.server, headers=self._stage.headers, receive_buffer=buffer)
        except WebSocketRefused as refused:
            self._stage.refused(refused.answer.status, bytes(refused.answer.body))
            return
        try:
            socket.socket.settimeout(visit.patience_s)
            for message in messages:
                self._asked.add(message["id"])
                socket.send_json(**message)
            self._read(socket)
        except BaseException:
            socket.socket.close()
            raise
        finally:
            for ledger, attendance in self._attendances:
                ledger.attended.append((attendance.began_at, attendance.sure_until or time.monotonic()))

    def _read(self, socket: WebSocketClient) -> None:
        visit = self._visit
        wanted = visit.read
        stalled = half_closed = False
        while self._read_some(socket, wanted, stalled=stalled, half_closed=half_closed):
            if visit.stall_s and not stalled:
                stalled = True
                self._stage.count("stalls")
                self._unsure()
                pause(visit.stall_s)
            if visit.leave == "half" and not half_closed:
                half_closed = True
                self._stage.count("half-closed")
                self._unsure()
                socket._client.end_sending()
            elif visit.leave not in ("on", "half"):
                self._leave(socket)
                return
            wanted = TO_THE_END
        socket.socket.close()

    def _leave(self, socket: WebSocketClient) -> None:
        if self._visit.leave == "stay":
            self._stage.count("never read again")
            self._unsure()
            self._stage.stay(socket.socket.close)
            return
        self._stage.count(f"left by {self._visit.leave}")
        socket._client.reset() if self._visit.leave == "reset" else socket.socket.close()

    def _unsure(self) -> None:
        for _, attendance in self._attendances:
            attendance.unsure()

    def _read_some(self, socket: WebSocketClient, wanted: int, *, stalled: bool, half_closed: bool) -> bool:
        """Read so many messages. False when there are no more, or the reader has lost its patience."""
        while self._asked or self._open:
            if self._open and not half_closed and self._cancel_due(self._count):
                self._cancel(socket)
            if 0 <= wanted <= self._count and not self._asked:
                return True
            known_alive = time.monotonic()
            try:
                message = socket.receive()
            except TimeoutError:
                assert self._visit.patience_s < SILENCE_S, f"a socket hangs after {self._count} messages: {self._visit}"
                return False
            except (BrokenPipeError, ConnectionResetError):
                message = Closed(1006, "reset")
            if isinstance(message, Closed):
                self._closed(message, known_alive, stalled=stalled, half_closed=half_closed)
                return False
            self._take(json.loads(message))
        return False

    def _closed(self, end: Closed, known_alive: float, *, stalled: bool, half_closed: bool) -> None:
        self._stage.count("cut by the server")
        for _, attendance in self._attendances:
            attendance.sure_until = attendance.sure_until or known_alive
        silent = end.code == 1011 and self._stage.plan.setting.keepalive_s < 1  # our pong was late, or not sent
        for id_ in self._open:
            cut = Cut("websocket", f"{end.code} {end.reason}", stalled or silent or self._visit.small, half_closed)
            self._ledgers[id_].cuts.append(cut)

    def _cancel(self, socket: WebSocketClient) -> None:
        self._stage.count("cancelled")
        id_ = min(self._open)
        self._ledgers[id_].cancelled = True
        # The server may have closed meanwhile, for a late pong say; what is read next tells how.
        with contextlib.suppress(LocalProtocolError, BrokenPipeError, ConnectionResetError):
            socket.send_json(type="cancel", id=id_)

    def _take(self, message: dict[str, Any]) -> None:
        kind, id_ = message["type"], message["id"]
        if kind == "started":
            self._started(id_, message["stream"])
        elif kind == "error" and id_ in self._asked:
            self._refused(id_, message["error"])
        elif kind == "error" and message["error"]["code"] == "not_found":
            pass  # our cancel crossed the end
        else:
            self._show(kind, id_, message)

    def _started(self, id_: str, stream: str) -> None:
        self._asked.remove(id_)
        self._open.add(id_)
        if self._resumed is not None:
            assert stream == self._resumed.stream
            ledger = self._resumed
        else:
            ledger = self._stage.ledger(stream, self._ask, self._asked_at)
        self._ledgers[id_] = ledger
        self._last[id_] = self._after
        self._attendances.append((ledger, Attendance()))
        if id_ == "0" and self._resumed is None:
            self._on_stream(ledger)

    def _refused(self, id_: str, error: dict[str, Any]) -> None:
        self._asked.remove(id_)
        status = (REFUSALS if self._resumed is None else NOT_RESUMED).get(error["code"])
        if self._visit.beyond and "not come yet" in error["message"]:
            return
        assert status is not None, error
        if self._resumed is not None:
            self._stage.not_resumed(self._resumed, status, error["code"].encode())
        else:
            self._stage.refused(status, error["code"].encode())

    def _show(self, kind: str, id_: str, message: dict[str, Any]) -> None:
        assert id_ in self._open, f"{message} for an id that is not open"
        ledger = self._ledgers[id_]
        self._count += id_ == "0"
        if kind == "token":
            assert message["n"] > self._last[id_], f"{message} behind {self._last[id_]}"
            self._last[id_] = message["n"]
            ledger.see_token(message["n"], message.get("index", 0), message["text"])
            return
        self._open.remove(id_)
        if kind == "done":
            ledger.told(message["finish_reason"], message["usage"]["completion_tokens"])
        elif message["error"]["code"] != "position_gone":  # fell behind what is held
            ledger.told(message["error"]["code"])


def generation_fields(ask: Ask) -> dict[str, Any]:
    """The fields of a generate message."""
    fields: dict[str, Any] = {"max_tokens": ask.max_tokens, "n": ask.n, "temperature": ask.temperature}
    fields |= {name: value for name, value in (("seed", ask.seed), ("stop", ask.stop)) if value is not None}
    return {"prompt": ask.prompt, **fields} if ask.api == "completions" else chat(ask.prompt, **fields)
