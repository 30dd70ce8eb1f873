"""Minutes of rounds, from a seed that is printed; and the plans and the oracle themselves."""

from __future__ import annotations

import random

import pytest

from tests.faults.__main__ import run
from tests.faults.oracle import Oracle
from tests.faults.plan import EMOJI, Ask, make

pytestmark = pytest.mark.synthetic

SECONDS = 180.0
# What this time surely has of each, on a slow machine too.
LEAST = {"rounds": 8, "streams": 120, "resumes": 40, "stalls": 10, "cancelled": 6}


@pytest.mark.timeout(SECONDS * 2)
def test_minutes_of_faults() -> None:
    seed = random.randrange(2**31)
    print(f"python -m tests.faults --seed {seed} --seconds {SECONDS:g}")
    tally = run(seed, rounds=None, seconds=SECONDS)
    assert {what: tally[what] for what in LEAST if tally[what] < LEAST[what]} == {}, tally


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert all(make(seed) == make(seed) for seed in range(20))
    assert make(1) != make(2)


def test_the_oracle_counts_words() -> None:
    oracle = Oracle(kv_blocks=20)
    expected = oracle.expected(Ask("completions", "x" * 300, max_tokens=100))
    assert (len(expected.texts[0]), expected.reasons) == (5 * 20, ("length",))  # no more fits
    start = int(expected.texts[0][1:5])
    assert expected.texts[0].split() == [f"{(start + n) % 10_000:04d}" for n in range(20)]
    stopped = oracle.expected(Ask("completions", "x" * 300, max_tokens=100, stop=expected.texts[0][10:15]))
    assert (stopped.texts[0], stopped.reasons) == (expected.texts[0][:10], ("stop",))


def test_the_oracle_knows_the_scripts() -> None:
    oracle = Oracle(kv_blocks=100)
    assert oracle.expected(Ask("chat", EMOJI, max_tokens=8)).texts[0].endswith("中")
    assert oracle.expected(Ask("chat", EMOJI, max_tokens=7)).texts[0].endswith("\N{REPLACEMENT CHARACTER}")
