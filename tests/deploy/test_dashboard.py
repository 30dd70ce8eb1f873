"""deploy/grafana-dashboard.json: it is of the types that Grafana publishes for dashboards and panels (npm's
@grafana/schema, checked by TypeScript's compiler with every property that they don't know refused), and its queries say
something about series that a server exports (issue 11, what must hold)."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import FOLDER
from tests.server.test_metrics import CONTRACT
from tests.support.promql import Check, Labels, faults, full_name, judge
from tests.support.serving import REPOSITORY

DASHBOARD: dict[str, Any] = json.loads((REPOSITORY / "deploy" / "grafana-dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(f"{panel['title']}/{target['refId']}", target["expr"]) for panel in PANELS for target in panel["targets"]]
KINDS = {"stat": "StatPanelCfg", "timeseries": "TimeSeriesPanelCfg", "heatmap": "HeatmapPanelCfg"}
# @grafana/schema leaves a target's fields to its data source.
TARGET_FIELDS = {"refId", "datasource", "editorMode", "expr", "legendFormat", "range", "format"}
SAMPLES = 60
INTERVAL_S = 15

# Enumerations are strings and numbers in JSON.
PREAMBLE = "type Json<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Json<T[K]> } : T;"


def _program(dashboard: dict[str, Any]) -> str:
    """The dashboard as a constant of Grafana's types."""
    lines = ['import type { Dashboard } from "@grafana/schema";', PREAMBLE]
    for kind, module in KINDS.items():
        path = f"@grafana/schema/dist/esm/raw/composable/{kind}/panelcfg/x/{module}_types.gen"
        lines.append(f'import type * as {kind} from "{path}";')
    lines.append(f"export const dashboard: Json<Dashboard> = {json.dumps(dashboard)};")
    for panel in dashboard["panels"]:
        if (kind := panel["type"]) == "row":
            continue
        lines.append(f"export const options_{panel['id']}: Json<{kind}.Options> = {json.dumps(panel['options'])};")
        if custom := panel["fieldConfig"]["defaults"].get("custom"):
            lines.append(f"export const custom_{panel['id']}: Json<{kind}.FieldConfig> = {json.dumps(custom)};")
    return "\n".join(lines)


def _complaints(node: str, dashboards: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What TypeScript's compiler says of each by its name; nothing of those that are right."""
    folder = FOLDER / "node_modules"  # beside the packages, where imports are found
    sources = [folder / f"{name}.ts" for name in dashboards]
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"]
    flags += ["--module", "nodenext", "--moduleResolution", "nodenext"]
    argv = [node, "typescript/bin/tsc", *flags, *(source.name for source in sources)]
    try:
        for source in sources:
            source.write_text(_program(dashboards[source.stem]))
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=90, check=False)
    finally:
        for source in sources:
            source.unlink(missing_ok=True)
    assert (done.returncode == 0) == (done.stdout == ""), done.stderr
    said = [line.split(".ts(", 1) for line in done.stdout.splitlines() if ".ts(" in line]
    return {name: " ".join(rest for of, rest in said if of == name) for name in dashboards if name in dict(said)}


def test_it_is_of_grafanas_types_and_what_is_not_is_found(node: str) -> None:
    """Of each broken copy the fault is named: so the types are no `any`, and a property that they don't know is one."""

    def broken(change: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], object]) -> dict[str, Any]:
        copied = copy.deepcopy(DASHBOARD)
        kinds = {kind: next(p for p in copied["panels"] if p["type"] == kind) for kind in ("stat", "timeseries")}
        change(copied, kinds["stat"], kinds["timeseries"])
        return copied

    said = _complaints(
        node,
        {
            "dashboard": DASHBOARD,
            "unknown_field": broken(lambda whole, stat, graph: whole.update(colour="red")),
            "unknown_field_of_a_panel": broken(lambda whole, stat, graph: stat.update(colour="red")),
            "missing_field": broken(lambda whole, stat, graph: stat["gridPos"].pop("y")),
            "unknown_value": broken(lambda whole, stat, graph: stat["options"].update(colorMode="rainbow")),
            "wrong_type": broken(
                lambda whole, stat, graph: graph["fieldConfig"]["defaults"]["custom"].update(lineWidth="thin")
            ),
            "unknown_enumerator": broken(lambda whole, stat, graph: whole.update(graphTooltip=7)),
        },
    )
    assert "dashboard" not in said
    signs = {
        "unknown_field": '"colour"',
        "unknown_field_of_a_panel": '"colour"',
        "missing_field": "'y'",
        "unknown_value": "rainbow",
        "wrong_type": "'number'",
        "unknown_enumerator": "'7'",
    }
    assert {name: sign for name, sign in signs.items() if sign not in said.get(name, "")} == {}


def test_its_parts_are_where_they_can_be_seen() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    cells = [
        (title, x, y)
        for title, at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert all(0 <= x < 24 for _, x, _ in cells)
    assert len({(x, y) for _, x, y in cells}) == len(cells), "panels overlap"


def test_every_target_reads_the_chosen_prometheus() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["datasource"] == source
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert set(target) <= TARGET_FIELDS
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "job"]


def _plain(query: str) -> str:
    """With Grafana's variables filled in, as for all jobs and a minute between points."""
    query = query.replace("$__rate_interval", "1m").replace("$job", ".+")
    assert "$" not in query
    return query


@pytest.mark.parametrize(("name", "query"), QUERIES, ids=[name for name, _ in QUERIES])
def test_a_query_names_what_is_exported(name: str, query: str, series: dict[str, list[Labels]]) -> None:
    assert faults(_plain(query), series) == []


@pytest.mark.parametrize(
    "query",
    [
        "rate(sluice_tokens_total[1m])",
        'sluice_streams{status="running"}',
        'sluice_streams{state="walking"}',
        'sluice_requests_total{outcome=~"error|lost"}',
        "sum by (model) (sluice_streams)",
        "up",
    ],
)
def test_a_query_that_names_something_else_is_found(query: str, series: dict[str, list[Labels]]) -> None:
    assert len(faults(query, series)) == 1


def test_every_metric_is_shown_somewhere() -> None:
    text = " ".join(query for _, query in QUERIES)
    assert [name for name in sorted(CONTRACT) if name not in text] == []


def test_every_query_has_a_value_where_all_series_grow(tmp_path: Path, series: dict[str, list[Labels]]) -> None:
    """`absent` has none of its own then. By promtool, which so parses and runs each."""
    growing = [float(value) for value in range(1, SAMPLES + 1)]
    samples = {full_name(name, labels): growing for name, known in series.items() for labels in known}
    checks = [Check(f"absent({_plain(query)})", (SAMPLES - 1) * INTERVAL_S, None) for _, query in QUERIES]
    done = judge(tmp_path, samples, checks, interval_s=INTERVAL_S)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = [Check("absent(sluice_streams{state='walking'})", 60, None)]
    assert judge(tmp_path, samples, wrong, interval_s=INTERVAL_S).returncode != 0  # it does look
