"""How a request ended. Every stream has exactly one outcome; the names are the contract's (DESIGN section 1)."""

from __future__ import annotations

import msgspec

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
CANCELLED, ERROR, EXPIRED = "cancelled", "error", "expired"
REFUSED = "refused"  # no stream was begun

# From best to worst: with several choices, or prompts, the request's outcome is the worst of them.
SEVERITY = (STOP, TOOL_CALLS, LENGTH, CANCELLED, EXPIRED, ERROR)
SUCCESSES = frozenset((STOP, LENGTH, TOOL_CALLS))


class Outcome(msgspec.Struct, frozen=True):
    """`message` is for people, and empty on success. `retriable`: the same request may well succeed later."""

    kind: str
    message: str = ""
    retriable: bool = False

    @property
    def success(self) -> bool:
        """Whether the text is a whole answer."""
        return self.kind in SUCCESSES


def worst(kinds: list[str]) -> str:
    """The outcome of a request whose choices ended so."""
    return max(kinds, key=SEVERITY.index)
