"""Rates and slots: the exact count under a burst, what is given back, what is told; and that keys stay apart."""

from __future__ import annotations

from typing import Any

import pytest

from server.gateway.keys import Key, Keys
from server.gateway.limits import SETTLE_S, Bucket, Limiter, Rates, duration
from server.outcome import Outcome
from server.table import Busy
from tests.support.clock import Clock
from tests.support.tables import Rig, StandingBucket

PROMPT = 3  # tokens of a Rig's prompt


def limiter(clock: Clock, *, model: str = "", **fields: Any) -> Limiter:
    """For alice, with these fields of her key, and bob, who has none."""
    keys = Keys([Key("alice", b"a", **fields), Key("bob", b"b")])
    return Limiter(keys, Rates(), clock, model=model)


def refused(limits: Limiter, key: str = "alice", tokens: int = 1) -> Busy | None:
    try:
        limits.start(key, tokens)
    except Busy as busy:
        return busy
    return None


def refused_rig(rig: Rig, key: str) -> Busy | None:
    submitted = len(rig.engine.submitted)
    try:
        rig.start(key=key)
    except Busy as busy:
        assert len(rig.engine.submitted) == submitted, "what is over a limit reaches no engine"
        return busy
    return None


class TestBucket:
    def test_it_begins_full_fills_evenly_and_never_over(self) -> None:
        bucket = Bucket(60, 100.0)
        bucket.take(60)
        bucket.fill(110.0)
        assert bucket.level == 10
        assert bucket.wait_s(10) == 0
        assert bucket.wait_s(15) == 5
        bucket.fill(1000.0)
        assert bucket.level == 60

    def test_a_debt_is_paid_back_whole(self) -> None:
        bucket = Bucket(60, 0.0)
        bucket.take(10_000)
        assert bucket.level == -9_940
        assert bucket.wait_s(60) == 10_000

    def test_what_is_given_back_does_not_overflow(self) -> None:
        bucket = Bucket(60, 0.0)
        bucket.take(-5)
        assert bucket.level == 60


class TestRequests:
    def test_a_burst_gets_the_exact_count(self) -> None:
        limits = limiter(Clock(), requests_per_minute=10)
        answers = [refused(limits) for _ in range(1000)]
        assert answers.count(None) == 10
        assert {busy.status for busy in answers if busy} == {429}
        assert str(answers[-1]) == "this key's limit of requests a minute (10) is reached"

    def test_waiting_as_long_as_was_told_is_enough_whatever_the_rate(self) -> None:
        for rate in (1, 7, 59, 61, 1000):
            clock = Clock()
            limits = limiter(clock, requests_per_minute=rate)
            for _ in range(rate):
                assert refused(limits) is None
            for _ in range(20):
                busy = refused(limits)
                while busy is None:  # a whole second is more than some need
                    busy = refused(limits)
                assert 1 <= busy.retry_after_s <= 120
                clock.advance(busy.retry_after_s)
                assert refused(limits) is None

    def test_over_any_time_no_more_start_than_the_rate_and_one_burst(self) -> None:
        clock = Clock()
        limits = limiter(clock, requests_per_minute=30)
        started = 0
        for _ in range(6000):
            started += refused(limits) is None
            clock.advance(0.1)
        assert 30 + 299 <= started <= 30 + 300

    def test_one_keys_burst_takes_nothing_from_another(self) -> None:
        keys = Keys([Key("alice", b"a"), Key("bob", b"b")])
        limits = Limiter(keys, Rates(requests_per_minute=5), Clock())
        while refused(limits, "alice") is None:
            pass
        assert [refused(limits, "bob") is None for _ in range(6)] == [True] * 5 + [False]

    def test_a_keys_own_rate_is_before_the_default_and_0_is_none(self) -> None:
        keys = Keys([Key("own", b"a", requests_per_minute=2), Key("none", b"b", requests_per_minute=0)])
        limits = Limiter(keys, Rates(requests_per_minute=5), Clock())
        assert sum(refused(limits, "own") is None for _ in range(9)) == 2
        assert sum(refused(limits, "none") is None for _ in range(900)) == 900


