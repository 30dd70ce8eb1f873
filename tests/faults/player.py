"""Plays a story: begins its stream, reads it, breaks connections, comes back, cancels."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from tests.faults import grammars, lines
from tests.faults.ledger import Attendance, Cut, Ledger
from tests.faults.lines import Feed, Http1Line, Http2Line, Line, NdjsonFeed, PlainFeed, SseFeed
from tests.faults.plan import TO_THE_END, Ask, Story, Visit
from tests.faults.socket_player import SocketPlayer
from tests.faults.stage import Stage, pause
from tests.support.serving import DEADLINE_S, Header, chat

MEDIA = {
    "sse": "text/event-stream",
    "ndjson": "application/x-ndjson",
    "plain": "text/plain",
    "poll": "application/json",
}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
NOT_YET = 10**6  # a position that no stream here has
POLL_S = 0.3
# Silence for so long is a hang. What a plan calls impatience is far less.
SILENCE_S = Visit("").patience_s


class Player:
    """One story on a stage."""

    def __init__(self, stage: Stage, story: Story) -> None:
        self._stage = stage
        self._server = stage.server
        self._story = story
        self._name: list[Header] = [("Idempotency-Key", f"key-{story.number}")] if story.idempotent else []
        self._cancel_lock = threading.Lock()
        self._cancel_sent = False

    def play(self) -> None:
        """From its begin to its last reader's leaving."""
        story = self._story
        pause(story.at_s)
        self._asked_at = time.monotonic()  # for the first time; a request that was left unanswered may have begun one
        ledger = self._begin()
        if ledger is None:
            return
        beside = [self._stage.play(f"beside {story}", self._come, ledger, visit) for visit in story.beside]
        for visit in story.later:
            self._come(ledger, visit)
        for thread in beside:
            thread.join(DEADLINE_S)

    # The first reader

    def _begin(self) -> Ledger | None:
        story, visit = self._story, self._story.first
        self._stage.count(f"begun by {visit.door}")
        if visit.door == "websocket":
            player = SocketPlayer(self._stage, visit, self._cancel_due)
            return player.begin(story.ask, story.mates, on_stream=self._arm_cancel)
        if visit.door == "poll":
            return self._begin_polling()
        if visit.door == "whole":
            return self._ask_whole()
        method, target, body = request(story.ask, stream=True)
        try:
            line = self._line(visit, method, target, body, [("Accept", _media(visit.door)), *self._name])
        except TimeoutError:
            self._left_unanswered(visit)
            return None
        if line.status != 200:
            self._refused(line)
            return None
        ledger = self._entered(line)
        self._read(ledger, visit, line, _feed(visit.door, ledger, -1))
        return ledger

    def _entered(self, line: Line) -> Ledger:
        stream = line.header("x-stream-id")
        assert stream, "no X-Stream-Id"
        ledger = self._stage.ledger(stream, self._story.ask, self._asked_at)
        self._arm_cancel(ledger)
        return ledger

    def _begin_polling(self) -> Ledger | None:
        method, target, _ = request(self._story.ask, stream=True)
        answer = self._server.ask(method, target, None, [("Accept", "application/json"), *self._stage.headers])
        if self._stage.plan.setting.resume_ttl_s == 0 and answer.status == 400:
            assert answer.error(400)["code"] == "polling_off"
            self._stage.count("refused polls")
            return None
        if answer.status != 202:
            self._stage.refused(answer.status, bytes(answer.body))
            return None
        ledger = self._stage.ledger(answer.json()["stream"], self._story.ask, self._asked_at)
        self._arm_cancel(ledger)
        self._poll(ledger, replace(self._story.first, beyond=False), -1)
        return ledger

    def _ask_whole(self) -> Ledger | None:
        """An answer in one piece. Its stream is known only when it comes."""
        visit = self._story.first
        method, target, body = request(self._story.ask, stream=False)
        patience_s = visit.patience_s if visit.read == TO_THE_END else min(visit.patience_s, visit.read * 0.02 + 0.001)
        try:
            line = Http1Line(
                self._server,
                method,
                target,
                body,
                [*self._name, *self._stage.headers],
                small=False,
                patience_s=patience_s,
            )
        except TimeoutError:
            self._stage.count("left unanswered")
            return None
        return self._whole(line)

    def _whole(self, line: Line) -> Ledger | None:
        stream = line.header("x-stream-id")
        if stream is None:
            self._refused(line)
            return None
        ledger = self._stage.ledger(stream, self._story.ask, self._asked_at)
        self._finish(line)
        assert line.end == "whole", line.end
        answer = grammars.whole(bytes(line.body))
        if answer.reasons:
            assert line.status == 200
            ledger.whole_texts.append(answer.texts)
            assert tuple(answer.reasons) == self._stage.ledgers[stream][2].reasons, answer
            ledger.told(worst_of(answer.reasons), answer.tokens)
        elif answer.failure:
            ledger.told(answer.failure)
        return ledger

    @staticmethod
    def _finish(line: Line) -> None:
        """Read an answer that is no stream."""
        while line.end == "open":
            line.more()
        line.leave(reset=False)

    def _refused(self, line: Line) -> None:
        self._finish(line)
        if self._turned_away(line):
            return
        self._stage.refused(line.status, bytes(line.body))

    def _turned_away(self, line: Line) -> bool:
        """There was no answer, but the connection's last word: only a drain says it."""
        if line.status or not line.turned_away:
            return False
        assert self._stage.drained, "GOAWAY"
        self._stage.count("turned away")
        return True

    def _left_unanswered(self, visit: Visit) -> None:
        """Its client left before the head came; whoever knows the stream's name may still find it, and nobody does."""
        assert visit.patience_s < SILENCE_S, f"no answer within {visit.patience_s} s"
        self._stage.count("left unanswered")

    # Readers that come back

    def _come(self, ledger: Ledger, visit: Visit) -> None:
        pause(visit.wait_s)
        self._stage.count(f"resumed by {visit.door}")
        known = max([ledger.position, *ledger.tokens])
        after = NOT_YET if visit.beyond else round(visit.depth * (known + 1)) - 1
        if visit.door == "websocket":
            SocketPlayer(self._stage, visit, self._cancel_due).resume(ledger, after)
        elif visit.door == "poll":
            self._poll(ledger, visit, after)
        elif visit.door == "repost":
            self._repost(ledger, visit)
        else:
            self._resume(ledger, visit, after)

    def _resume(self, ledger: Ledger, visit: Visit, after: int) -> None:
        plain = visit.door.endswith("plain")
        if plain:
            after = NOT_YET if visit.beyond else round(visit.depth * ledger.text_bytes)
        method, target, body, headers = self._resumption(ledger, visit, after)
        try:
            line = self._line(visit, method, target, body, [("Accept", _media(visit.door)), *headers])
        except TimeoutError:
            return self._left_unanswered(visit)
        if line.status == 200:
            assert line.header("x-stream-id") in (ledger.stream, None)
            if visit.door.endswith("ndjson") and line.header("x-stream-id"):
                assert line.header("x-stream-from") == str(after + 1)
            self._read(ledger, visit, line, _feed(visit.door, ledger, after))
            return None
        self._finish(line)
        if self._turned_away(line):
            return None
        if line.status == 204:
            self._check_past_end(ledger, visit, after)
        elif line.status == 400:
            assert visit.beyond and b"not come yet" in line.body, (after, bytes(line.body))
        else:
            self._stage.not_resumed(ledger, line.status, bytes(line.body))
        return None

    @staticmethod
    def _check_past_end(ledger: Ledger, visit: Visit, after: int) -> None:
        """Nothing more will come: then `after` must be at the end."""
        plain = visit.door.endswith("plain")
        known_end = after == ledger.text_bytes if plain else grammars.is_last(ledger.events.get(after, b"{}"))
        assert visit.beyond or known_end, f"204 behind {after} of {ledger.stream}"

    def _resumption(self, ledger: Ledger, visit: Visit, after: int) -> tuple[str, str, Any, list[Header]]:
        target = f"/v1/streams/{ledger.stream}"
        if visit.door.endswith("plain"):
            return "GET", f"{target}?after_bytes={after}", None, []
        if visit.means == "query" or after < 0:
            return "GET", f"{target}?after={after}" if after >= 0 else target, None, []
        headers = [("Last-Event-ID", f"{ledger.stream}:{after}")]
        if visit.means == "post":
            return "POST", PATHS["chat"], chat("whatever", stream=True), headers
        if visit.means == "generate":
            return "GET", "/v1/generate?prompt=whatever", None, headers
        return "GET", target, None, headers

    def _repost(self, ledger: Ledger, visit: Visit) -> None:
        """The same request under the same Idempotency-Key."""
        whole = self._story.first.door == "whole"
        method, target, body = request(self._story.ask, stream=not whole)
        accept = [] if whole else [("Accept", _media(self._story.first.door))]
        try:
            line = self._line(visit, method, target, body, [*accept, *self._name])
        except TimeoutError:
            return self._left_unanswered(visit)
        stream = line.header("x-stream-id")
        if stream is None and line.status == 410:  # its first events are no longer held
            self._finish(line)
            self._stage.not_resumed(ledger, 410, bytes(line.body))
            return None
        if stream is None:
            self._refused(line)
            return None
        if stream != ledger.stream:  # the key lives as long as the log
            assert time.monotonic() - ledger.asked_at >= self._stage.plan.setting.resume_ttl_s, "begun twice"
            ledger = self._stage.ledger(stream, self._story.ask, self._asked_at)
        if whole:
            self._whole(line)
        else:
            self._read(ledger, visit, line, _feed(self._story.first.door, ledger, -1))
        return None

    # Reading

    def _line(self, visit: Visit, method: str, target: str, body: Any, headers: list[Header]) -> Line:
        kind = Http2Line if visit.door.startswith("h2-") else Http1Line
        every = [*headers, *self._stage.headers]
        return kind(self._server, method, target, body, every, small=visit.small, patience_s=visit.patience_s)

    def _read(self, ledger: Ledger, visit: Visit, line: Line, feed: Feed) -> None:
        with ledger.attend() as attendance:
            wanted = visit.read
            stalled = half_closed = False
            while True:
                if not self._read_some(ledger, visit, line, feed, wanted, attendance):
                    break
                if visit.stall_s and not stalled:
                    stalled = True
                    self._stage.count("stalls")
                    attendance.unsure()
                    pause(visit.stall_s)
                if visit.leave == "half" and not half_closed:
                    half_closed = True
                    self._stage.count("half-closed")
                    attendance.unsure()
                    line.end_sending()
                elif visit.leave not in ("on", "half"):
                    break
                wanted = TO_THE_END
            self._end(ledger, visit, line, feed, Cut(visit.door, line.end, stalled or visit.small, half_closed))

    def _read_some(
        self, ledger: Ledger, visit: Visit, line: Line, feed: Feed, wanted: int, attendance: Attendance
    ) -> bool:
        """Read so many events. False when there is no more to read, or the reader has lost its patience."""
        while True:
            if len(line.body) > line.fed:
                data, line.fed = bytes(line.body[line.fed :]), len(line.body)
                feed.take(data)
            self._cancel_if_due(ledger, feed.count)
            if line.end != "open":
                return False
            if 0 <= wanted <= feed.count:
                return True
            known_alive = time.monotonic()
            try:
                line.more()
            except TimeoutError:
                assert visit.patience_s < SILENCE_S, f"{visit.door} hangs after {feed.count} events: {self._story}"
                return False
            except ConnectionError:
                return False
            if line.end in ("cut", "reset"):
                attendance.sure_until = attendance.sure_until or known_alive

    def _end(self, ledger: Ledger, visit: Visit, line: Line, feed: Feed, cut: Cut) -> None:
        if line.end == "open":
            if visit.leave == "stay":
                self._stage.count("never read again")
                self._stage.stay(lambda: line.leave(reset=False))
            else:
                self._stage.count(f"left by {visit.leave}")
                line.leave(reset=visit.leave == "reset")
            return
        line.leave(reset=False)
        if line.end != "whole":
            self._stage.count("cut by the server")
            ledger.cuts.append(cut)
        elif visit.door.endswith("plain"):
            ledger.plain_whole = True
        elif not line.body and visit.means == "post":
            assert ledger.ended or visit.beyond, "an empty answer before the end"
        else:
            assert feed.whole, f"a whole body of {visit.door} without its last event: {bytes(line.body[-300:])!r}"

    def _poll(self, ledger: Ledger, visit: Visit, after: int) -> None:
        read = 0
        while True:
            target = f"/v1/streams/{ledger.stream}?wait={POLL_S}" + (f"&after={after}" if after >= 0 else "")
            answer = self._server.ask("GET", target, None, [("Accept", "application/json"), *self._stage.headers])
            if answer.status == 200:
                ledger.attended.append((time.monotonic(), time.monotonic()))  # its lease begins anew
            if answer.status == 400 and visit.beyond:
                return
            if answer.status != 200:
                self._stage.not_resumed(ledger, answer.status, bytes(answer.body))
                return
            if visit.beyond:
                assert answer.json()["outcome"] is not None
                return
            document = lines.polled(ledger, bytes(answer.body), after)
            after, read = document.next - 1, read + len(document.events)
            self._cancel_if_due(ledger, read)
            if document.outcome is not None or (0 <= visit.read <= read):
                return

    # Cancelling

    def _arm_cancel(self, ledger: Ledger) -> None:
        cancel = self._story.cancel
        if cancel is not None and cancel.events is None:
            self._stage.play(f"cancel {self._story}", self._cancel_later, ledger, cancel.after_s)

    def _cancel_later(self, ledger: Ledger, seconds: float) -> None:
        pause(seconds)
        if self._cancel_due(None):
            self._delete(ledger)

    def _cancel_due(self, count: int | None) -> bool:
        """Whether it is time to cancel, which is so once."""
        cancel = self._story.cancel
        if cancel is None or (count is not None and (cancel.events is None or count < cancel.events)):
            return False
        with self._cancel_lock:
            due, self._cancel_sent = not self._cancel_sent, True
            return due

    def _cancel_if_due(self, ledger: Ledger, count: int) -> None:
        if self._cancel_due(count):
            self._delete(ledger)

    def _delete(self, ledger: Ledger) -> None:
        ledger.cancelled = True
        self._stage.count("cancelled")
        with contextlib.ExitStack() as stack:
            if self._stage.drained:
                stack.enter_context(contextlib.suppress(ConnectionRefusedError))
            answer = self._server.ask("DELETE", f"/v1/streams/{ledger.stream}", None, self._stage.headers)
            if answer.status == 200:
                ledger.told(answer.json()["outcome"])
            else:
                self._stage.not_resumed(ledger, answer.status, bytes(answer.body))


