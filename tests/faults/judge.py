"""What must hold of every stream of a round, by the access log and by what its readers saw."""

from __future__ import annotations

import json
from typing import Any

from server.outcome import CANCELLED, ERROR, EXPIRED, SUCCESSES
from tests.faults import plan
from tests.faults.grammars import is_last
from tests.faults.ledger import Cut, Ledger
from tests.faults.oracle import Expected
from tests.faults.plan import Ask, Setting
from tests.faults.stage import Stage

# The log shows so much of a stream's name.
SHOWN_CHARS = 8
# Between a client's clock and the server's timers.
SLACK_S = 0.02


def check_streams(stage: Stage, log: str) -> None:
    """Each stream has one line in the log, with an outcome that its plan can explain and that its readers were told."""
    lines: dict[str, dict[str, Any]] = {}
    for text in log.splitlines():
        if not text.startswith("{"):
            continue
        line = json.loads(text)
        if line["event"] == "stream":
            assert line["stream"] not in lines, f"two outcomes of one stream: {line} and {lines[line['stream']]}"
            lines[line["stream"]] = line
        assert line["event"] != "fault", line
    for stream, (ledger, ask, expected) in stage.ledgers.items():
        line = lines.pop(stream[:SHOWN_CHARS], {})
        assert line, f"no line in the log for {stream}; its readers saw {ledger}"
        try:
            check_stream(stage, line, ledger, ask, expected)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{ask}\n{expected}\n{line}\n{_shown(ledger)}") from None
    for line in lines.values():  # nobody learned their names: their clients left too early
        assert line["outcome"] != ERROR or _may_fail(stage, line, None), line


def check_traces(log: str) -> None:
    """No traceback but the engine's of the faults that scripts play, and nothing that nobody waited for."""
    faults = log.count("RuntimeError: a fault of the model")
    assert log.count("Traceback") == faults, log[-4000:]
    for sign in ("Warning:", "never awaited", "never retrieved"):
        assert sign not in log, log[-4000:]


def _shown(ledger: Ledger) -> str:
    text = repr(ledger)
    return text if len(text) < 3000 else f"{text[:1500]} … {text[-1500:]}"


def check_stream(stage: Stage, line: dict[str, Any], ledger: Ledger, ask: Ask, expected: Expected) -> None:
    """One stream."""
    setting = stage.plan.setting
    outcome = line["outcome"]
    assert ledger.outcomes <= {outcome}, f"readers were told {ledger.outcomes}, the outcome is {outcome}"
    assert ledger.usages <= {line["completion_tokens"]}, f"readers were told {ledger.usages} tokens"
    assert 0 <= line["cached_tokens"] <= line["prompt_tokens"]
    _check_outcome(stage, line, ledger, expected)
    _check_text(ledger, expected, whole=outcome in SUCCESSES and ledger.ended and _from_the_start(ledger))
    _check_reasons(line, ledger, expected)
    assert not ledger.plain_whole or outcome in SUCCESSES, "bare text that failed looks whole"
    if outcome in SUCCESSES and expected.outcome == "length" and ask.stop is None and expected.reasons[0] != "stop":
        made = line["completion_tokens"]
        texts = expected.texts[0]
        if texts.startswith(" "):
            assert made == sum(len(text) // 5 for text in expected.texts), f"{made} tokens"
    for cut in ledger.cuts:
        assert _may_be_cut(setting, cut, outcome, stage), f"{cut} of a stream that ended as {outcome}"


def _from_the_start(ledger: Ledger) -> bool:
    """Whether every event was seen by somebody."""
    return is_last(ledger.events.get(ledger.position, b"{}"))


def _check_text(ledger: Ledger, expected: Expected, *, whole: bool) -> None:
    pieces = ledger.pieces()
    for choice, text in pieces.items():
        assert expected.holds(choice, text, whole=whole), f"choice {choice} is {text[:200]!r}"
    for texts in ledger.whole_texts:
        for choice, text in enumerate(texts):
            assert expected.holds(choice, text, whole=True), f"choice {choice} is {text[:200]!r}"
    _check_slices(ledger, expected)


def _check_slices(ledger: Ledger, expected: Expected) -> None:
    """Bare text, wherever its readers began."""
    if not ledger.slices:
        return
    offset, first = min(ledger.slices)
    beginning = ledger.pieces().get(0, "") or (first.decode(errors="replace") if offset == 0 else "")
    text = expected.text(0, beginning).encode()
    for offset, part in ledger.slices:
        assert text[offset : offset + len(part)] == part, f"bare text at {offset} is {part[:200]!r}"
    if ledger.plain_whole:
        assert max(offset + len(part) for offset, part in ledger.slices) == len(text), "bare text that looks whole"


def _check_reasons(line: dict[str, Any], ledger: Ledger, expected: Expected) -> None:
    for choice, reason in ledger.reasons().items():
        assert reason == expected.reasons[choice], f"choice {choice} ended as {reason}"
    if line["outcome"] in SUCCESSES and ledger.ended and _from_the_start(ledger):
        assert len(ledger.reasons()) == len(expected.reasons)


def _check_outcome(stage: Stage, line: dict[str, Any], ledger: Ledger, expected: Expected) -> None:
    outcome, message = line["outcome"], line.get("message", "")
    setting = stage.plan.setting
    if outcome in SUCCESSES:
        assert outcome == expected.outcome, f"it ended as {outcome}, not as {expected.outcome}"
    elif outcome == CANCELLED and "by its client" in message:
        assert ledger.cancelled, "nobody cancelled it"
    elif outcome == CANCELLED and "no reader came back" in message:
        absent = ledger.absent_for(setting.resume_ttl_s - SLACK_S, line["ms"] / 1000)
        assert absent, f"it was read all the time: {ledger.attended}, from {ledger.began_at} on"
    elif outcome == CANCELLED:
        assert setting.resume_ttl_s == 0 or not ledger.events, message
    elif outcome == EXPIRED:
        short = setting.queue_timeout_s < 60 if "for its turn" in message else setting.request_timeout_s is not None
        assert short, message
    else:
        assert outcome == ERROR and _may_fail(stage, line, expected), f"it failed: {message}"


def _may_fail(stage: Stage, line: dict[str, Any], expected: Expected | None) -> bool:
    message = line["message"]
    setting = stage.plan.setting
    if message == "on purpose":
        return expected is None or expected.outcome == ERROR
    if "the engine died" in message:
        deaths = stage.engine_kills + 2 * (plan.DIES in setting.scripts)
        return deaths > (setting.restart_wait_s >= 10)
    if "the engine failed" in message:
        return plan.RAISES in setting.scripts
    return "is stopping" in message and stage.drained


def _may_be_cut(setting: Setting, cut: Cut, outcome: str, stage: Stage) -> bool:
    """Whether the server may have ended a reading before its end."""
    plain = cut.door.endswith("plain")
    if plain and (outcome not in SUCCESSES or cut.half_closed):
        return True
    if cut.half_closed and (cut.door.startswith("h2-") or cut.door == "websocket" or cut.stalled):
        return True
    if setting.log_bytes_per_stream < 1024 * 1024:
        return True  # it fell behind what is held
    if cut.stalled and (setting.write_stall_s < 10 or setting.keepalive_s < 1):
        return True
    return stage.drained