class TestTokens:
    def test_prompts_are_taken_at_the_start_both_or_neither(self) -> None:
        limits = limiter(Clock(), tokens_per_minute=100, requests_per_minute=3)
        assert refused(limits, tokens=90) is None
        busy = refused(limits, tokens=11)
        assert busy and busy.status == 429 and "tokens a minute (100)" in str(busy)
        assert busy.retry_after_s == 1
        assert refused(limits, tokens=10) is None  # the refused one took nothing of either
        assert dict(limits.headers("alice"))[b"x-ratelimit-remaining-requests"] == b"1"

    def test_a_prompt_that_never_fits_is_no_matter_of_waiting(self) -> None:
        busy = refused(limiter(Clock(), tokens_per_minute=100), tokens=101)
        assert busy and (busy.status, busy.retry_after_s, busy.code) == (400, 0, "prompt_over_rate_limit")

    def test_the_longer_of_two_waits_is_told(self) -> None:
        clock = Clock()
        limits = limiter(clock, tokens_per_minute=60, requests_per_minute=30)
        for _ in range(30):
            assert refused(limits, tokens=2) is None
        busy = refused(limits, tokens=50)
        assert busy and busy.retry_after_s == 50
        clock.advance(50)
        assert refused(limits, tokens=50) is None

    def test_generated_tokens_are_charged_as_they_are_made(self) -> None:
        rig = Rig(keys={"alice": None}, rates=Rates(tokens_per_minute=60))
        client = rig.open(key="alice")
        rig.admit(client.stream)
        rig.play(client.stream, "x" * 50)
        rig.clock.advance(SETTLE_S)
        remaining = dict(rig.limiter.headers("alice"))[b"x-ratelimit-remaining-tokens"]
        assert int(remaining) == 60 - PROMPT - 50
        rig.play(client.stream, "x" * 20)
        rig.clock.advance(SETTLE_S)
        busy = refused_rig(rig, "alice")
        assert busy and busy.status == 429
        rig.clock.advance(busy.retry_after_s)
        assert refused_rig(rig, "alice") is None

    def test_over_any_time_long_answers_get_no_more_than_the_rate(self) -> None:
        """Each answer is eight minutes' worth; the client comes back as soon as it is told to."""
        rig = Rig(keys={"alice": None}, rates=Rates(tokens_per_minute=100))
        begun, answers = rig.clock(), 10
        for _ in range(answers):
            client = rig.open(key="alice")
            rig.admit(client.stream)
            rig.play(client.stream, "x" * 800)
            client.stream.finish(Outcome("cancelled"))
            busy = refused_rig(rig, "alice")
            assert busy and busy.status == 429
            rig.clock.advance(busy.retry_after_s)
        minutes = (rig.clock() - begun) / 60
        assert answers * (800 + PROMPT) - 100 <= 100 * minutes <= answers * (801 + PROMPT)

    def test_what_a_burst_made_is_counted_at_its_end_to_the_token(self) -> None:
        rig = Rig(keys={"alice": None}, rates=Rates(tokens_per_minute=1000))
        for _ in range(5):
            client = rig.open(key="alice")
            rig.admit(client.stream)
            rig.play(client.stream, "x" * 7)
            client.stream.finish(Outcome("cancelled"))
        remaining = dict(rig.limiter.headers("alice"))[b"x-ratelimit-remaining-tokens"]
        assert int(remaining) == 1000 - 5 * (PROMPT + 7)

    @pytest.mark.parametrize("prompts", [1, 3])
    def test_prompts_that_no_engine_took_up_are_given_back(self, prompts: int) -> None:
        rig = Rig(keys={"alice": None}, rates=Rates(tokens_per_minute=1000))
        client = rig.open(key="alice", n=2, prompts=prompts)
        headers = dict(rig.limiter.headers("alice"))
        assert int(headers[b"x-ratelimit-remaining-tokens"]) == 1000 - PROMPT * prompts
        rig.table.on_step(rig.engine.admit(client.stream.choices[1].sequence_id))  # of the first prompt
        client.stream.finish(Outcome("expired"))
        headers = dict(rig.limiter.headers("alice"))
        assert int(headers[b"x-ratelimit-remaining-tokens"]) == 1000 - PROMPT


def test_a_thousand_streams_that_end_in_every_way_leave_every_slot_and_bucket_right() -> None:
    rig = Rig(
        keys={"alice": 3, "bob": None},
        rates=Rates(requests_per_minute=2000, tokens_per_minute=10**6),
        resume_ttl_s=5,
        queue_timeout_s=60,
        engine_restart_wait_s=0,
    )
    account = rig.limiter._account("alice")
    tokens = account.tokens = StandingBucket(10**6, 0.0)
    requests = account.requests = StandingBucket(2000, 0.0)
    spent = 0
    for turn in range(1000):
        client = rig.open(key="alice")
        assert rig.limiter.streams("alice") == 1
        made = turn % 4
        if made:
            rig.admit(client.stream)
            rig.play(client.stream, "abcd"[:made])
            spent += PROMPT + made
        way = turn % 5
        if way == 0:
            client.stream.finish(Outcome("cancelled"))
        elif way == 1:
            rig.end(client.stream, "error", message="played")
        elif way == 2:
            client.leave()
            assert rig.limiter.streams("alice") == 0
            rig.clock.advance(5)
        elif way == 3:
            rig.lose_engine()
            rig.engine.revive()
        else:
            rig.clock.advance(60)
            if made:
                rig.end(client.stream, "length")
        assert client.stream.outcome is not None
        assert rig.limiter.streams("alice") == rig.limiter.streams("bob") == 0
    assert not account.charged
    assert requests.level == 2000 - 1000
    assert tokens.level == 10**6 - spent


