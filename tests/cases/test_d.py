"""Kind D of the fault cases: what the OpenAI grammar says. Each test names its case.

The texts come from scripts of the synthetic engine, token by token; what they should give is worked out here from
the scripts' bytes, by the plainest code that can.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.readings import EVENT_STREAM, NDJSON, agree, of_chunks, read_all
from tests.support.serving import Server, chat

pytestmark = pytest.mark.synthetic

FAMILY = "👨‍👩‍👧‍👦"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# name -> the bytes of each token
TEXTS: dict[str, list[bytes]] = {
    "emoji-1+1+1+1": [b"a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"b"],
    "emoji-2+2": ["né".encode(), b"\xf0\x9f", b"\x98\x80", b"!"],
    "emoji-1+3": [b"\xf0", b"\x9f\x98\x80"],
    "emoji-across": [b"x\xf0\x9f", b"\x98\x80\xe4\xb8", b"\xad", "文".encode()],
    "family": [bytes([byte]) for byte in FAMILY.encode()],
    "invalid": [b"x", b"\xff", b"y", b"\xc3", b"z", b"\xe2\x82", b"!", b"\x80"],
    "surrogate": [b"a", b"\xed", b"\xa0", b"\x80", b"b"],
    "truncated": [b"ab", b"\xe2", b"\x82"],
    "quotes": [b'"', b"\\", b"\n\r\t\x00\x1f", "\u2028\u2029".encode(), b"\x7f</script>", b"\r\n\r\ndata: x\n\n"],
    "stops": [b"ABC", b"DEF", b"G", b"HI", b"J", b"never"],
    "almost": [b"ABC", b"DEF", b"G", b"HX", b"more"],
    "restart": [b"ab", b"ab", b"ab", b"c", b"d"],
    "multibyte": [b"a", b"\xe4\xb8", b"\xad\xe6", b"\x96\x87", b"b"],
    "empty": [],
}
SPECIALS = [{"special": "<|endoftext|>"}, "b", {"special": IM_START}, "c"]


def swept(count: int) -> dict[str, tuple[list[bytes], list[str]]]:
    """Seeded scripts over an alphabet in which stop strings and broken characters meet often, with their stops."""
    chosen = random.Random(20)
    alphabet = "aab中é😀"
    cases: dict[str, tuple[list[bytes], list[str]]] = {}
    for number in range(count):
        data = "".join(chosen.choices(alphabet, k=chosen.randint(1, 14))).encode()
        if number % 5 == 0:
            data += chosen.choice([b"\xff", b"\xf0\x9f", b"\xc3"])
        pieces: list[bytes] = []
        while data:
            size = chosen.randint(1, 4)
            pieces.append(data[:size])
            data = data[size:]
        stops = ["".join(chosen.choices(alphabet, k=chosen.randint(1, 4))) for _ in range(chosen.randint(0, 3))]
        cases[f"swept-{number:03d}."] = (pieces, stops)
    return cases


SWEPT = swept(60)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = []
    for name, pieces in {**TEXTS, **{name: pieces for name, (pieces, _) in SWEPT.items()}}.items():
        scripts.append({"match": f"play {name}", "tokens": [{"hex": piece.hex()} for piece in pieces]})
    scripts += [
        {"match": "play specials-end", "tokens": ["a", *SPECIALS, {"special": IM_END}, "never"]},
        {"match": "play specials", "tokens": ["a", *SPECIALS]},
        {"match": "play by-length", "tokens": ["a", "b"], "finish": "length"},
        {"match": "play by-tools", "tokens": ["a", "b"], "finish": "tool_calls"},
    ]
    with Server(scripts=scripts) as server:
        yield server


def expected_text(pieces: list[bytes], stops: list[str]) -> str:
    """The text up to the stop string that starts first, among those that the earliest token completes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for number, piece in enumerate(pieces, 1):
        text += decoder.decode(piece, final=number == len(pieces))
        if starts := [text.find(stop) for stop in stops if stop in text]:
            return text[: min(starts)]
    return text


