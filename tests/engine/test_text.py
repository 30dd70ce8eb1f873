"""engine.text: joined chunks equal the full decode, nothing is held that could be sent, stop strings never leak."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text import TextStream, _failure
from engine.tokenizer import Tokenizer
from tests.support.specs import bytes_spec, table_spec

BYTES = Tokenizer(bytes_spec(["<|im_end|>"]))

# The bytes at which UTF-8's rules change (Unicode 15, table 3-7).
EDGES = bytes.fromhex("00 20 41 7f 80 8f 90 9f a0 bf c0 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")

pieces = st.one_of(
    st.text(max_size=4).map(str.encode),
    st.binary(max_size=4),
    st.lists(st.sampled_from(EDGES), max_size=4).map(bytes),
    st.sampled_from([b" ", b"", b"\0", "😀".encode()[:2], "😀".encode()[2:], "é".encode()[1:], b"\xe2\x80"]),
)


def test_sequences_that_stop_at_the_same_texts_share_what_is_made_of_them() -> None:
    """A request may have a thousand, and a table of a long text takes a millisecond."""
    made = _failure.cache_info().misses
    for _ in range(100):
        TextStream(BYTES, stops=["aab" * 50, "ab"])
    assert _failure.cache_info().misses <= made + 2


@st.composite
def tokenizers_and_ids(draw: st.DrawFn) -> tuple[Tokenizer, list[int]]:
    table = draw(st.lists(pieces, min_size=1, max_size=12))
    # Control tokens have a literal text, which is always UTF-8.
    specials = draw(st.lists(st.text(min_size=1, max_size=4), max_size=3))
    special_ids = range(len(table), len(table) + len(specials))
    strip = draw(st.booleans())
    spec = table_spec([*table, *map(str.encode, specials)], special_ids, strip_leading_space=strip)
    ids = draw(st.lists(st.integers(0, len(spec.token_bytes) - 1), max_size=20))
    return Tokenizer(spec), ids


def sendable(data: bytes) -> str:
    """The text that is certain whatever comes next: a trailing part that some bytes could complete is not."""
    for cut in range(max(0, len(data) - 3), len(data)):
        tail = data[cut:]
        if completable(tail):
            return data[:cut].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


# What may follow in a character; the second byte's range depends on the first, so both ends of each range are here.
_COMPLETIONS = [
    bytes(rest) for size in (1, 2, 3) for rest in itertools.product([0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF], repeat=size)
]


@functools.cache
def completable(tail: bytes) -> bool:
    return any(_is_character(tail + rest) for rest in _COMPLETIONS)


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def run(stream: TextStream, ids: list[int] | bytes) -> list[str]:
    return [stream.push(i) for i in ids]


@given(tokenizers_and_ids(), st.booleans())
def test_joined_chunks_equal_the_full_decode(case: tuple[Tokenizer, list[int]], skip_special: bool) -> None:
    tokenizer, ids = case
    stream = TextStream(tokenizer, skip_special=skip_special)
    text = "".join(run(stream, ids)) + stream.flush()
    assert text == tokenizer.decode(ids, skip_special=skip_special)
    assert stream.flush() == ""


@given(tokenizers_and_ids(), st.booleans())
def test_each_chunk_is_the_longest_that_can_be_sent(case: tuple[Tokenizer, list[int]], skip_special: bool) -> None:
    tokenizer, ids = case
    raw = tokenizer.pieces(skip_special=skip_special).raw
    stream = TextStream(tokenizer, skip_special=skip_special)
    sent = ""
    for count, token in enumerate(ids, start=1):
        sent += stream.push(token)
        data = b"".join(raw[i] for i in ids[:count])
        if tokenizer.spec.strip_leading_space:
            data = data.removeprefix(b" ")
        assert sent == sendable(data)


def test_every_split_of_edge_bytes_decodes_like_the_whole() -> None:
    for data in itertools.product(EDGES, repeat=3):
        stream = TextStream(BYTES)
        text = ""
        for count, byte in enumerate(data, start=1):
            text += stream.push(byte)
            assert text == sendable(bytes(data[:count]))
        assert text + stream.flush() == bytes(data).decode("utf-8", "replace")


def test_an_emoji_waits_for_its_last_byte() -> None:  # case D08
    stream = TextStream(BYTES)
    assert run(stream, "a😀b".encode()) == ["a", "", "", "", "😀", "b"]


def test_a_joined_family_arrives_person_by_person() -> None:  # case D08
    stream = TextStream(BYTES)
    assert [chunk for chunk in run(stream, "👩‍👧".encode()) if chunk] == ["👩", "\u200d", "👧"]


def test_a_truncated_character_is_one_replacement_at_the_end() -> None:  # case D08
    stream = TextStream(BYTES)
    assert run(stream, "😀".encode()[:3]) == ["", "", ""]
    assert stream.flush() == "\ufffd"


def test_a_skipped_special_inside_a_character_does_not_break_it() -> None:
    head, tail = "é".encode()
    stream = TextStream(BYTES)
    assert run(stream, [head, 256, tail]) == ["", "", "é"]


def test_specials_are_shown_when_asked_for() -> None:  # case D21
    assert run(TextStream(BYTES, skip_special=False), [65, 256, 66]) == ["A", "<|im_end|>", "B"]
    assert run(TextStream(BYTES), [65, 256, 66]) == ["A", "", "B"]


def test_control_characters_are_text() -> None:
    assert run(TextStream(BYTES), b"\0\x1b\x7f") == ["\0", "\x1b", "\x7f"]


def test_one_leading_space_is_stripped_once() -> None:
    tokenizer = Tokenizer(table_spec([b" Hello", b" ", b"", b"<s>"], [3], strip_leading_space=True))
    assert run(TextStream(tokenizer), [3, 2, 0, 0]) == ["", "", "Hello", " Hello"]
    assert run(TextStream(tokenizer), [1, 0]) == ["", " Hello"]
    assert run(TextStream(tokenizer, skip_special=False), [3, 0]) == ["<s>", " Hello"]


def test_an_id_beyond_the_vocabulary_is_no_text() -> None:
    stream = TextStream(BYTES)
    assert run(stream, [0xC3, 100_000, 0xA9]) == ["", "", "é"]
    assert BYTES.decode([65, 100_000, 66]) == "AB"


def scripted(*parts: str) -> tuple[Tokenizer, range]:
    tokenizer = Tokenizer(table_spec([part.encode() for part in parts]))
    return tokenizer, range(len(parts))


def test_a_stop_across_tokens_never_leaks_its_start() -> None:  # case D05
    tokenizer, ids = scripted("ABC", "DEF", "G", "HI", "J")
    stream = TextStream(tokenizer, stops=["DEFGHIJ"])
    assert run(stream, list(ids)) == ["ABC", "", "", "", ""]
    assert stream.stopped and stream.matched == "DEFGHIJ"
    assert stream.push(0) == "" and stream.flush() == ""


def test_a_failed_start_is_released_up_to_the_next_possible_one() -> None:
    tokenizer, ids = scripted("xaab", "aabb", "aac", "a")
    stream = TextStream(tokenizer, stops=["aabaabc"])
    assert run(stream, list(ids)) == ["x", "aabaabb", "aac", ""]
    assert stream.flush() == "a"
    assert not stream.stopped


@pytest.mark.parametrize(
    ("stops", "text", "sent", "matched"),
    [
        (["END", "ENDING"], "the ENDING", "the ", "END"),
        (["DEF", "EFG"], "ABCDEFG", "ABC", "DEF"),
        (["A"], "ABC", "", "A"),
        (["\n\n"], "a\n\nb", "a", "\n\n"),
        (["世界"], "こんにちは世界!", "こんにちは", "世界"),
        (["😀"], "a😁😀", "a😁", "😀"),
        (["aaab"], "aaaaab", "aa", "aaab"),
        (["zzz"], "zz", "zz", None),
    ],
)
def test_stops(stops: list[str], text: str, sent: str, matched: str | None) -> None:  # case D05
    by_bytes = TextStream(BYTES, stops=stops)
    assert "".join(run(by_bytes, text.encode())) + by_bytes.flush() == sent
    tokenizer, ids = scripted(text)
    at_once = TextStream(tokenizer, stops=stops)
    assert "".join(run(at_once, list(ids))) + at_once.flush() == sent
    assert by_bytes.matched == at_once.matched == matched


def test_a_stop_may_match_the_replacement_of_a_truncated_character() -> None:
    stream = TextStream(BYTES, stops=["x\ufffd"])
    assert run(stream, b"ax\xe2") == ["a", "", ""]
    assert stream.flush() == "" and stream.stopped


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(BYTES, stops=["a", ""])


@given(
    st.lists(st.text("abé😀", max_size=5), max_size=12),
    st.lists(st.text("abé😀", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stops_agree_with_a_search_of_the_whole_text(parts: list[str], stops: list[str]) -> None:
    tokenizer, ids = scripted(*parts)
    stream = TextStream(tokenizer, stops=stops)
    text = sent = ""
    for i in ids:
        text += parts[i]
        sent += stream.push(i)
        starts = [text.find(stop) for stop in stops if stop in text]
        assert stream.stopped == bool(starts)
        if starts:
            assert sent == text[: min(starts)]
            assert stream.matched is not None and text.startswith(stream.matched, min(starts))
            assert stream.push(i) == "" and stream.flush() == ""
            return
        held = max((k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])), default=0)
        assert sent == text[: len(text) - held]
    assert sent + stream.flush() == text


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_the_cut_does_not_depend_on_tokens_unless_stops_nest(text: str, stops: list[str], data: st.DataObject) -> None:
    if any(a != b and a in b for a in stops for b in stops):
        return
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parts = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
    tokenizer, ids = scripted(*parts)
    stream = TextStream(tokenizer, stops=stops)
    sent = "".join(run(stream, list(ids))) + stream.flush()
    assert sent == text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def test_special_ids_that_are_shown_are_text_and_the_others_are_not() -> None:
    tokenizer = Tokenizer(bytes_spec(["<|im_end|>", "[TOOL_CALLS]", "[ARGS]"]))
    for shown, text in ((frozenset(), "af"), ({257}, "a[TOOL_CALLS]f"), ({257, 258}, "a[TOOL_CALLS]f[ARGS]")):
        stream = TextStream(tokenizer, shown=frozenset(shown))
        assert "".join(stream.push(id_) for id_ in (ord("a"), 256, 257, ord("f"), 258)) + stream.flush() == text
        everything = TextStream(tokenizer, skip_special=False, shown=frozenset(shown))
        assert everything.push(256) == "<|im_end|>"


def test_pieces_with_shown_ids_are_made_once_for_a_set() -> None:
    tokenizer = Tokenizer(bytes_spec(["<|im_end|>", "[TOOL_CALLS]"]))
    assert tokenizer.pieces(shown=frozenset([257])) is tokenizer.pieces(shown=frozenset([257]))
    assert tokenizer.pieces(shown=frozenset([256])).whole[256] == "<|im_end|>"
    assert tokenizer.pieces().whole[256] == tokenizer.pieces().whole[257] == ""
