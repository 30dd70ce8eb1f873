"""Floods: a client that makes the server work for nothing is stopped at a limit, and others don't feel it."""

from __future__ import annotations

import pytest
from conformance_kit.floods import FLOODS, Flood, play
from conformance_kit.http2_wire import Closed, Code
from conformance_kit.rules import row
from conformance_kit.target import Target

RULE = "a flood ends with the connection, at a limit, by ENHANCE_YOUR_CALM, and others are served"


def source_of(flood: Flood) -> str:
    cve = (flood.__doc__ or "").partition(":")[0].rstrip(".")
    return "RFC 9113 section 10.5" + (f", {cve}" if cve.startswith("CVE") else "")


CASES = [
    row(flood.__name__.replace("_", " "), flood, text=RULE, source=source_of(flood), level="should") for flood in FLOODS
]


@pytest.mark.parametrize("flood", CASES)
def test_flood(target: Target, flood: Flood) -> None:
    with target.wire() as wire:
        play(wire, flood)
        try:
            wire.wait(lambda _: False)
        except Closed:
            pass
        except TimeoutError:
            pytest.fail("the server took all of it, and went on")
        codes = {Code.ENHANCE_YOUR_CALM} if target.settings.ours else set(Code) - {Code.NO_ERROR}
        assert wire.goaway is None or wire.goaway.code in codes, wire.goaway
        assert wire.goaway is not None or not target.settings.ours, "no GOAWAY"
    with target.wire() as other:
        other.send(other.plain())
        assert other.answer(1)[0][":status"] == target.http2_status
