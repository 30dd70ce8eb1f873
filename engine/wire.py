"""The messages between a server process and an engine process, and their framing.

Each frame is a 4-byte big-endian length and one msgpack value (a msgspec tagged array). The server sends
`Submit`, `Credit`, `Cancel` and `Stats`; the engine sends one `Hello` when the connection opens and then one `Step`
for each engine step, with the tokens of all sequences together, so that neither side does work for each
message and each token.

Imports nothing but msgspec: both processes load this file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

# A frame holds at most one tokenizer (Hello) or one prompt of a few million ids (Submit). What is longer is a
# broken or hostile peer, and the connection ends.
FRAME_BYTES_MAX = 256 * 1024 * 1024
WIRE_VERSION = 4

_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """The peer sent bytes that are no message of this protocol."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How one sequence chooses its tokens. Its randomness depends on nothing but four numbers,
    (seed, prompt_index, choice_index, index of the token), so any engine can go on where another ended."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # unsigned 64 bits
    prompt_index: int = 0
    choice_index: int = 0
    min_tokens: int = 0  # end-of-sequence and stop ids can't be chosen before
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1  # -1: none; k >= 0: the chosen token's and the k most likely
    frequency_penalty: float = 0.0  # for each time that an id was generated; 0: off
    presence_penalty: float = 0.0  # once for each id that was generated; 0: off
    repetition_penalty: float = 1.0  # a factor for the ids of prompt and generated text; 1: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit), each id once
    prompt_logprobs: int = -1  # as `logprobs`, for the prompt's ids; told once, with the first new id
    grammar: str = ""  # what the answer must follow, as engine.grammar describes it; "": nothing


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Start a sequence. `generated` holds ids that an earlier engine made: they are context, and are never
    emitted again. `credit` is the total of generated ids (those included) that it may reach before it parks."""

    id: int
    prompt: list[int]
    sampling: Sampling
    credit: int
    generated: list[int] = []
    salt: str = ""  # sequences with different salts never share cached blocks
    priority: int = 0  # lower goes first, among sequences of the same salt


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="credit"):
    """New totals of generated ids, (id, total) pairs. A total at or below what was made parks the sequence; 0 also
    gives back its blocks (it has no reader). Totals are absolute, so a message may repeat without harm."""

    totals: list[tuple[int, int]]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Forget these sequences. They send nothing more, not even an `End`."""

    ids: list[int]


class Stats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Ask for a `Step` now, though it be empty, for its gauges."""


class TokenizerSpec(msgspec.Struct, frozen=True, array_like=True):
    """All that the server needs to turn text into ids and ids into text, so that it never reads the model's files."""

    json: str  # Hugging Face tokenizer.json; "" means that each UTF-8 byte is the id of that value
    token_bytes: list[bytes]  # id -> the bytes that it stands for; special tokens: their literal text
    special_ids: list[int]  # control tokens: left out of text unless asked for
    bos_id: int = -1  # put before a raw prompt when add_bos is set
    add_bos: bool = False
    strip_leading_space: bool = False  # SentencePiece: one leading space of the whole text is no text
    chat_template: str = ""  # Jinja source; "" when the model has none
    bos_token: str = ""  # as the template sees them
    eos_token: str = ""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """What this engine serves and what fits in it."""

    wire_version: int
    engine_version: str
    model: str
    tokenizer: TokenizerSpec
    tokenizer_hash: str  # sha256 of the encoded spec: engines behind one server must agree
    vocab_size: int
    eos_ids: list[int]
    context_tokens_max: int  # prompt and generated ids of one sequence: model and pool together
    pool_tokens: int  # what the KV pool holds
    running_max: int


class Gauges(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state when the message left."""

    waiting: int = 0
    running: int = 0
    parked: int = 0
    waiting_tokens: int = 0  # tokens that waiting sequences must still compute
    running_tokens: int = 0  # room in the pool of sequences that are not parked
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    preemptions: int = 0  # counters since the engine's start
    steps: int = 0
    discarded: int = 0  # tokens that a step drew for a sequence that was over by then


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence left the queue for the first time."""

    id: int
    cached_tokens: int
    waited_s: float = 0.0  # from its submission to its place in the batch


class End(msgspec.Struct, frozen=True, array_like=True):
    """A sequence ended. `reason`: stop, length or error."""

    id: int
    reason: str
    by_token: bool = False  # its last id is an end-of-sequence or stop id, which is no text
    message: str = ""  # for people, when the reason is error


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """For the id at `index` of the step's lists (or of the prompt): its natural log probability and the most likely
    ids."""

    index: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of a sequence's prompt, in order; nothing is known of its first id."""

    id: int
    logprobs: list[Logprob]


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The outcome of one engine step: `tokens[i]` is a new id of sequence `ids[i]`."""

    ids: list[int]
    tokens: list[int]
    admitted: list[Admitted]
    ends: list[End]
    logprobs: list[Logprob]
    gauges: Gauges
    prompt_logprobs: list[PromptLogprobs] = []


ToEngine = Submit | Credit | Cancel | Stats
ToServer = Hello | Step

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_server = msgspec.msgpack.Decoder(ToServer)


def encode(message: ToEngine | ToServer) -> bytes:
    """One frame, its length included."""
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    """`body` with its length in front."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Joins bytes as they come and yields what `framed` was given. Raises WireError for a length beyond the limit."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each body that `data` completes."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= 4:
                (length,) = _LENGTH.unpack_from(buffer, at)
                if length > FRAME_BYTES_MAX:
                    raise WireError(f"a frame of {length} bytes, over the limit of {FRAME_BYTES_MAX}")
                if len(buffer) - at - 4 < length:
                    break
                start, at = at + 4, at + 4 + length
                with memoryview(buffer) as view:
                    body = bytes(view[start:at])
                yield body
        finally:
            del buffer[:at]


class FrameReader:
    """Joins bytes as they come and yields whole messages. Raises WireError for anything else."""

    def __init__(self, *, engine_side: bool) -> None:
        self._decoder = _to_engine if engine_side else _to_server
        self._frames = Frames()

    def feed(self, data: bytes) -> Iterator[ToEngine | ToServer]:
        """Yields each message that `data` completes."""
        for body in self._frames.feed(data):
            yield self._decode(body)

    def _decode(self, body: bytes) -> ToEngine | ToServer:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"not a message of wire version {WIRE_VERSION}: {error}") from None
