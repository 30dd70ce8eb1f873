"""What the synthetic engine plays for the clients, and the texts that they must show."""

from __future__ import annotations

from typing import Any

# Everything that some client, somewhere, has split, dropped or mistaken: line separators that are none in SSE, an emoji
# and a family of emoji cut over tokens, bare CRs, quotes, and text that looks like SSE.
_HARD: list[Any] = [
    "plain",
    " one\u2028two\u2029three\x85four",
    "\x0b\x0c\x1c\x1d\x1e",
    {"hex": "f09f"},
    {"hex": "9880"},
    {"hex": "f09f91a9e2808d"},
    {"hex": "f09f91a7"},
    {"pause_ms": 350},
    "\r",
    "\n",
    "\r\n\r\n",
    "\n\ndata: [DONE]\n\n",
    "event: ping\nid: 7\nretry: 1\n: no comment\n",
    " \"quoted\" 'and' \\escaped\\u0041 </script>",
    "\ufeff\x00\x7f",
    "日本語",
    " ",
    "\t",
    "end",
]
_RAW = b"".join(item.encode() if isinstance(item, str) else bytes.fromhex(item.get("hex", "")) for item in _HARD)

HARD, LONG, FAULTY, FOREVER = "hard characters", "a long answer", "a fault in the middle", "without an end"
HARD_TEXT = _RAW.decode()
LONG_WORDS = [f" word{n:03}" for n in range(120)]
LONG_TEXT = "".join(LONG_WORDS)
FAULT = "the engine is out of paper"
CALLING = "a call of a tool"
_CALL = [
    "Let me",
    " see.",
    "<tool_call>",
    '{"name": "get_',
    'weather", "arguments": {"city": "Par',
    'is 😀"}}',
    "</tool_call>",
]

ANSWERED = "21 degrees"  # by the tool

SCRIPTS: list[dict[str, Any]] = [
    {"match": f"<tool_response>\n{ANSWERED}", "tokens": ["It is", f" {ANSWERED}."]},
    {"match": f'<tool_response>\n"{ANSWERED}', "tokens": ["It is", f" {ANSWERED}."]},
    {"match": HARD, "tokens": _HARD},
    {"match": LONG, "tokens": LONG_WORDS, "finish": "length"},
    {"match": FAULTY, "tokens": ["one", " two", " three", {"error": FAULT}]},
    {"match": CALLING, "tokens": _CALL},
    {"match": FOREVER, "tokens": ["first", {"pause_ms": 100}, {"repeat": {"pause_ms": 100}, "times": 1000}]},
]