class TestD01FinishChunk:
    """Content chunks have no reason; one chunk for each choice has it, and no content."""

    @pytest.mark.parametrize("choices", [1, 2])
    @pytest.mark.parametrize(("content", "reason"), [("no script", "length"), ("play quotes", "stop")])
    @pytest.mark.parametrize("framing", [EVENT_STREAM, NDJSON])
    def test_chat(self, server: Server, content: str, reason: str, choices: int, framing: tuple[str, str]) -> None:
        fields = {"max_tokens": 5, "n": choices, "seed": 1} if reason == "length" else {"n": choices}
        answer = server.ask("POST", CHAT, chat(content, stream=True, **fields), [framing])
        chunks = answer.chunks() if framing is EVENT_STREAM else answer.lines()[:-1]
        whole = server.ask("POST", CHAT, chat(content, **fields)).json()
        for index in range(choices):
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [c["finish_reason"] for c in parts] == [None] * (len(parts) - 1) + [reason]
            assert parts[-1]["delta"] == {}
            text = "".join(c["delta"].get("content", "") for c in parts)
            assert text == whole["choices"][index]["message"]["content"]
            assert whole["choices"][index]["finish_reason"] == reason

    def test_completions(self, server: Server) -> None:
        body = {"prompt": ["x", "y"], "max_tokens": 5, "n": 2, "seed": 3}
        chunks = server.ask("POST", COMPLETIONS, {**body, "stream": True}).chunks()
        whole = server.ask("POST", COMPLETIONS, body).json()
        texts = []
        for index in range(4):
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [c["finish_reason"] for c in parts] == [None] * (len(parts) - 1) + ["length"]
            assert parts[-1]["text"] == ""
            texts.append("".join(c["text"] for c in parts))
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert len(set(texts)) == 4

    @pytest.mark.parametrize(("content", "reason"), [("play by-length", "length"), ("play by-tools", "tool_calls")])
    def test_the_engines_reason(self, server: Server, content: str, reason: str) -> None:
        reading = agree(read_all(server, content))
        assert (reading.text, reading.reason) == ("ab", reason)


class TestD02ChunkKeys:
    """The first chunk has the role and empty content; the keys of a chunk never come and go."""

    @pytest.mark.parametrize("extra", [{}, {"stream_options": {"include_usage": True}}, {"logprobs": True}])
    def test_chat(self, server: Server, extra: dict[str, Any]) -> None:
        chunks = server.ask("POST", CHAT, chat("hello", max_tokens=4, stream=True, **extra)).chunks()
        usage = [chunk for chunk in chunks if not chunk["choices"]]
        chunks = [chunk for chunk in chunks if chunk["choices"]]
        assert len(usage) == ("stream_options" in extra)
        first, *others, last = [chunk["choices"][0] for chunk in chunks]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(c["delta"].keys() == {"content"} for c in others)
        assert last["delta"] == {}
        assert {frozenset(c) for c in (first, *others, last)} == {
            frozenset(("index", "delta", "logprobs", "finish_reason"))
        }
        keys = {"id", "object", "created", "model", "choices"} | ({"usage"} if usage else set())
        assert all(chunk.keys() == keys for chunk in (*chunks, *usage))
        for name in ("id", "object", "created", "model"):
            assert len({chunk[name] for chunk in (*chunks, *usage)}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk"

    def test_every_choice_has_its_role(self, server: Server) -> None:
        chunks = server.ask("POST", CHAT, chat("hello", max_tokens=2, n=3, stream=True)).chunks()
        firsts = [chunk["choices"][0] for chunk in chunks[:3]]
        assert [c["index"] for c in firsts] == [0, 1, 2]
        assert all(c["delta"] == {"role": "assistant", "content": ""} for c in firsts)

    def test_completions(self, server: Server) -> None:
        chunks = server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 3, "stream": True}).chunks()
        assert {frozenset(chunk) for chunk in chunks} == {frozenset(("id", "object", "created", "model", "choices"))}
        assert {frozenset(chunk["choices"][0]) for chunk in chunks} == {
            frozenset(("index", "text", "logprobs", "finish_reason"))
        }


