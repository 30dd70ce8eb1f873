"""The table under every order of events: streams, readers, keys, logs and deaths, and sums that agree after each."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.wire import End
from server.gateway.limits import unused_tokens
from server.outcome import Outcome
from server.stream import Stream
from server.table import Busy
from tests.support.tables import Client, Rig, StandingBucket


class TableMachine(RuleBasedStateMachine):
    """Streams start, run, stall, leave, return, end, expire; the engine dies and returns. The sums must agree."""

    @initialize(
        window=st.integers(2, 8),
        ttl=st.sampled_from([0.0, 5.0, 30.0]),
        wait=st.sampled_from([0.0, 10.0]),
        log_bytes=st.sampled_from([500, 5000, 10**6]),
    )
    def begin(self, window: int, ttl: float, wait: float, log_bytes: int) -> None:
        self.rig = Rig(
            keys={"alice": 3, "bob": None},
            credit_window=window,
            resume_ttl_s=ttl,
            engine_restart_wait_s=wait,
            log_bytes=log_bytes,
            streams_max=6,
            queue_max=4,
            queue_timeout_s=20,
            request_timeout_s=60,
        )
        self.buckets = {name: StandingBucket(10**9, 0.0) for name in ("alice", "bob")}
        for name, bucket in self.buckets.items():
            self.rig.limiter._account(name).tokens = bucket
        self.clients: list[Client] = []
        self.streams: list[Stream] = []

    def _stream(self, data: st.DataObject) -> Stream | None:
        return data.draw(st.sampled_from(self.streams)) if self.streams else None

    def _client(self, data: st.DataObject) -> Client | None:
        return data.draw(st.sampled_from(self.clients)) if self.clients else None

    @rule(n=st.integers(1, 3), key=st.sampled_from(["alice", "bob"]), stops=st.sampled_from([(), ("b",), ("ab", "c")]))
    def start(self, n: int, key: str, stops: tuple[str, ...]) -> None:
        try:
            client = self.rig.open(n=n, key=key, stops=stops)
        except Busy:
            return
        self.clients.append(client)
        self.streams.append(client.stream)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        if stream := self._stream(data):
            self.rig.admit(stream, cached=1)

    @rule(text=st.text("abc", min_size=1, max_size=4))
    def steps(self, text: str) -> None:
        for char in text:
            self.rig.table.on_step(self.rig.engine.tokens([(id_, ord(char)) for id_ in self.rig.engine.runnable]))

    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "error"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        if runnable := self.rig.engine.runnable:
            id_ = data.draw(st.sampled_from(runnable))
            tokens = [] if reason == "error" else [(id_, ord("x"))]
            self.rig.table.on_step(self.rig.engine.tokens(tokens, End(id_, reason)))

    @rule(data=st.data(), goes_on=st.booleans())
    def stall_or_go_on(self, data: st.DataObject, goes_on: bool) -> None:
        if client := self._client(data):
            if goes_on and client.reader in client.stream.readers:
                client.go_on()
            elif not goes_on:
                client.stall()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if client := self._client(data):
            client.leave()

    @rule(data=st.data())
    def come_back_to(self, data: st.DataObject) -> None:
        client = self._client(data)
        if client is None or self.rig.table.find(client.stream.id, client.stream.key) is None:
            return
        try:
            self.rig.table.retake_slot(client.stream)
        except Busy:
            return
        self.clients.append(Client(client.stream, cursor=client.reader.cursor))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if stream := self._stream(data):
            stream.finish(Outcome("cancelled", "asked for"))

    @rule(seconds=st.sampled_from([0.5, 4.0, 15.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule()
    def engine_dies_or_returns(self) -> None:
        if self.rig.engine.hello is None:
            self.rig.regain_engine()
        else:
            self.rig.lose_engine()

    @invariant()
    def started_is_the_sum_of_ended_and_live(self) -> None:
        if not hasattr(self, "rig"):
            return
        metrics, table = self.rig.metrics, self.rig.table
        live = list(table.live)
        assert sum(metrics.started.values()) == len(self.streams) == sum(metrics.ended.values()) + len(live)
        assert set(live) == {stream for stream in self.streams if stream.outcome is None}
        assert Counter(self.rig.access) == Counter(stream for stream in self.streams if stream.outcome)
        assert not self.rig.faults

    @invariant()
    def slots_belong_to_live_streams_with_readers(self) -> None:
        if hasattr(self, "rig"):
            holding = Counter(s.key for s in self.rig.table.live if s.readers)
            assert holding == {name: n for name in self.buckets if (n := self.rig.limiter.streams(name))}

    @invariant()
    def the_engine_has_what_is_live_and_nothing_else(self) -> None:
        if not hasattr(self, "rig"):
            return
        table, engine = self.rig.table, self.rig.engine
        wanted = {c.sequence_id for s in table.live for c in s.live} if engine.hello else set()
        assert set(engine.live) == wanted == set(table._choices)
        queued = [c for c in table._choices.values() if not c.admitted]
        assert table._queued == len(queued)
        assert table._queued_of == Counter(choice.stream.key for choice in queued)

    @invariant()
    def buckets_lack_what_was_made_and_the_prompts_that_were_used(self) -> None:
        if not hasattr(self, "rig"):
            return
        for name, bucket in self.buckets.items():
            account = self.rig.limiter._account(name)
            account.settled_at = -math.inf
            account.settle(self.rig.clock())
            streams = [stream for stream in self.streams if stream.key == name]
            used = sum(stream.completion_tokens + stream.prompt_tokens for stream in streams)
            used -= sum(unused_tokens(stream) for stream in streams if stream.outcome)
            assert bucket.level == bucket.per_minute - used
            assert set(account.charged) == {s for s in streams if not s.outcome}

    @invariant()
    def credit_is_within_a_window_of_the_furthest_reader(self) -> None:
        if not hasattr(self, "rig"):
            return
        for stream in self.rig.table.live:
            for choice in stream.live:
                assert choice.credit <= len(choice.generated) + self.rig.limits.credit_window
                if not stream.readers:
                    assert choice.credit == 0

    @invariant()
    def the_logs_book_is_right(self) -> None:
        if not hasattr(self, "rig"):
            return
        table = self.rig.table
        held = [s for s in self.streams if table.find(s.id, s.key) is not None]
        assert table.logs.bytes == sum(stream.log.size for stream in held)
        assert table.logs.bytes <= self.rig.limits.log_bytes or not table._finished

    @invariant()
    def every_client_has_an_unbroken_part_of_its_stream(self) -> None:
        if not hasattr(self, "rig"):
            return
        for client in self.clients:
            assert client.channel.finished + client.channel.cuts <= 1
            if client.channel.finished and client.start < client.stream.log.end:
                assert client.events[-1] == {"done": True}
                assert client.stream.outcome is not None

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.clock.advance(1000)
        self.started_is_the_sum_of_ended_and_live()
        self.slots_belong_to_live_streams_with_readers()
        assert not list(self.rig.table.live)
        assert (self.rig.clock.pending, self.rig.table.logs.bytes) == (0, 0)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
