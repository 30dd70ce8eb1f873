"""What the client of a fuzzed HTTP/2 connection must have been able to read: whole frames, header blocks that decode,
one answer on each stream and nothing behind its end. Whether windows are kept is for tests/http2, which play a real
client; here what the client sends is mostly nonsense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from hpack import Decoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
)

from protocols import sse
from protocols.http2_guard import FRAME_BYTES_MAX, FRAME_HEADER_BYTES


@dataclass(slots=True)
class _Answer:
    """What came on one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False


def check(data: bytes) -> None:
    """`data` may be cut anywhere."""
    answers: dict[int, _Answer] = {}
    decoder = Decoder()
    block = bytearray()
    for number, frame in enumerate(_frames(data)):
        assert number or isinstance(frame, SettingsFrame), "the first frame is SETTINGS"
        if isinstance(frame, HeadersFrame | ContinuationFrame):
            block += frame.data
            if "END_HEADERS" in frame.flags:
                _take_headers(answers, frame, {str(k): str(v) for k, v in decoder.decode(bytes(block))})
                block.clear()
        else:
            assert not block, "a frame in the middle of a header block"
        if isinstance(frame, DataFrame):
            answer = answers[frame.stream_id]
            assert not answer.ended, "DATA behind the end"
            answer.body += frame.data
        if "END_STREAM" in frame.flags or isinstance(frame, RstStreamFrame):
            answers.setdefault(frame.stream_id, _Answer()).ended = True
        if "END_STREAM" in frame.flags:
            _check_whole(answers[frame.stream_id])


def _frames(data: bytes) -> list[Frame]:
    view = memoryview(data)
    frames: list[Frame] = []
    while len(view) >= FRAME_HEADER_BYTES:
        frame, length = Frame.parse_frame_header(view[:FRAME_HEADER_BYTES], strict=True)
        assert length <= FRAME_BYTES_MAX
        if len(view) < FRAME_HEADER_BYTES + length:
            break
        frame.parse_body(view[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + length])
        view = view[FRAME_HEADER_BYTES + length :]
        assert not (frames and isinstance(frames[-1], GoAwayFrame) and frames[-1].error_code), "a frame behind the end"
        frames.append(frame)
    return frames


def _take_headers(answers: dict[int, _Answer], frame: Frame, headers: dict[str, str]) -> None:
    answer = answers.setdefault(frame.stream_id, _Answer())
    assert not answer.ended, "HEADERS behind the end"
    assert ":status" in headers, "an answer without a status"
    assert not answer.headers or answer.headers[":status"] == "100", "two answers on a stream"
    answer.headers = headers


def _check_whole(answer: _Answer) -> None:
    kind = answer.headers.get("content-type", "").partition(";")[0]
    length = answer.headers.get("content-length")
    assert length is None or int(length) == len(answer.body) or not answer.body
    if kind == "application/json" and answer.body:
        json.loads(bytes(answer.body))
    elif kind == "text/event-stream" and answer.body:
        assert sse.Parser().feed(bytes(answer.body))[-1].data == "[DONE]"