def request(ask: Ask, *, stream: bool) -> tuple[str, str, Any]:
    """Method, target and body."""
    fields: dict[str, Any] = {"temperature": ask.temperature}
    fields["max_output_tokens" if ask.api == "responses" else "max_tokens"] = ask.max_tokens
    if ask.n > 1:
        fields["n"] = ask.n
    if ask.seed is not None:
        fields["seed"] = ask.seed
    if ask.stop is not None and ask.api == "messages":
        fields["stop_sequences"] = [ask.stop]
    elif ask.stop is not None:
        fields["stop"] = ask.stop
    if ask.api == "generate":
        return "GET", "/v1/generate?" + urlencode({"prompt": ask.prompt, **fields}), None
    if ask.logprobs:
        fields |= {"logprobs": True, "top_logprobs": 1}
    if stream:
        fields["stream"] = True
        if ask.usage and ask.api in ("chat", "completions"):
            fields["stream_options"] = {"include_usage": True}
    if ask.api == "completions":
        return "POST", PATHS["completions"], {"prompt": ask.prompt, **fields}
    if ask.api == "responses":
        return "POST", PATHS["responses"], {"input": ask.prompt, "store": ask.usage, **fields}
    body = chat(ask.prompt, **fields)
    return "POST", PATHS[ask.api], body if ask.api == "chat" else {"model": "synthetic", **body}


def worst_of(reasons: list[str]) -> str:
    """The outcome of choices that ended well."""
    return "length" if "length" in reasons else "stop"


def _media(door: str) -> str:
    return MEDIA[door.removeprefix("h2-")]


def _feed(door: str, ledger: Ledger, after: int) -> Feed:
    kind = door.removeprefix("h2-")
    if kind == "plain":
        return PlainFeed(ledger, max(after, 0))
    return SseFeed(ledger, after) if kind == "sse" else NdjsonFeed(ledger, after)
