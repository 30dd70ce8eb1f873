"""A token source in place of a model: deterministic tokens, at a set pace, or exactly those that a script says.

Everything else is the real engine: the same process, wire, scheduler, block pool and credit. So what is tested
or measured with it is what a model's tokens go through.

Vocabulary: ids 0 to 255 are the bytes of those values, then come the special tokens, then 10,000 words of five
bytes (" 0000" to " 9999"), then the pieces that the script names. Without a script the n-th token of a sequence is
the word numbered n plus a start that depends on the prompt and, above temperature 0, on the seed and the choice: a gap
or a repeat shows at once. A sequence with a grammar makes, byte by byte, an answer that follows it, by the same start;
it closes strings and lists soon. A script's tokens must follow the grammar themselves.

Script (JSON): {"scripts": [{"match": "words of the prompt", "tokens": [...], "finish": "stop"}, ...]}.
The first script whose `match` occurs in the prompt's text is played, from its first token on; "" matches all.
An item of `tokens` is a string (one token of its UTF-8 bytes) or one of
  {"hex": "f09f98"}      one token of these bytes, whole characters or not
  {"special": "<|im_end|>"}  a special token in the middle of the text
  {"repeat": ITEM, "times": N}
  {"pause_ms": N}        the sequence makes no token for so long; others go on
  {"hang_ms": N}         the whole engine stands still for so long
  {"error": "sentence"}  the sequence ends with this error
  {"raise": "sentence"}  the model's code raises in the middle of a step
  {"die": true}          the engine process ends at once, as if killed
`finish` is stop (by an end token, the default), length, or tool_calls.
`prefill_ms` (for each script) is how long the prompt takes.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.sequence import Sampled, Sequence, Slice
from engine.wire import Logprob, TokenizerSpec

if TYPE_CHECKING:
    from engine.constraints import Constraint

BOS, IM_START, IM_END = 256, 257, 258
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORD_BASE = 256 + len(SPECIALS)
WORDS = 10_000
CONTEXT_TOKENS_MAX = 131_072
CLOSING = tuple(b'"}]')
SCRIPT_TOKENS_MAX = 1_000_000  # what {"repeat"} may grow to: more is a slip of the pen

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptError(Exception):
    """The script is not of the form that this module's docstring describes."""


@dataclass(slots=True)
class _Script:
    match: str
    items: list[int | dict[str, Any]]  # a token id, or a fault to play
    finish: str
    prefill_s: float


@dataclass(slots=True)
class _Play:
    """How far one sequence is in its script."""

    script: _Script | None
    start: int  # of the words that it makes without a script
    at: int = 0
    resume_at: float = 0.0  # the clock's time before which it makes no token


@dataclass(slots=True)
class _Vocabulary:
    pieces: list[bytes] = field(default_factory=list)
    ids: dict[bytes, int] = field(default_factory=dict)

    def id_of(self, piece: bytes) -> int:
        if piece not in self.ids:
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self.ids[piece]


class SyntheticRunner:
    """Plays tokens. `step_ms`: how long a step takes at least."""

    name = "synthetic"
    eos_ids: list[int] = [IM_END]  # noqa: RUF012  (the Runner protocol's attribute)
    context_tokens_max = CONTEXT_TOKENS_MAX

    def __init__(self, *, step_ms: float = 0.0, script: str | None = None) -> None:
        """`script`: a file's path. Raises ScriptError."""
        self._step_s = step_ms / 1000
        self._next_step = 0.0
        vocabulary = _Vocabulary([bytes([b]) for b in range(256)])
        vocabulary.pieces += [s.encode() for s in SPECIALS]
        vocabulary.pieces += [b" %04d" % n for n in range(WORDS)]
        self._scripts = _read_scripts(script, vocabulary) if script else []
        self.vocab_size = len(vocabulary.pieces)
        self.tokenizer = TokenizerSpec(
            json="",
            token_bytes=vocabulary.pieces,
            special_ids=[BOS, IM_START, IM_END],
            chat_template=CHAT_TEMPLATE,
            bos_token=SPECIALS[0],
            eos_token=SPECIALS[2],
        )

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        """One answer for each slice with `sample` set. Sleeps so long that steps keep their pace."""
        answers = [self._next(part.sequence) for part in slices if part.sample]
        self._keep_pace(idle=bool(answers) and not any(answers))
        return answers

    def _next(self, sequence: Sequence) -> Sampled | None:
        play = sequence.runner_state
        if not isinstance(play, _Play):
            play = sequence.runner_state = self._begin(sequence)
            if sequence.tells_prompt:
                _tell_prompt(sequence, self.vocab_size)
        if play.script is not None:
            sampled = self._play(play, play.script)
        elif sequence.constraint is not None:
            sampled = _follow(sequence, sequence.constraint, play.start)
        else:
            sampled = Sampled(WORD_BASE + (play.start + sequence.generated) % WORDS)
        if sampled is not None and not sampled.error and sequence.sampling.logprobs >= 0:
            sampled.logprob = _logprob(sampled.token, sequence.sampling.logprobs, self.vocab_size)
        return sampled

    def _begin(self, sequence: Sequence) -> _Play:
        prompt = sequence.tokens[: sequence.prompt_len]
        text = bytes(t for t in prompt if t < 256).decode("utf-8", "replace") if self._scripts else ""
        for script in self._scripts:
            if script.match in text:
                generated = len(sequence.tokens) - sequence.prompt_len
                at = _position_after(script, generated)
                return _Play(script, 0, at, time.monotonic() + script.prefill_s if not generated else 0.0)
        sampling = sequence.sampling
        draw = f"{sampling.seed}/{sampling.prompt_index}/{sampling.choice_index}" if sampling.temperature else ""
        key = f"{prompt}{draw}"  # at temperature 0 a model's answer depends on nothing but its prompt
        return _Play(None, int.from_bytes(blake2b(key.encode(), digest_size=4).digest()) % WORDS)

    def _play(self, play: _Play, script: _Script) -> Sampled | None:
        if play.resume_at and play.resume_at > time.monotonic():
            return None
        while play.at < len(script.items):
            item = script.items[play.at]
            play.at += 1
            if isinstance(item, int):
                if play.at == len(script.items) and script.finish != "stop":
                    return Sampled(item, finish=script.finish)
                return Sampled(item)
            if "pause_ms" in item:
                play.resume_at = time.monotonic() + item["pause_ms"] / 1000
                return None
            if "hang_ms" in item:
                time.sleep(item["hang_ms"] / 1000)
            elif "error" in item:
                return Sampled(0, error=item["error"])
            elif "raise" in item:
                raise RuntimeError(item["raise"])
            else:
                os._exit(70)
        return Sampled(IM_END, finish="stop", by_token=True)

    def _keep_pace(self, *, idle: bool) -> None:
        now = time.monotonic()
        if self._step_s:
            self._next_step = max(self._next_step + self._step_s, now)
            time.sleep(max(0.0, self._next_step - now))
        elif idle:
            time.sleep(0.001)  # every sequence pauses: don't spin


