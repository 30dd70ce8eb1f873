"""What happens in one round: a server's flags, the streams that are asked for, and everything that befalls them.

A plan is a pure function of its seed. It says what is tried and when; what comes of it depends on the machine's pace,
so nothing here knows an outcome. Imports the standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STORIES_MIN, STORIES_MAX = 14, 30
# Stories begin within so long of each other, so that every phase of one meets every phase of others.
SPREAD_S = 1.2
SMALL_BUFFER_BYTES = 4096
TO_THE_END = -1

APIS = ("chat", "chat", "completions", "generate", "messages", "responses")
ONE_CHOICE = ("messages", "responses")
EVENT_DOORS = ("sse", "ndjson", "h2-sse", "h2-ndjson")
PLAIN_DOORS = ("plain", "h2-plain")
RESUMING_DOORS = (*EVENT_DOORS, *PLAIN_DOORS, "websocket", "poll")

# Words of a prompt that have the synthetic engine play a script in place of counting.
FAILS, PAUSES, EMOJI, DIES, RAISES = "it fails", "it pauses", "it is odd", "it dies", "it raises"
WAITS = "it waits"  # for longer than any round
FAILS_TEXT, PAUSES_TEXT, EMOJI_TEXT, DIES_TEXT, RAISES_TEXT = (
    "abcdef",
    "pqrstuvw",
    'né"\\\n😀a\u2028b中</s>',
    "ab😀c",
    "mn",
)
SCRIPTS: dict[str, dict[str, Any]] = {
    FAILS: {"match": FAILS, "tokens": [*FAILS_TEXT, {"error": "on purpose"}]},
    PAUSES: {"match": PAUSES, "tokens": [x for c in PAUSES_TEXT for x in (c, {"pause_ms": 60})], "prefill_ms": 100},
    EMOJI: {
        "match": EMOJI,
        "tokens": ["né", '"', "\\", "\n", "😀", "a\u2028b", {"hex": "e4b8"}, {"hex": "ad"}, "</s>"],
        "finish": "length",
    },
    WAITS: {"match": WAITS, "tokens": [{"pause_ms": 600_000}, "z"]},
    DIES: {"match": DIES, "tokens": ["a", "b", {"hex": "f09f"}, {"die": True}, {"hex": "9880"}, "c"]},
    RAISES: {"match": RAISES, "tokens": [*RAISES_TEXT, {"raise": "a fault of the model"}, "o"]},
}


@dataclass(frozen=True)
class Setting:
    """The server's flags, and what is done to its processes."""

    step_ms: int = 2
    resume_ttl_s: float = 0.6
    credit_window: int = 64
    kv_blocks: int = 4096
    max_running: int = 256
    log_bytes_per_stream: int = 1024 * 1024
    send_buffer: int = 16384
    keepalive_s: float = 15.0
    write_stall_s: float = 120.0
    queue_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    restart_wait_s: float = 30.0
    finish_on_half_close: bool = False
    streams_max: int = 10_000
    key_streams: int | None = None  # with an API key that may have so many streams
    kills_s: tuple[float, ...] = ()  # when the engine gets SIGKILL
    drain_s: float | None = None  # when the server gets SIGTERM
    drain_timeout_s: float = 0.5
    scripts: tuple[str, ...] = (FAILS, PAUSES, EMOJI)
    engines: int = 1

    def flags(self) -> list[str]:
        """As the command line has them."""
        flags = {
            "synthetic-step-ms": self.step_ms,
            "resume-ttl": self.resume_ttl_s,
            "credit-window": self.credit_window,
            "kv-blocks": self.kv_blocks,
            "max-running": self.max_running,
            "max-batch-tokens": self.max_running + 256,
            "log-bytes-per-stream": self.log_bytes_per_stream,
            "send-buffer": self.send_buffer,
            "keepalive-interval": self.keepalive_s,
            "write-stall-timeout": self.write_stall_s,
            "queue-timeout": self.queue_timeout_s,
            "engine-restart-wait": self.restart_wait_s,
            "on-half-close": "finish" if self.finish_on_half_close else "abort",
            "max-streams": self.streams_max,
            "drain-timeout": self.drain_timeout_s,
            "log-format": "json",
            "engines": self.engines,
        }
        if self.request_timeout_s is not None:
            flags["request-timeout"] = self.request_timeout_s
        return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Ask:
    """A generation. `seed` None at a temperature above 0: the server draws one."""

    api: str  # chat, completions, generate, messages, responses
    prompt: str
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    stop: str | None = None
    usage: bool = False  # told in the stream, where that is a choice; of a response: stored
    logprobs: bool = False


