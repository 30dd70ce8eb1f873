"""What came of each case, the score of each profile, and the report that machines read."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conformance_kit.rules import PROFILES

PASSED, FAILED, ABSENT = "passed", "failed", "not offered"
REPORT_VERSION = 1
_DETAIL_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class Result:
    """One case against one server."""

    case: str  # pytest's id
    target: str
    profile: str
    level: str  # must or should
    rule: str
    source: str
    outcome: str
    detail: str = ""  # why it failed, or what is not offered
    seconds: float = 0.0


class Score:
    """All results of a run."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.http1_only: Counter[str] = Counter()  # cases that didn't run since HTTP/2 was asked for, by profile

    def add(self, result: Result) -> None:
        """Cases are added once each, in the order in which they ran."""
        self.results.append(result)

    def groups(self) -> Iterator[tuple[str, str, list[Result]]]:
        """(profile, target, results), in the order of PROFILES."""
        for profile in PROFILES:
            for target in dict.fromkeys(result.target for result in self.results):
                chosen = [r for r in self.results if (r.profile, r.target) == (profile, target)]
                if chosen:
                    yield profile, target, chosen

    def lines(self) -> list[str]:
        """For people: a line for each profile, then each failure with its rule, then what is not offered."""
        out: list[str] = []
        for profile, target, results in self.groups():
            count = Counter(result.outcome for result in results)
            judged = count[PASSED] + count[FAILED]
            score = f"{100 * count[PASSED] / judged:5.1f} %" if judged else "not offered"
            must = sum(r.outcome == FAILED and r.level == "must" for r in results)
            out.append(
                f"{profile:10} {target:7} {score:>11}  {count[PASSED]:4} passed, {count[FAILED]:3} failed"
                f" ({must} must, {count[FAILED] - must} should), {count[ABSENT]:3} not offered"
            )
        out += [
            f"{profile:10} {n} cases are about HTTP/1.1 only, and did not run" for profile, n in self.http1_only.items()
        ]
        failed = [result for result in self.results if result.outcome == FAILED]
        out += ["", "Failures, each with its rule:"] if failed else []
        for result in failed:
            out += [f"- {result.case}", f"    {result.level}: {result.rule} [{result.source}]", f"    {result.detail}"]
        reasons = Counter((r.profile, r.target, r.detail) for r in self.results if r.outcome == ABSENT)
        out += ["", "Not offered:"] if reasons else []
        out += [f"- {profile} ({target}): {n} cases: {why}" for (profile, target, why), n in reasons.items()]
        return out

    def write(self, path: Path, url: str, *, http2: bool) -> None:
        """The report: one JSON object. `http2`: every profile spoke it."""
        scores: dict[str, dict[str, dict[str, int]]] = {}
        for profile, target, results in self.groups():
            count = Counter(result.outcome for result in results)
            must = sum(r.outcome == FAILED and r.level == "must" for r in results)
            names = {PASSED: "passed", FAILED: "failed", ABSENT: "not_offered"}
            counts = {name: count[outcome] for outcome, name in names.items()}
            scores.setdefault(profile, {})[target] = {**counts, "failed_must": must}
        document: dict[str, Any] = {
            "version": REPORT_VERSION,
            "server": url,
            "http2": http2,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "scores": scores,
            "http1_only": dict(self.http1_only),
            "cases": [asdict(result) for result in self.results],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def shortened(text: str) -> str:
    """The part of a failure's message that fits in a report."""
    line = " ".join(text.split())
    return line if len(line) <= _DETAIL_CHARS_MAX else line[: _DETAIL_CHARS_MAX - 1] + "…"
