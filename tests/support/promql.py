"""Queries in PromQL, judged by Prometheus' own promtool against series that a server really exports."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.tools import tool

# What Prometheus adds to every series that it scrapes.
TARGET = {"job": "sluice", "instance": "sluice-0:8000"}

_selector = re.compile(r"\b(sluice_[a-z_]+)\s*(?:\{([^}]*)\})?")
_matcher = re.compile(r"\s*([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"\s*(?:,|$)")
_grouping = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")

Labels = dict[str, str]


def exported(text: str) -> dict[str, list[Labels]]:
    """The series that `/metrics` shows, by name: each one's labels, the target's included."""
    series: dict[str, list[Labels]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, []).append({**TARGET, **sample.labels})
    return series


def faults(query: str, series: Mapping[str, list[Labels]]) -> list[str]:
    """What a query names that isn't exported: metrics, labels, and values of labels from closed sets."""
    found = []
    selectors = _selector.findall(query)
    if not selectors:
        found.append("it selects nothing of ours")
    for name, matchers in selectors:
        if name not in series:
            found.append(f"no metric {name}")
            continue
        known = series[name]
        if _matcher.sub("", matchers).strip():
            found.append(f"matchers that can't be read: {matchers}")
        for label, wanted in _matcher.findall(matchers):
            values = {labels[label] for labels in known if label in labels}
            if not values:
                found.append(f"{name} has no label {label}")
            elif not any(re.fullmatch(part, value) for part in [wanted] for value in values):
                found.append(f"no {name} has {label}={wanted}")
            elif lost := [each for each in wanted.split("|") if not any(re.fullmatch(each, v) for v in values)]:
                found.append(f"no {name} has {label}={lost[0]}")
    grouped = {label.strip() for group in _grouping.findall(query) for label in group.split(",")} - {""}
    labels = {label for name, _ in selectors for each in series.get(name, []) for label in each}
    found += [f"nothing that it selects has a label {label}" for label in sorted(grouped - labels)]
    return found


@dataclass(frozen=True, slots=True)
class Check:
    """`query` is `value` (None: has no value) so many seconds after the first sample."""

    query: str
    at_s: float
    value: float | None


def judge(
    folder: Path, samples: Mapping[str, list[float]], checks: Iterable[Check], *, interval_s: int
) -> subprocess.CompletedProcess[str]:
    """promtool's verdict on queries of series, whose samples are `interval_s` apart, each by its full name."""
    test = {
        "interval": f"{interval_s}s",
        "input_series": [{"series": name, "values": " ".join(map(str, values))} for name, values in samples.items()],
        "promql_expr_test": [
            {
                "expr": check.query,
                "eval_time": f"{round(check.at_s * 1000)}ms",
                "exp_samples": [] if check.value is None else [{"labels": "{}", "value": check.value}],
            }
            for check in checks
        ],
    }
    document: dict[str, Any] = {"rule_files": [], "evaluation_interval": f"{interval_s}s", "tests": [test]}
    path = folder / "test.yml"
    path.write_text(json.dumps(document))  # YAML holds JSON
    argv = [tool("promtool", "prometheus"), "test", "rules", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def full_name(name: str, labels: Labels) -> str:
    """As PromQL writes a series."""
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in sorted(labels.items()))}}}"