@dataclass(frozen=True)
class Visit:
    """One reader. It reads `read` events (or until its patience ends), may stop reading for a while, and leaves."""

    door: str
    wait_s: float = 0.0  # before it comes
    depth: float = 1.0  # where it begins: 1 behind all that its story has seen, 0 at the start
    beyond: bool = False  # … or at a position that has not come yet
    means: str = "query"  # how the position is given: query, header, post, generate
    read: int = TO_THE_END
    patience_s: float = 20.0
    stall_s: float = 0.0
    leave: str = "close"  # close, reset, on (it reads to the end), half (likewise, behind a FIN), stay (unread, open)
    small: bool = False  # a small receive buffer, so that stalling is felt


@dataclass(frozen=True)
class Cancel:
    """After so many events, or a time after the stream's begin when `events` is None."""

    events: int | None
    after_s: float = 0.0


@dataclass(frozen=True)
class Story:
    """One stream's life: who begins it, who reads it then, one after another, and who beside them."""

    number: int
    at_s: float
    ask: Ask
    first: Visit
    later: tuple[Visit, ...] = ()
    beside: tuple[Visit, ...] = ()
    cancel: Cancel | None = None
    mates: int = 0  # further generations on the same WebSocket, that nobody comes back to
    idempotent: bool = False  # sent with an Idempotency-Key; `later` then has re-posts


@dataclass(frozen=True)
class Plan:
    """A round."""

    seed: int
    setting: Setting
    stories: tuple[Story, ...] = field(repr=False)


def make(seed: int) -> Plan:
    """The plan of a seed."""
    chosen = random.Random(seed)
    setting = _setting(chosen)
    count = chosen.randint(STORIES_MIN, STORIES_MAX)
    return Plan(seed, setting, tuple(_story(chosen, number, setting) for number in range(count)))


def _rarely(chosen: random.Random, share: float, values: Sequence[Any], usual: Any) -> Any:
    return chosen.choice(values) if chosen.random() < share else usual


def _setting(chosen: random.Random) -> Setting:
    tiny = chosen.random() < 0.4
    fate = chosen.choice(["quiet", "quiet", "kill", "kill twice", "die", "raise", "drain"])
    first = chosen.uniform(0.2, 1.2)
    kills = {"kill": (first,), "kill twice": (first, first + chosen.uniform(0.0, 2.0))}.get(fate, ())
    max_running = chosen.choice([1, 2, 5]) if tiny else _rarely(chosen, 0.3, [1, 4, 16], 256)
    scripts = (FAILS, PAUSES, EMOJI, *({"die": (DIES,), "raise": (RAISES,)}.get(fate, ())))
    return Setting(
        step_ms=chosen.choice([0, 0, 1] if max_running <= 5 else [0, 1, 2, 4]),
        resume_ttl_s=chosen.choice([0, 0.3, 0.6, 1.0, 2.0]),
        credit_window=_rarely(chosen, 0.5, [2, 3, 8, 200], 64),
        kv_blocks=chosen.choice([12, 20, 40]) if tiny else 4096,
        max_running=max_running,
        log_bytes_per_stream=_rarely(chosen, 0.2, [2048, 20_000], 1024 * 1024),
        send_buffer=_rarely(chosen, 0.5, [4096], 16384),
        keepalive_s=_rarely(chosen, 0.5, [0.05, 0.3], 15.0),
        write_stall_s=_rarely(chosen, 0.3, [0.2, 0.5], 120.0),
        queue_timeout_s=_rarely(chosen, 0.2, [0.2, 0.6], 60.0),
        request_timeout_s=_rarely(chosen, 0.2, [0.3, 1.0], None),
        restart_wait_s=_rarely(chosen, 0.2, [0, 0.1], 30.0),
        finish_on_half_close=chosen.random() < 0.5,
        streams_max=_rarely(chosen, 0.1, [8], 10_000),
        key_streams=_rarely(chosen, 0.3, [3, 8], None),
        kills_s=kills,
        drain_s=chosen.uniform(0.2, 1.5) if fate == "drain" else None,
        drain_timeout_s=chosen.choice([0, 0.5, 1.5]),
        scripts=scripts,
        engines=_rarely(chosen, 0.3, [2], 1),
    )