def test_slots_are_given_and_taken_one_by_one() -> None:
    limits = limiter(Clock(), streams_max=2)
    assert [refused(limits) is None for _ in range(3)] == [True, True, False]
    limits.leave("alice")
    limits.resume("alice")
    with pytest.raises(Busy, match="all in use"):
        limits.resume("alice")
    with pytest.raises(Busy, match="all in use"):
        limits.check("alice")
    limits.check("bob")


def test_check_knows_no_prompt_unless_it_is_told_of_one() -> None:
    limits = limiter(Clock(), tokens_per_minute=10)
    limits.start("alice", 10)
    limits.check("alice")
    with pytest.raises(Busy, match=r"tokens a minute \(10\)"):
        limits.check("alice", 1)


def test_check_takes_nothing() -> None:
    limits = limiter(Clock(), streams_max=1, requests_per_minute=1, tokens_per_minute=1)
    for _ in range(9):
        limits.check("alice", 1)
    assert refused(limits) is None


def test_a_slot_that_is_given_back_twice_is_a_mistake_at_once() -> None:
    limits = limiter(Clock())
    limits.start("alice", 1)
    limits.leave("alice")
    with pytest.raises(AssertionError, match="twice"):
        limits.leave("alice")


class TestKeysThatChange:
    def test_a_key_that_is_gone_starts_nothing_more(self) -> None:
        keys = Keys([Key("alice", b"a"), Key("bob", b"b")])
        limits = Limiter(keys, Rates(), Clock())
        limits.start("alice", 1)
        keys.replace([Key("bob", b"b")])
        limits.refresh()
        for refuse in (lambda: limits.start("alice", 1), lambda: limits.resume("alice"), lambda: limits.check("alice")):
            with pytest.raises(Busy) as busy:
                refuse()
            assert (busy.value.status, busy.value.code) == (401, "invalid_api_key")
        limits.leave("alice")  # the stream that it had goes on to its end
        assert limits.headers("alice") == ()

    def test_a_stream_that_nobody_reads_ends_though_its_key_is_gone(self) -> None:
        rig = Rig(keys={"alice": 1}, resume_ttl_s=30)
        client = rig.open(key="alice")
        client.leave()
        rig.keys.replace([])
        rig.limiter.refresh()
        rig.clock.advance(31)
        assert client.stream.outcome is not None
        assert rig.access == [client.stream]
        assert not list(rig.table.live)

    def test_new_limits_hold_at_once_and_what_was_used_stays_used(self) -> None:
        keys = Keys([Key("alice", b"a", requests_per_minute=10)])
        limits = Limiter(keys, Rates(), Clock())
        for _ in range(8):
            limits.start("alice", 1)
        keys.replace([Key("alice", b"a", requests_per_minute=12)])
        limits.refresh()
        assert sum(refused(limits) is None for _ in range(9)) == 4
        keys.replace([Key("alice", b"a", requests_per_minute=1)])
        limits.refresh()
        busy = refused(limits)
        assert busy and busy.retry_after_s == 60  # what was used fills in the time that it did before: no debt of 11
        keys.replace([Key("alice", b"a", streams_max=1)])
        limits.refresh()
        assert refused(limits)
        assert limits.headers("alice") == ()


def test_a_key_for_other_models_has_nothing_of_this_one() -> None:
    limits = limiter(Clock(), model="m", models=frozenset(["other"]))
    busy = refused(limits)
    assert busy and (busy.status, busy.code) == (403, "model_not_allowed")
    assert refused(limits, "bob") is None
    assert refused(limiter(Clock(), model="m", models=frozenset(["m"]))) is None


def test_one_key_can_not_fill_the_queue_that_others_need() -> None:
    rig = Rig(keys={"alice": None, "bob": None, "carol": None}, running_max=2, queue_max=98)
    held = dict.fromkeys(("alice", "bob", "carol"), 0)
    for key in held:
        while (busy := refused_rig(rig, key)) is None:
            held[key] += 1
        assert busy.status == 429
        assert busy.retry_after_s == 5
    assert list(held.values()) == [50, 25, 12]


def test_the_only_key_may_have_all_of_the_queue() -> None:
    rig = Rig(keys={"alice": None}, running_max=2, queue_max=8)
    for _ in range(10):
        rig.start(key="alice")
    with pytest.raises(Busy) as busy:
        rig.start(key="alice")
    assert busy.value.status == 503


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, b"0ms"),
        (0.0123, b"13ms"),
        (1, b"1s"),
        (1.41, b"1.5s"),
        (59.9, b"59.9s"),
        (59.99, b"1m0s"),
        (60, b"1m0s"),
        (119.2, b"2m0s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: bytes) -> None:
    assert duration(seconds) == text


def test_headers_tell_what_is_limited_and_only_that() -> None:
    clock = Clock()
    limits = limiter(clock, requests_per_minute=60)
    limits.start("alice", 5)
    assert limits.headers("alice") == (
        (b"x-ratelimit-limit-requests", b"60"),
        (b"x-ratelimit-remaining-requests", b"59"),
        (b"x-ratelimit-reset-requests", b"1s"),
    )
    assert limits.headers("bob") == ()
    assert limits.headers("nobody") == ()