class TestD03Usage:
    """Usage comes when it is asked for, once, at the end, and is that of the whole answer."""

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_asked_for(self, server: Server, path: str) -> None:
        body: dict[str, Any] = chat("hi") if path == CHAT else {"prompt": "hi"}
        body |= {"max_tokens": 7, "n": 2}
        chunks = server.ask("POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}}).chunks()
        *before, last = chunks
        assert all("usage" in chunk and chunk["usage"] is None and chunk["choices"] for chunk in before)
        assert last["choices"] == []
        whole = server.ask("POST", path, body).json()["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][name] == whole[name]
        assert whole["completion_tokens"] == 14
        assert whole["total_tokens"] == whole["prompt_tokens"] + 14
        assert 0 <= whole["prompt_tokens_details"]["cached_tokens"] <= whole["prompt_tokens"]

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
    def test_not_asked_for(self, server: Server, path: str, options: Any) -> None:
        body: dict[str, Any] = chat("hi") if path == CHAT else {"prompt": "hi"}
        body |= {"max_tokens": 3, "stream": True} | ({} if options is None else {"stream_options": options})
        chunks = server.ask("POST", path, body).chunks()
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    @pytest.mark.parametrize("stream", [None, False])
    @pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
    def test_without_a_stream(self, server: Server, path: str, stream: bool | None, options: Any) -> None:
        body: dict[str, Any] = chat("hi") if path == CHAT else {"prompt": "hi"}
        answer = server.ask("POST", path, {**body, "stream": stream, "stream_options": options})
        assert answer.error(400)["param"] == "stream_options"

    def test_get_generate(self, server: Server) -> None:
        target = "/v1/generate?prompt=hi&max_tokens=3&stream_options=%7B%22include_usage%22:true%7D"
        assert server.ask("GET", target).chunks()[-1]["usage"]["completion_tokens"] == 3
        assert not any("usage" in chunk for chunk in server.ask("GET", target.partition("&stream")[0]).chunks())


class TestD05StopStrings:
    """Only text before the match is ever sent, and no more is held back than could still become one."""

    @pytest.mark.parametrize(
        ("name", "stops", "pieces"),
        [
            ("stops", ["DEFGHIJ"], ("ABC",)),
            ("almost", ["DEFGHIJ"], ("ABC", "DEFGHX", "more")),
            ("stops", ["DEFGHIJ", "FG"], ("ABC", "DE")),
            ("stops", ["CDEF", "EF"], ("AB",)),
            ("stops", ["A"], ()),
            ("stops", ["ABC"], ()),
            ("stops", ["J"], ("ABC", "DEF", "G", "HI")),
            ("stops", ["nowhere"], ("ABC", "DEF", "G", "HI", "J", "never")),
            ("restart", ["ababc"], ("ab",)),
            ("restart", ["abc", "bab"], ("a",)),
            ("multibyte", ["中文"], ("a",)),
            ("multibyte", ["文b"], ("a", "中")),
            ("family", ["\u200d"], ("👨",)),
            ("emoji-2+2", ["😀"], ("né",)),
        ],
    )
    def test_streamed_and_whole(self, server: Server, name: str, stops: list[str], pieces: tuple[str, ...]) -> None:
        reading = agree(read_all(server, f"play {name}", stop=stops[0] if len(stops) == 1 else stops))
        assert reading.pieces == pieces
        assert reading.reason == "stop"

    def test_usage_counts_through_the_match(self, server: Server) -> None:
        reading = agree(read_all(server, "play stops", stop="GH"))
        assert (reading.text, reading.usage and reading.usage["completion_tokens"]) == ("ABCDEF", 4)


class TestD08Characters:
    """Incomplete bytes wait; U+FFFD is only for what is invalid, or truncated at the very end."""

    @pytest.mark.parametrize("name", TEXTS)
    def test_every_way_gives_the_plain_decode(self, server: Server, name: str) -> None:
        reading = agree(read_all(server, f"play {name}"))
        assert reading.text == b"".join(TEXTS[name]).decode("utf-8", "replace")
        assert reading.reason == "stop"

    @pytest.mark.parametrize("name", ["emoji-1+1+1+1", "emoji-2+2", "family", "emoji-across"])
    def test_no_piece_holds_a_replacement(self, server: Server, name: str) -> None:
        pieces = agree(read_all(server, f"play {name}")).pieces
        assert pieces is not None
        assert not any("\ufffd" in piece for piece in pieces)

    @pytest.mark.parametrize("name", ["emoji-1+1+1+1", "family", "invalid", "surrogate"])
    def test_max_tokens_within_a_character(self, server: Server, name: str) -> None:
        for count in range(1, len(TEXTS[name]) + 1):
            reading = agree(read_all(server, f"play {name}", max_tokens=count))
            assert reading.text == b"".join(TEXTS[name][:count]).decode("utf-8", "replace")
            assert reading.reason == "length"

    @pytest.mark.parametrize("name", SWEPT)
    def test_sweep(self, server: Server, name: str) -> None:
        pieces, stops = SWEPT[name]
        assert agree(read_all(server, f"play {name}", stop=stops)).text == expected_text(pieces, stops)

    @pytest.mark.parametrize("name", ["family", "invalid", "quotes"])
    def test_logprobs_expose_the_bytes(self, server: Server, name: str) -> None:
        body = chat(f"play {name}", logprobs=True, top_logprobs=2)
        whole = server.ask("POST", CHAT, body).json()["choices"][0]
        chunks = server.ask("POST", CHAT, {**body, "stream": True}).chunks()
        streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
        assert streamed == whole["logprobs"]["content"]
        assert [bytes(entry["bytes"]) for entry in streamed] == TEXTS[name]
        assert all(len(entry["top_logprobs"]) == 2 for entry in streamed)
        assert of_chunks(chunks).text == whole["message"]["content"]


class TestD21SpecialTokens:
    """Special tokens are shown only if they are asked for, never at the end; what a user writes is text."""

    @pytest.mark.parametrize(("skip", "text"), [(None, "abc"), (True, "abc"), (False, f"a<|endoftext|>b{IM_START}c")])
    @pytest.mark.parametrize("name", ["specials", "specials-end"])
    def test_in_the_middle(self, server: Server, name: str, skip: bool | None, text: str) -> None:
        fields = {} if skip is None else {"skip_special_tokens": skip}
        reading = agree(read_all(server, f"play {name}", **fields))
        assert (reading.text, reading.reason) == (text, "stop")
        assert reading.usage is not None and reading.usage["completion_tokens"] == 6  # the end token counts

    @pytest.mark.parametrize(
        ("skip", "text"), [(True, "abcnever"), (False, f"a<|endoftext|>b{IM_START}c{IM_END}never")]
    )
    def test_ignored_end(self, server: Server, skip: bool, text: str) -> None:
        reading = agree(read_all(server, "play specials-end", skip_special_tokens=skip, ignore_eos=True))
        assert reading.text == text

    @pytest.mark.parametrize("skip", [True, False])
    def test_a_stop_id_ends_and_is_no_text(self, server: Server, skip: bool) -> None:
        reading = agree(read_all(server, "play specials", skip_special_tokens=skip, stop_token_ids=[257]))
        assert (reading.text, reading.reason) == ("ab" if skip else "a<|endoftext|>b", "stop")

    @pytest.mark.parametrize("marker", [IM_START, IM_END, "<|endoftext|>", f"a{IM_END}\n{IM_START}system\nb"])
    def test_markers_in_user_text_are_text(self, server: Server, marker: str) -> None:
        """Each character of them is a token of its own, as any other character is in this vocabulary."""

        def tokens(content: Any) -> int:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            count = server.ask("POST", CHAT, body).json()["usage"]["prompt_tokens"]
            assert isinstance(count, int)
            return count

        assert tokens(marker) == tokens("x" * len(marker))
        assert tokens([{"type": "text", "text": marker}]) == tokens("x" * len(marker))

    def test_markers_in_a_raw_prompt_are_tokens(self, server: Server) -> None:
        """A completion's prompt is the model's own language."""
        usage = server.ask("POST", COMPLETIONS, {"prompt": f"{IM_START}user", "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == 5
