"""What the cases' servers are started with: limits, keys, and the scripts that their synthetic engine plays."""

from __future__ import annotations

from typing import Any

MAX_BODY = 100_000
MAX_HEADER = 16 * 1024
MAX_WS_MESSAGE = 50_000
KEY, SMALL_KEY = "secret-of-alice", "secret-of-bob"  # bob may have one stream at a time

# Line ends of every kind, with what a careless writer would turn into events behind them.
BREAKS = ["a\rdata: [DONE]\r\r", "b\nevent: x\ndata: {}\n\n", "c\r\nid: 7\r\n\r\n", "\n", "\r", "end\x00"]
# What str.splitlines, and naive clients with it, take for line ends.
SEPARATORS = ["a\u2028", "\u2029b", "c\u0085d", "\x0b", "\x0c", "\x1c\x1d\x1e", "\u2028\u2029", "z"]
PAUSE_MS = 1500

SCRIPTS: list[dict[str, Any]] = [
    {"match": "[empty]", "tokens": []},
    {"match": "[specials]", "tokens": [{"repeat": {"special": "<|im_start|>"}, "times": 5}]},
    {"match": "[late]", "tokens": [{"hex": h} for h in ("f0", "9f", "98", "80")]},  # text with the last token only
    {"match": "[pause]", "tokens": ["before", {"pause_ms": PAUSE_MS}, " after"]},
    {"match": "[slow]", "tokens": [" w", {"pause_ms": 60}] * 12},
    {"match": "[error]", "tokens": ["one", " two", " three", {"error": "the fault\r\ndata: [DONE]\u2028 was played"}]},
    {"match": "[raise]", "tokens": ["one", " two", " three", {"raise": "a fault of the model's code"}]},
    {"match": "[breaks]", "tokens": BREAKS},
    {"match": "[separators]", "tokens": SEPARATORS},
    {"match": "[length]", "tokens": ["one", " two"], "finish": "length"},
    {"match": "[tool]", "tokens": ["one", " two"], "finish": "tool_calls"},
    {"match": "[prefill]", "prefill_ms": PAUSE_MS, "tokens": ["late", " words"]},
]