def _story(chosen: random.Random, number: int, setting: Setting) -> Story:
    door = chosen.choice(["sse", "sse", "ndjson", "plain", "websocket", "websocket", "poll", "whole", *_HTTP2])
    ask = _ask(chosen, number, setting, door)
    doors = [d for d in RESUMING_DOORS if ask.n == 1 or d not in PLAIN_DOORS]
    idempotent = door in ("sse", "ndjson", "whole") and chosen.random() < 0.25
    if idempotent and chosen.random() < 0.5:
        doors = ["repost"]
    first = _visit(chosen, door, setting)
    comes_back = door != "whole" or idempotent
    later = [_visit(chosen, chosen.choice(doors), setting) for _ in range(chosen.choice([0, 1, 2, 4]))]
    beside = [_visit(chosen, chosen.choice(doors), setting) for _ in range(chosen.choice([0, 0, 0, 1, 2]))]
    if comes_back and chosen.random() < 0.7:
        later.append(_to_the_end(chosen, chosen.choice(doors)))
    return Story(
        number=number,
        at_s=chosen.uniform(0, SPREAD_S),
        ask=ask,
        first=first,
        later=tuple(later) if comes_back else (),
        beside=tuple(beside) if comes_back else (),
        cancel=_cancel(chosen, ask) if chosen.random() < 0.25 else None,
        mates=chosen.choice([0, 0, 1, 4]) if door == "websocket" else 0,
        idempotent=idempotent,
    )


_HTTP2 = ("h2-sse", "h2-ndjson", "h2-plain")


def _ask(chosen: random.Random, number: int, setting: Setting, door: str) -> Ask:
    api = "generate" if door == "poll" else chosen.choice(APIS)
    if door == "whole" and api == "generate":
        api = "chat"
    if door == "websocket" and api not in ("chat", "completions"):
        api = "completions"
    scripted = chosen.random() < 0.25
    prompt = chosen.choice(setting.scripts) if scripted else chosen.choice(["hi", "tell", "x" * 40])
    sampled = not scripted and chosen.random() < 0.5
    seed = chosen.choice([None, 0, 7, 2**63]) if sampled and api != "messages" else None
    may_stop = not scripted and not (sampled and seed is None)
    return Ask(
        api=api,
        prompt=f"{prompt} {number}",
        max_tokens=chosen.choice([1, 2, 20, 60, 150, 150, 400, 800 if setting.step_ms > 1 else 400]),
        n=1 if door in PLAIN_DOORS or api in ONE_CHOICE else chosen.choice([1, 1, 1, 1, 2, 3]),
        temperature=1.0 if sampled else 0.0,
        seed=seed,
        stop=_rarely(chosen, 0.15, ["7 ", "00", "9"], None) if may_stop else None,
        usage=chosen.random() < 0.5,
        logprobs=api == "chat" and chosen.random() < 0.1,
    )


def _visit(chosen: random.Random, door: str, setting: Setting) -> Visit:
    stalls = chosen.random() < 0.3
    leave = chosen.choice(["close", "close", "reset", "reset", "on", "half", "stay"])
    return Visit(
        door=door,
        wait_s=chosen.choice([0, 0, 0.01, 0.1, chosen.uniform(0, 1.5 * setting.resume_ttl_s)]),
        depth=chosen.choice([1.0, 1.0, 1.0, 0.0, chosen.random()]),
        beyond=chosen.random() < 0.05,
        means=chosen.choice(["query", "header", "post", "generate"]),
        read=chosen.choice([0, 0, 1, 3, 10, 40, 100, TO_THE_END]),
        patience_s=_rarely(chosen, 0.2, [0.02, 0.2], 20.0),
        stall_s=chosen.choice([0.1, 0.4, 0.8]) if stalls else 0.0,
        leave=leave,
        small=stalls or chosen.random() < 0.2,
    )


def _to_the_end(chosen: random.Random, door: str) -> Visit:
    return Visit(door=door, depth=chosen.choice([1.0, 1.0, chosen.random()]), means=chosen.choice(["query", "header"]))


def _cancel(chosen: random.Random, ask: Ask) -> Cancel:
    if chosen.random() < 0.4:
        return Cancel(None, chosen.choice([0, 0, 0.05, 0.3, 0.8]))
    return Cancel(chosen.choice([0, 1, 5, 30, ask.max_tokens, ask.max_tokens + 1]))
