"""server.api.json_checks: names given twice, and bodies of more values than the loop has time for."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.errors import ApiError
from server.api.json_checks import (
    BODY_IDS_MAX,
    DIGITS_MAX,
    MARKS_MAX,
    _bare,
    ids_in_prompt,
    refuse_crowded_arguments,
    refuse_crowds,
    refuse_repeated_names,
)

TEXTS = st.recursive(
    st.integers() | st.text('a"\\\n[{:,}]é'), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\:a'), inner)
)


def crowd(item: str, count: int) -> bytes:
    return f"[{','.join([item] * count)}]".encode()


@pytest.mark.parametrize(
    "body",
    [
        crowd("[]", MARKS_MAX // 2 + 1),
        crowd("{}", MARKS_MAX // 2 + 1),
        crowd("1", MARKS_MAX + 1),
        crowd('"\\\\"', MARKS_MAX + 1),
        ("{" + ",".join(f'"{n}":1' for n in range(MARKS_MAX // 2 + 1)) + "}").encode(),
    ],
    ids=["lists", "objects", "numbers", "strings", "names"],
)
def test_a_crowd_of_values_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="131,072") as refused:
        refuse_crowds(body)
    assert refused.value.status == 400


def test_just_as_many_are_none() -> None:
    refuse_crowds(crowd("1", MARKS_MAX))


@pytest.mark.parametrize("text", [",", "[{:", '\\",', "\\u002c,\\\\"], ids=["commas", "marks", "quotes", "escapes"])
def test_what_is_in_a_text_is_not_counted(text: str) -> None:
    body = f'{{"a":"{text * MARKS_MAX * 2}","b":"{text}"}}'.encode()
    json.loads(body)
    refuse_crowds(body)


def test_token_ids_have_a_limit_of_their_own_and_lists_of_them_have_the_others() -> None:
    refuse_crowds(crowd("1", BODY_IDS_MAX), ids=BODY_IDS_MAX)
    refuse_crowds(b'{"prompt":"%b"}' % (b"," * BODY_IDS_MAX * 2), ids=BODY_IDS_MAX)
    with pytest.raises(ApiError, match=r"token ids.*262,144"):
        refuse_crowds(crowd("1", BODY_IDS_MAX + 2), ids=BODY_IDS_MAX)
    with pytest.raises(ApiError, match="131,072"):
        refuse_crowds(crowd("[1]", MARKS_MAX), ids=BODY_IDS_MAX)


def test_a_crowd_of_texts_among_ids_is_not_cut_apart() -> None:
    """Which would take as long as reading them."""
    with pytest.raises(ApiError, match="names, values"):
        refuse_crowds(crowd('"a"', BODY_IDS_MAX * 2), ids=BODY_IDS_MAX)


@pytest.mark.parametrize("number", ["1" * DIGITS_MAX * 2, "-0." + "3" * DIGITS_MAX * 3, "9" * 4000])
@pytest.mark.parametrize("before", [0, 1, 77, DIGITS_MAX - 1])
def test_a_number_that_is_too_long_is_found_wherever_it_stands(number: str, before: int) -> None:
    body = f'{{"a":"{"x" * before}","b":"{"y" * MARKS_MAX}","c":{number}}}'.encode()
    json.loads(body)
    with pytest.raises(ApiError, match="digits"):
        refuse_crowds(body)


@pytest.mark.parametrize(
    "value", [f'"{"1" * MARKS_MAX * 2}"', ",".join([f'"{"1" * 100}\\""'] * 2000), ",".join(["1." + "5" * 60] * 9000)]
)
def test_digits_of_a_text_and_of_common_numbers_are_no_such_number(value: str) -> None:
    body = f"[{value}]".encode()
    json.loads(body)
    refuse_crowds(body)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ('{"prompt":[1,2,3],"stop":["a,b","c"]}', 3),
        ('{"n": 2, "prompt" : [ 1 , 2 ]}', 2),
        ('{"prompt":[-1]}', 1),
        ('{"prompt":[1,2', 2),
        ('{"prompt":[[1,2],[3]]}', 0),
        ('{"prompt":["1,2"]}', 0),
        ('{"prompt":"1,2","stop_token_ids":[1,2]}', 0),
        ('{"user":"prompt","stop_token_ids":[1,2]}', 0),
        ('{"messages":[]}', 0),
    ],
)
def test_ids_of_the_one_prompt_are_counted_before_anything_is_decoded(body: str, count: int) -> None:
    assert ids_in_prompt(body.encode()) == count


@given(value=TEXTS, escapes=st.booleans())
def test_a_body_without_its_texts_is_what_a_pattern_leaves(value: Any, escapes: bool) -> None:
    written = json.dumps(value, ensure_ascii=escapes).encode(errors="replace")
    assert _bare(written) == re.sub(rb'"(?:[^"\\]|\\.)*"', b"", written)


def test_a_crowd_in_what_calls_are_given_is_refused() -> None:
    half = '{"a":[' + ",".join(["[]"] * (MARKS_MAX // 4)) + "]}"
    refuse_crowded_arguments([half], "messages")
    with pytest.raises(ApiError, match="calls") as refused:
        refuse_crowded_arguments([half, half, half], "messages")
    assert refused.value.param == "messages"


@pytest.mark.parametrize("end", ["", "\\", '\\"'], ids=["open", "a backslash", "an escape"])
def test_a_text_without_an_end_is_looked_at_once(end: str) -> None:
    """Each of its quotes would have it read again, which takes minutes."""
    refuse_crowds(('["' + '\\",' * 1_000_000 + end).encode())


class Repeating(dict[str, Any]):
    """Written with its first name twice."""


def _written(value: Any) -> str:
    """JSON whose strings are escaped here and there, also where they needn't be."""
    if isinstance(value, str):
        return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) % 3 else c for c in value) + '"'
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        pairs = [*value.items(), *(list(value.items())[:1] if isinstance(value, Repeating) else [])]
        return "{" + " , ".join(f"{_written(name)} : {_written(item)}" for name, item in pairs) + "}"
    return json.dumps(value)


def _repeats(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, Repeating) and bool(value)) or any(map(_repeats, items))


NAMES = st.text("a:;=~", max_size=2)  # some are written as escapes, the colon among them
DOCUMENTS = st.recursive(
    st.none() | st.integers() | NAMES | st.sampled_from(["\\u003a", "\x0b:"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3)
        | st.dictionaries(NAMES, inner, max_size=3).map(Repeating)
    ),
    max_leaves=12,
)


@given(DOCUMENTS)
@settings(deadline=None, max_examples=500)
def test_a_name_is_never_given_twice(document: Any) -> None:
    """RFC 8259 section 4: however deep, however it is written, and whatever else holds a colon."""
    with pytest.raises(ApiError, match="twice") if _repeats(document) else nullcontext():
        refuse_repeated_names(_written(document))
