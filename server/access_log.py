"""One line for each request, on stderr: what was asked, and how it really ended.

A request that became a stream has its line when the stream ends, with the outcome and the counts. Others have theirs
when they are answered. Probes (health, readiness, metrics, status) write none: they would be most of the log. No line
holds a prompt, a text, a key or a query.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

from server.http import Call
from server.stream import Stream

# In place of a status, as nginx has it: the client left before there was an answer.
CLIENT_LEFT = 499
_QUIET_PATHS = frozenset(("/health", "/ready", "/metrics", "/status"))
# What a client chose is shown up to here.
SHOWN_CHARS_MAX = 200

_word = re.compile(r"[!#-<>-~]+")  # what needs no quotes, also where several are joined
_named = re.compile(r"^(/v1/(?:streams/|responses/(?:resp_)?)[^/]{8})[^/]*")

Value = str | int | float | None


class AccessLog:
    """`style` is text (`key=value`) or json."""

    def __init__(
        self, style: str, *, out: TextIO | None = None, clock: Callable[[], float], now: Callable[[], float] = time.time
    ) -> None:
        self._json = style == "json"
        self._out = out or sys.stderr
        self._clock = clock
        self._now = now
        self._second = -1
        self._stamp = ""  # of that second

    def request(self, call: Call, status: int) -> None:
        """An answer that is no stream's."""
        if call.path in _QUIET_PATHS:
            return
        seconds = self._clock() - call.received_at
        self._write(
            "request",
            {
                "request_id": call.request_id,
                "client": call.client,
                "method": call.request.method,
                "path": _without_ids(call.path)[:SHOWN_CHARS_MAX],
                "status": status,
                "key": call.key,
                "ms": _ms(seconds),
            },
        )

    def unbegun(self, call: Call, outcome: str, status: int) -> None:
        """A generation on the WebSocket that `call` opened, which never became a stream. `status`: what an HTTP request
        would have been answered."""
        self._write(
            "request",
            {
                "request_id": call.request_id,
                "client": call.client,
                "api": call.api,
                "outcome": outcome,
                "status": status,
                "key": call.key,
            },
        )

    def stream(self, stream: Stream) -> None:
        """A stream that has its outcome."""
        end = stream.outcome
        assert end is not None
        ttft = stream.first_token_at - stream.created if stream.first_token_at else None
        fields: dict[str, Value] = {
            "request_id": stream.request_id,
            "client": stream.client,
            "api": stream.grammar.api,
            "stream": stream.id[:8],  # enough to find it again; the whole id would let a reader of the log attach
            "key": stream.key,
            "outcome": end.kind,
            "prompt_tokens": stream.prompt_tokens,
            "cached_tokens": stream.cached_tokens,
            "completion_tokens": stream.completion_tokens,
            "ttft_ms": None if ttft is None else _ms(ttft),
            "ms": _ms(self._clock() - stream.created),
        }
        if end.message:
            fields["message"] = end.message[:SHOWN_CHARS_MAX]
        self._write("stream", fields)

    def fault(self, request_id: str, trace: str) -> None:
        """The server's own mistake, with its traceback; the client gets neither."""
        self._write("fault", {"request_id": request_id, "trace": trace})

    def event(self, name: str, **fields: Value) -> None:
        """Something that is no request: an engine's start, a drain."""
        self._write(name, fields)

    def _write(self, kind: str, fields: dict[str, Value]) -> None:
        if (second := int(self._now())) != self._second:
            self._second = second
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))
        if self._json:
            line = json.dumps({"time": self._stamp, "event": kind, **fields})
        else:
            line = " ".join([self._stamp, kind, *_pairs(fields)])
        try:  # noqa: SIM105 (which makes and calls three times what this needs)
            self._out.write(line + "\n")
        except (OSError, ValueError):
            pass  # nobody reads the log any more; the streams go on


def _ms(seconds: float) -> float:
    """Milliseconds, to a tenth."""
    return int(seconds * 10_000 + 0.5) / 10


def _without_ids(path: str) -> str:
    """The path, with a stream's name as short as elsewhere in the log: also one that isn't the caller's, or is gone."""
    return _named.sub(r"\1", path)


def _pairs(fields: dict[str, Value]) -> list[str]:
    """Each value that there is, on one line; quoted when it isn't a plain word."""
    words = "".join([value for value in fields.values() if type(value) is str])
    plain = _word.fullmatch(words)  # as nearly always: one question for all
    return [
        f"{name}={value if plain else _shown(value)}"
        for name, value in fields.items()
        if value is not None and value != ""
    ]


def _shown(value: Value) -> str:
    if not isinstance(value, str):
        return str(value)
    return value if _word.fullmatch(value) else json.dumps(value)
