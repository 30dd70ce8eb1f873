"""`python -m tests.faults --seed N [--rounds N | --seconds N]`: rounds of faults, one after another, and a summary.

Round k plays seed N + k, so a failure's seed alone plays its round again. Exit code 1 when a round fails."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from tests.faults.rounds import RoundFailed, play


def run(seed: int, *, rounds: int | None, seconds: float | None) -> Counter[str]:
    """Rounds until there were so many, or the time is over; what was done in all of them. Raises RoundFailed."""
    tally: Counter[str] = Counter()
    began = time.monotonic()
    while (rounds is None or tally["rounds"] < rounds) and (seconds is None or time.monotonic() - began < seconds):
        tally += play(seed + tally["rounds"])
        tally["rounds"] += 1
        _show_progress(seed, tally, time.monotonic() - began)
    return tally


def _show_progress(seed: int, tally: Counter[str], seconds: float) -> None:
    if sys.stderr.isatty():
        line = (
            f"{seconds:6.0f} s, seed {seed + tally['rounds'] - 1}: {tally['rounds']} rounds, {tally['streams']} streams"
        )
        print(f"\r{line}, {tally['resumes']} resumes", end="", file=sys.stderr, flush=True)


def _show_summary(tally: Counter[str]) -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for what, count in sorted(tally.items()):
        print(f"{count:10} {what}")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of the first round")
    parser.add_argument("--rounds", type=int, help="how many; without --seconds one")
    parser.add_argument("--seconds", type=float, help="how long")
    options = parser.parse_args()
    rounds = 1 if options.rounds is None and options.seconds is None else options.rounds
    print(f"seed {options.seed}", flush=True)
    try:
        _show_summary(run(options.seed, rounds=rounds, seconds=options.seconds))
    except RoundFailed as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