def _follow(sequence: Sequence, constraint: Constraint, start: int) -> Sampled:
    """An id that the grammar allows; the end token where it may come."""
    sampling = sequence.sampling
    (allowed,) = constraint.allowed([constraint])
    if allowed[IM_END] and not sampling.ignore_eos and sequence.generated >= sampling.min_tokens:
        return Sampled(IM_END, finish="stop", by_token=True)
    ids = [id_ for id_ in allowed.nonzero()[0].tolist() if id_ not in (IM_END, BOS, IM_START)]
    if not ids:
        return Sampled(-1, error="the answer's grammar leaves nothing to go on with")
    digest = blake2b(f"{start}/{sequence.generated}".encode(), digest_size=8).digest()
    draw = int.from_bytes(digest)
    closing = [id_ for id_ in CLOSING if allowed[id_]]
    plain = [id_ for id_ in ids if 0x20 <= id_ < 0x7F] or ids
    return Sampled(closing[0] if closing and draw % 3 == 0 else plain[(draw >> 8) % len(plain)])


def _position_after(script: _Script, generated: int) -> int:
    """Where a sequence goes on that already has so many tokens: behind what it played, faults included; but one that
    ends a sequence was not played."""
    at = 0
    while at < len(script.items) and generated > 0:
        generated -= isinstance(script.items[at], int)
        at += 1
    while 0 < at < len(script.items) and generated == 0 and _is_outlived(script.items[at]):
        at += 1
    return at


def _is_outlived(item: int | dict[str, Any]) -> bool:
    return not isinstance(item, int) and not item.keys() & {"error", "raise"}


def _tell_prompt(sequence: Sequence, vocab_size: int) -> None:
    top = sequence.sampling.prompt_logprobs
    prompt = enumerate(sequence.tokens[1 : sequence.prompt_len], 1)
    sequence.prompt_logprobs = [_logprob(token, top, vocab_size, place) for place, token in prompt]


def _logprob(token: int, top: int, vocab_size: int, index: int = 0) -> Logprob:
    """As if the token had probability 1/2, the next one 1/4, and so on."""
    ids = [(token + i) % vocab_size for i in range(top)]
    return Logprob(index, -0.6931471805599453, ids, [-0.6931471805599453 * (i + 1) for i in range(top)])


def _read_scripts(path: str, vocabulary: _Vocabulary) -> list[_Script]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ScriptError(f"--synthetic-script: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ScriptError(f"{path} is no JSON: {error}") from None
    try:
        return [_read_script(entry, vocabulary) for entry in document["scripts"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ScriptError(f"{path} is no script: {type(error).__name__}: {error}") from None


def _read_script(entry: dict[str, Any], vocabulary: _Vocabulary) -> _Script:
    unknown = entry.keys() - {"match", "tokens", "finish", "prefill_ms"}
    if unknown:
        raise ScriptError(f"a script has no field {sorted(unknown)[0]!r}")
    finish = entry.get("finish", "stop")
    if finish not in ("stop", "length", "tool_calls"):
        raise ScriptError(f"finish is stop, length or tool_calls, not {finish!r}")
    items: list[int | dict[str, Any]] = []
    for item in entry["tokens"]:
        items += _read_item(item, vocabulary)
        if len(items) > SCRIPT_TOKENS_MAX:
            raise ScriptError(f"a script plays at most {SCRIPT_TOKENS_MAX} tokens")
    return _Script(entry.get("match", ""), items, finish, entry.get("prefill_ms", 0) / 1000)


def _read_item(item: str | dict[str, Any], vocabulary: _Vocabulary) -> list[int | dict[str, Any]]:
    if isinstance(item, str):
        return [vocabulary.id_of(item.encode())]
    if "hex" in item:
        return [vocabulary.id_of(bytes.fromhex(item["hex"]))]
    if "special" in item:
        return [256 + SPECIALS.index(item["special"])]
    if "repeat" in item:
        return _read_item(item["repeat"], vocabulary) * min(int(item["times"]), SCRIPT_TOKENS_MAX + 1)
    if item.keys() & {"pause_ms", "hang_ms", "error", "raise", "die"}:
        return [item]
    raise ScriptError(f"{item!r} is neither a token nor a fault")
