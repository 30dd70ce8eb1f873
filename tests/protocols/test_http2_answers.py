"""protocols.http2_answers: hpack's decoder reads the very fields, whatever came before and whatever table it allows."""

from __future__ import annotations

from hpack import Decoder
from hpack.struct import NeverIndexedHeaderTuple
from hpack.table import table_entry_size
from hypothesis import given
from hypothesis import strategies as st

from protocols.http2_answers import NEVER_INDEXED, TABLE_BYTES, AnswerEncoder

HEAD = [
    (b":status", b"200"),
    (b"date", b"Mon, 30 Nov 2026 20:00:00 GMT"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-stream-id", b"OeWQ9pDDdLOWF-ZGkXVnQhLp"),
    (b"x-ratelimit-remaining-requests", b"59"),
]
NAMES = st.sampled_from(
    [b":status", b"date", b"content-type", b"vary", b"x-stream-id", b"x-ratelimit-limit-tokens", b"x-" + b"long-" * 60]
)
VALUES = st.one_of(
    st.sampled_from([b"", b"200", b"404", b"299", b"text/plain", b"Origin"]),
    st.binary(max_size=40),
    st.integers(120, 400).map(lambda size: b"v" * size),
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=12)
# A head, or what the client allows the table from now on.
STEPS = st.lists(st.one_of(FIELDS, st.sampled_from([0, 1, 40, 100, 1000, 2048, 4096])), max_size=20)


def table_bytes(decoder: Decoder) -> int:
    return sum(table_entry_size(n, v) for n, v in decoder.header_table.dynamic_entries)


@given(STEPS)
def test_what_is_read_is_what_was_given(steps: list[list[tuple[bytes, bytes]] | int]) -> None:
    encoder, decoder = AnswerEncoder(), Decoder()
    for step in steps:
        if isinstance(step, int):
            encoder.header_table_size = step
            decoder.max_allowed_table_size = step
            continue
        read = decoder.decode(encoder.encode(step), raw=True)
        assert [(bytes(name), bytes(value)) for name, value in read] == step
        for field in read:
            assert isinstance(field, NeverIndexedHeaderTuple) == (field[0] in NEVER_INDEXED)
        assert table_bytes(decoder) <= min(TABLE_BYTES, decoder.max_allowed_table_size)


def test_what_comes_again_is_an_octet_and_what_changes_takes_no_room() -> None:
    encoder, decoder = AnswerEncoder(), Decoder()
    sizes = []
    for number in range(1000):
        changed = dict(HEAD) | {b"date": b"%029d" % number, b"x-stream-id": b"%024d" % number}
        block = encoder.encode(changed.items())
        assert dict(decoder.decode(block, raw=True)) == changed
        sizes.append(len(block))
    assert set(sizes[1:]) == {sizes[-1]}
    assert sizes[-1] < sizes[0] < sum(len(name) + len(value) for name, value in HEAD)
    assert len(decoder.header_table.dynamic_entries) == 2


def test_a_full_table_keeps_what_it_has() -> None:
    encoder, decoder = AnswerEncoder(), Decoder()
    for number in range(200):
        fields = [(b"x-other", b"%d" % number * 5), *HEAD]
        assert [tuple(field) for field in decoder.decode(encoder.encode(fields), raw=True)] == fields
    assert table_bytes(decoder) <= TABLE_BYTES
    assert (b"cache-control", b"no-cache, no-transform") in decoder.header_table.dynamic_entries


def test_it_is_told_when_the_client_s_table_changes() -> None:
    encoder = AnswerEncoder()
    encoder.encode(HEAD)
    encoder.header_table_size = 4096
    assert encoder.header_table_size == 4096
    assert encoder.encode([(b":status", b"200")]) == b"\x20\x3f\xe1\x1f\x88"
    encoder.header_table_size = 0
    assert encoder.encode([(b":status", b"200")]) == b"\x20\x88"
    assert encoder.encode([(b":status", b"200")]) == b"\x88"
