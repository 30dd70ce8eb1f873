"""One JSON value (RFC 8259), read a character at a time: where it ends, and at once where it can't be JSON.

`JsonScanner.step` takes the next character and says what it was; nothing is decoded. After `DONE` or `BAD` no more may
come. Only an object or an array can be read: a number at the top would not end by itself.
"""

from __future__ import annotations

# What a character was. BAD: none can follow here.
BAD, MORE, OPENED, CLOSED, QUOTE, KEY, STRING, DONE = range(8)

# No schema of a tool goes so deep; json.loads, which reads some of the same texts, has its own limit of about 1,000.
DEPTH_MAX = 128

_SPACE = frozenset(" \t\n\r")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

# Numbers: state -> class of character -> state. Those in _ENDS may end where they stand.
_NUMBER: dict[str, dict[str, str]] = {
    "sign": {"0": "zero", "1": "int"},
    "zero": {".": "dot", "e": "exp"},
    "int": {"0": "int", "1": "int", ".": "dot", "e": "exp"},
    "dot": {"0": "frac", "1": "frac"},
    "frac": {"0": "frac", "1": "frac", "e": "exp"},
    "exp": {"0": "power", "1": "power", "+": "exp_sign", "-": "exp_sign"},
    "exp_sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_ENDS = frozenset(("zero", "int", "frac", "power"))
_CLASS = {**dict.fromkeys("123456789", "1"), "E": "e"}


class JsonScanner:
    """`depth`: how many objects and arrays are open."""

    __slots__ = ("_containers", "_is_key", "_rest", "_state")

    def __init__(self) -> None:
        self._containers: list[str] = []
        self._state = "value"
        self._rest = ""  # of a literal
        self._is_key = False  # the string that is being read is one

    @property
    def depth(self) -> int:
        """How many objects and arrays are open."""
        return len(self._containers)

    @property
    def in_string(self) -> bool:
        """Whether any character but a quote, a backslash or a control goes on with the string that is being read."""
        return self._state == "string"

    def step(self, char: str) -> int:
        """BAD; DONE with the value's last character; OPENED and CLOSED for brackets; QUOTE at a string's start; KEY
        and STRING at the end of a name in an object, or of another string; MORE otherwise."""
        state = self._state
        if state == "string":
            return self._in_string(char)
        if state in _NUMBER:
            follow = _NUMBER[state].get(_CLASS.get(char, char))
            if follow is not None:
                self._state = follow
                return MORE
            if state not in _ENDS:
                return BAD
            self._state = state = "behind"
        if state in _WITHIN:
            return _WITHIN[state](self, char)
        if char in _SPACE:
            return MORE
        return _BETWEEN[state](self, char)

    def _in_string(self, char: str) -> int:
        if char == "\\":
            self._state = "escape"
        elif char == '"':
            self._state = "colon" if self._is_key else "behind"
            return KEY if self._is_key else STRING
        elif char < " ":
            return BAD
        return MORE

    def _in_escape(self, char: str) -> int:
        if char == "u":
            self._state, self._rest = "hex", "xxxx"
            return MORE
        self._state = "string"
        return MORE if char in _ESCAPED else BAD

    def _in_hex(self, char: str) -> int:
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = "string"
        return MORE if char in _HEX else BAD

    def _in_literal(self, char: str) -> int:
        if char != self._rest[0]:
            return BAD
        self._rest = self._rest[1:]
        if not self._rest:
            self._state = "behind"
        return MORE

    def _value(self, char: str) -> int:
        if char in "{[":
            return self._open(char)
        if not self._containers:
            return BAD
        if char == '"':
            self._state, self._is_key = "string", False
            return QUOTE
        if char == "-" or char in _DIGITS:
            self._state = "sign" if char == "-" else "zero" if char == "0" else "int"
        elif char in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[char]
        else:
            return BAD
        return MORE

    def _open(self, char: str) -> int:
        if len(self._containers) >= DEPTH_MAX:
            return BAD
        self._containers.append("}" if char == "{" else "]")
        self._state = "first_key" if char == "{" else "first_value"
        return OPENED

    def _close(self, char: str) -> int:
        if self._containers.pop() != char:
            return BAD
        self._state = "behind"
        return CLOSED if self._containers else DONE

    def _first_value(self, char: str) -> int:
        return self._close(char) if char == "]" else self._value(char)

    def _first_key(self, char: str) -> int:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> int:
        self._state, self._is_key = "string", True
        return QUOTE if char == '"' else BAD

    def _colon(self, char: str) -> int:
        self._state = "value"
        return MORE if char == ":" else BAD

    def _behind(self, char: str) -> int:
        if char == ",":
            self._state = "key" if self._containers[-1] == "}" else "value"
            return MORE
        return self._close(char) if char in "}]" else BAD


_WITHIN = {
    "escape": JsonScanner._in_escape,
    "hex": JsonScanner._in_hex,
    "literal": JsonScanner._in_literal,
}
_BETWEEN = {
    "value": JsonScanner._value,
    "first_value": JsonScanner._first_value,
    "first_key": JsonScanner._first_key,
    "key": JsonScanner._key,
    "colon": JsonScanner._colon,
    "behind": JsonScanner._behind,
}
