"""Frames between the processes: round trips, any split, and what is no message."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import (
    FRAME_BYTES_MAX,
    Admitted,
    Cancel,
    Credit,
    End,
    FrameReader,
    Gauges,
    Hello,
    Logprob,
    PromptLogprobs,
    Sampling,
    Stats,
    Step,
    Submit,
    TokenizerSpec,
    ToServer,
    WireError,
    encode,
)

U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**64 - 1)
NUMBER = st.floats(allow_nan=False)
IDS = st.lists(st.integers(0, 2**31), max_size=6)
SAMPLING = st.builds(
    Sampling,
    max_tokens=I64,
    temperature=NUMBER,
    top_k=I64,
    top_p=NUMBER,
    min_p=NUMBER,
    seed=U64,
    prompt_index=U64,
    choice_index=U64,
    min_tokens=I64,
    ignore_eos=st.booleans(),
    stop_ids=st.tuples(I64, I64),
    logprobs=I64,
    frequency_penalty=NUMBER,
    presence_penalty=NUMBER,
    repetition_penalty=NUMBER,
    prompt_logprobs=I64,
    logit_bias=st.lists(st.tuples(I64, NUMBER), max_size=3).map(tuple),
)
TO_ENGINE = st.one_of(
    st.builds(
        Submit,
        id=I64,
        prompt=IDS,
        sampling=SAMPLING,
        credit=I64,
        generated=IDS,
        salt=st.text(max_size=5),
        priority=st.one_of(I64, U64),
    ),
    st.builds(Credit, totals=st.lists(st.tuples(I64, I64), max_size=4)),
    st.builds(Cancel, ids=st.lists(I64, max_size=4)),
    st.just(Stats()),
)
SPEC = st.builds(
    TokenizerSpec,
    json=st.text(max_size=5),
    token_bytes=st.lists(st.binary(max_size=4), max_size=4),
    special_ids=IDS,
    bos_id=st.integers(-1, 5),
    chat_template=st.text(max_size=5),
)
LOGPROBS = st.lists(
    st.builds(Logprob, index=I64, logprob=NUMBER, top_ids=IDS, top_logprobs=st.lists(NUMBER, max_size=3)), max_size=3
)
TO_SERVER = st.one_of(
    st.builds(
        Hello,
        wire_version=I64,
        engine_version=st.text(max_size=5),
        model=st.text(max_size=5),
        tokenizer=SPEC,
        tokenizer_hash=st.text(max_size=5),
        vocab_size=I64,
        eos_ids=IDS,
        context_tokens_max=I64,
        pool_tokens=I64,
        running_max=I64,
    ),
    st.builds(
        Step,
        ids=IDS,
        tokens=IDS,
        admitted=st.lists(st.builds(Admitted, id=I64, cached_tokens=I64), max_size=3),
        ends=st.lists(st.builds(End, id=I64, reason=st.text(max_size=5), by_token=st.booleans()), max_size=3),
        logprobs=LOGPROBS,
        gauges=st.builds(Gauges, waiting=I64, steps=I64),
        prompt_logprobs=st.lists(st.builds(PromptLogprobs, id=I64, logprobs=LOGPROBS), max_size=2),
    ),
)


def read(data: bytes, *, engine_side: bool = True, cuts: list[int] | None = None) -> list[object]:
    reader = FrameReader(engine_side=engine_side)
    edges = [0, *sorted(cuts or []), len(data)]
    return [message for a, b in itertools.pairwise(edges) for message in reader.feed(data[a:b])]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@settings(deadline=None)
@given(st.lists(TO_ENGINE, max_size=4), st.data())
def test_what_a_server_sends_comes_back_however_it_is_split(messages: list[object], data: st.DataObject) -> None:
    frames = b"".join(encode(message) for message in messages)  # type: ignore[arg-type]
    cuts = data.draw(st.lists(st.integers(0, len(frames)), max_size=8))
    assert read(frames, cuts=cuts) == messages


@settings(deadline=None)
@given(st.lists(TO_SERVER, max_size=3), st.data())
def test_what_an_engine_sends_comes_back_however_it_is_split(messages: list[ToServer], data: st.DataObject) -> None:
    frames = b"".join(encode(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(frames)), max_size=8))
    assert read(frames, engine_side=False, cuts=cuts) == messages


def test_one_byte_at_a_time() -> None:
    frames = encode(Stats()) + encode(Cancel([1, 2]))
    assert read(frames, cuts=list(range(1, len(frames)))) == [Stats(), Cancel([1, 2])]


def test_a_frame_above_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(WireError, match="over the limit"):
        read((FRAME_BYTES_MAX + 1).to_bytes(4, "big"))


def test_messages_before_a_bad_one_are_still_read() -> None:
    reader = FrameReader(engine_side=True)
    messages = reader.feed(encode(Stats()) + framed(b"\xc1"))
    assert next(messages) == Stats()
    with pytest.raises(WireError, match="wire version"):
        next(messages)


NESTED = 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["nothing", 1]),
        msgspec.msgpack.encode({"id": 1}),
        msgspec.msgpack.encode(["submit", 1]),
        msgspec.msgpack.encode(["submit", 1, ["a"], [1], 1]),
        msgspec.msgpack.encode(["submit", 1.5, [1], [1], 1]),
        msgspec.msgpack.encode(["submit", 1, [1], [1], 1, [], b"\xff"]),
        msgspec.msgpack.encode(["credit", [[1]]]),
        msgspec.msgpack.encode(["cancel", [None]]),
        msgspec.msgpack.encode(["stats"])[:-1],
        msgspec.msgpack.encode(["stats"]) + b"\x00",
        b"\x92\xa5stats" + b"\x91" * NESTED + b"\xc0",
        b"\x95\xa6submit\x01" + b"\x91" * NESTED + b"\xc0",
    ],
)
def test_what_is_no_message_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError, match="not a message"):
        read(framed(body))


def test_each_side_understands_only_what_the_other_may_say() -> None:
    step = Step([], [], [], [], [], Gauges())
    with pytest.raises(WireError):
        read(encode(step), engine_side=True)
    with pytest.raises(WireError):
        read(encode(Stats()), engine_side=False)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_either_incomplete_or_a_wire_error(body: bytes) -> None:
    try:
        messages = read(framed(body))
    except WireError:
        return
    assert all(isinstance(message, Submit | Credit | Cancel | Stats) for message in messages)
