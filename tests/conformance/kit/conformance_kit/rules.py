"""What a case checks: its rule in words, and where that rule is written.

Every test of this suite carries one `rule`, its own or its table row's; the report is made of them. A case whose
server lacks an optional feature says `not_offered`, which the score counts apart: nothing is skipped in silence.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import pytest

PROFILES = ("http1", "sse", "websocket", "openai", "streaming", "http2", "anthropic")
Level = Literal["must", "should"]
NOT_OFFERED = "not offered: "


def rule(text: str, source: str, level: Level = "must") -> pytest.MarkDecorator:
    """`source`: an RFC section, a standard, or the id of a fault that users reported of servers (A01, D05, …)."""
    return pytest.mark.rule(text=text, source=source, level=level)


# A case about what HTTP/2 does otherwise or has not: the bytes of a message, keep-alive, Connection, upgrades.
http1_only = pytest.mark.http1_only


def row(
    name: str, *values: Any, text: str, source: str, level: Level = "must", marks: tuple[pytest.MarkDecorator, ...] = ()
) -> Any:
    """One row of a table of cases: its id, its values, its rule."""
    return pytest.param(*values, id=name, marks=(rule(text, source, level), *marks))


def not_offered(what: str) -> NoReturn:
    """The server lacks an optional feature: this case can't say anything about it."""
    pytest.skip(NOT_OFFERED + what)
