"""Tool calls from tokens to a stream's log: reasons, frames, and what an answer in one piece has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.wire import End, Logprob, Step
from server import outcome as outcomes
from server.framing import Plain
from server.stream import Stream
from server.tools.formats import CallFormat
from server.tools.parser import HERMES
from tests.support.engines import EOS
from tests.support.tables import Client, Rig

CALLS = CallFormat(HERMES, frozenset(("f", "g")))
ONE_CALL = CallFormat(HERMES, frozenset(("f",)), calls_max=1)
F = '<tool_call>\n{"name": "f", "arguments": {"é": "\\"x\\u2028\u2028"}}\n</tool_call>'
ARGUMENTS = '{"é": "\\"x\\u2028\u2028"}'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def finish(rig: Rig, stream: Stream, reason: str = "stop") -> None:
    id_ = stream.choices[0].sequence_id
    ends = [End(id_, reason, by_token=True)] if reason == "stop" else []
    rig.table.on_step(rig.engine.tokens([(id_, EOS)] if ends else [], *(ends or [End(id_, reason)])))


def deltas(client: Client) -> list[dict[str, Any]]:
    return [choice["delta"] for event in client.events for choice in event.get("choices", ())]


def calls_in(shown: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """As clients accumulate them; checks that id, type and name come once, first."""
    calls: list[list[str]] = []
    for delta in shown:
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"].startswith("call_") and part["type"] == "function"
                calls.append([part["function"]["name"], ""])
            else:
                assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
            calls[part["index"]][1] += part["function"]["arguments"]
    return [(name, arguments) for name, arguments in calls]


def test_calls_are_deltas_of_their_own_and_the_reason_is_tool_calls() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS)
    rig.play(client.stream, f"Hm.\n{F}\n{G}")
    finish(rig, client.stream)
    assert client.text == "Hm.\n"
    assert calls_in(deltas(client)) == [("f", ARGUMENTS), ("g", "{}")]
    assert client.stream.outcome and client.stream.outcome.kind == outcomes.TOOL_CALLS
    reasons = [c["finish_reason"] for event in client.events for c in event.get("choices", ()) if c["finish_reason"]]
    assert reasons == ["tool_calls"]
    assert client.channel.data.isascii() or "\u2028" not in client.channel.data.decode()


def test_without_a_parser_the_same_text_is_text() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open()
    rig.play(client.stream, F)
    finish(rig, client.stream)
    assert client.text == F
    assert client.stream.outcome and client.stream.outcome.kind == outcomes.STOP


@pytest.mark.parametrize("text", ["Just text.", "", "<tool_call>{no}"])
def test_an_answer_without_calls_stops_as_ever(text: str) -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS)
    rig.play(client.stream, text)
    finish(rig, client.stream)
    assert client.text == text
    assert client.stream.outcome and client.stream.outcome.kind == outcomes.STOP


@pytest.mark.parametrize("length", range(len(F)))
def test_a_call_that_is_cut_says_length_and_shows_a_prefix(length: int) -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS)
    rig.play(client.stream, F[:length])
    finish(rig, client.stream, "length")
    assert client.stream.outcome and client.stream.outcome.kind == outcomes.LENGTH
    for name, arguments in calls_in(deltas(client)):
        assert name == "f" and ARGUMENTS.startswith(arguments)


def test_the_whole_answer_is_the_joined_deltas() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS, collect=True)
    rig.play(client.stream, f"{F}\n{G}")
    finish(rig, client.stream)
    (choice,) = json.loads(client.stream.grammar.whole(client.stream))["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert whole == calls_in(deltas(client))
    ids = [part["id"] for delta in deltas(client) for part in delta.get("tool_calls", ()) if "id" in part]
    assert [call["id"] for call in message["tool_calls"]] == ids and len(set(ids)) == 2


def test_choices_have_parsers_of_their_own() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS, n=2, collect=True)
    for char in G:  # by turns
        rig.play(client.stream, char, 0)
        rig.play(client.stream, char, 1)
    assert [len(choice.calls) for choice in client.stream.choices] == [1, 1]


def test_where_one_call_is_allowed_the_answer_ends_behind_it() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=ONE_CALL)
    id_ = client.stream.choices[0].sequence_id
    rig.play(client.stream, F[: F.rindex("}") + 1])
    assert client.stream.outcome and client.stream.outcome.kind == outcomes.TOOL_CALLS
    assert id_ in rig.engine.cancelled
    assert calls_in(deltas(client)) == [("f", ARGUMENTS)]


def test_log_probabilities_of_tool_syntax_ride_on_empty_text() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS, collect=True)
    id_ = client.stream.choices[0].sequence_id
    for char in f"a{G}b":
        step = rig.engine.tokens([(id_, ord(char))])
        rig.table.on_step(Step(step.ids, step.tokens, [], [], [Logprob(0, -1.0, [], [])], step.gauges))
    finish(rig, client.stream)
    shown = [c["logprobs"]["content"] for e in client.events for c in e.get("choices", ()) if c["logprobs"]]
    assert "".join(entry["token"] for part in shown for entry in part) == f"a{G}b"
    assert client.text == "ab"
    assert client.stream.choices[0].shown == ["a", "b"]


def test_plain_text_shows_the_text_and_positions_stay_the_same_for_all() -> None:
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CALLS)
    plain = Client(client.stream, framing=Plain(client.stream))
    rig.play(client.stream, f"x{F}y")
    finish(rig, client.stream)
    assert plain.channel.data == b"xy"
    whole = client.channel.data.splitlines()
    for position in range(len(whole)):
        late = Client(client.stream, position)
        assert late.channel.data.splitlines() == whole[position:]


def test_markers_that_are_special_tokens_reach_the_parser_and_no_text() -> None:
    """As in Llama 3 and Mistral: skipped in any other answer."""
    syntax = replace(HERMES, marker="<|end|>", close="")
    rig = Rig(credit_window=10_000)
    client = rig.open(calls=CallFormat(syntax, frozenset("f"), marker_ids=frozenset([EOS])))
    plain = rig.open()
    for stream in (client.stream, plain.stream):
        id_ = stream.choices[0].sequence_id
        for token in (*b"so ", EOS, *b'{"name": "f", "arguments": {}}'):
            rig.table.on_step(rig.engine.tokens([(id_, token)]))
        finish(rig, stream)
    assert client.text == "so " and calls_in(deltas(client)) == [("f", "{}")]
    assert plain.text == 'so {"name": "f", "arguments": {}}'
