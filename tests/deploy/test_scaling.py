"""deploy/keda.yaml and deploy/prometheus.yml: they are what KEDA and Prometheus take; the triggers' queries name what a
server exports; and they rise before first tokens are late, where a processor's utilisation tells nothing (issue 11).

The load is played on the real scheduler, table and metrics, on a clock of its own (tests/support/simulation.py), and
the queries are evaluated by Prometheus' promtool on what each scrape showed."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.conftest import FOLDER
from tests.support.promql import TARGET, Check, Labels, faults, full_name, judge
from tests.support.serving import REPOSITORY
from tests.support.simulation import Request, Scrape, Simulation
from tests.support.tools import tool

DEPLOY = REPOSITORY / "deploy"
SCALED: dict[str, Any] = yaml.safe_load((DEPLOY / "keda.yaml").read_text())
TRIGGERS: dict[str, dict[str, str]] = {each["name"]: each["metadata"] for each in SCALED["spec"]["triggers"]}

SCRAPE_S = 5
TTFT_P95 = "histogram_quantile(0.95, sum by (le) (rate(sluice_ttft_seconds_bucket[15s])))"


def _validate(node: str, document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    argv = [node, str(FOLDER / "keda.mjs")]
    return subprocess.run(argv, input=json.dumps(document), capture_output=True, text=True, timeout=60, check=False)


def test_the_scaled_object_is_one_by_kedas_schema(node: str) -> None:
    done = _validate(node, SCALED)
    assert done.returncode == 0, done.stderr
    broken = copy.deepcopy(SCALED)
    broken["spec"]["triggers"][0]["metricType"] = 5
    assert "metricType" in _validate(node, broken).stderr  # it does look


def test_its_triggers_are_means_over_the_servers() -> None:
    """With `Value` the autoscaler multiplies the replicas that there are by a value's part of its threshold."""
    assert list(TRIGGERS) == ["fill", "places"]
    assert all(each["metricType"] == "Value" for each in SCALED["spec"]["triggers"])
    assert all(0 < float(each["threshold"]) < 1 for each in TRIGGERS.values())


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_trigger_names_what_is_exported(name: str, series: dict[str, list[Labels]]) -> None:
    assert faults(TRIGGERS[name]["query"], series) == []


def test_prometheus_takes_the_scrape_configuration(tmp_path: Path) -> None:
    """With the credentials' file where this machine has one."""
    text = (DEPLOY / "prometheus.yml").read_text()
    document = yaml.safe_load(text)
    (job,) = document["scrape_configs"]
    assert job["job_name"] == TARGET["job"]
    assert f'job="{job["job_name"]}"' in TRIGGERS["fill"]["query"]
    key = tmp_path / "key"
    key.write_text("secret")
    config = tmp_path / "prometheus.yml"
    config.write_text(text.replace(job["authorization"]["credentials_file"], str(key)))
    argv = [tool("promtool", "prometheus"), "check", "config", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def ramp(last_per_s: float, seconds: float, *, prompt_tokens: int, answer_tokens: int) -> list[Request]:
    """Ever more requests a second, from one each two seconds on."""
    load, at_s = [], 0.0
    while at_s < seconds:
        load.append(Request(at_s, prompt_tokens, answer_tokens))
        at_s += 1 / (0.5 + (last_per_s - 0.5) * at_s / seconds)
    return load


@dataclass(slots=True)
class History:
    """What was scraped, one column each SCRAPE_S. The first is the server before it had anything to do."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    utilisation: list[float] = field(default_factory=list)

    def add(self, scrape: Scrape) -> None:
        """A column."""
        for family in text_string_to_metric_families(scrape.text):
            for sample in family.samples:
                name = full_name(sample.name, {**TARGET, **sample.labels})
                self.samples.setdefault(name, []).append(sample.value)
        self.utilisation.append(scrape.utilisation)

    def first(self, folder: Path, query: str, threshold: float) -> int:
        """The first column in which the query's value is over the threshold, by promtool."""
        low, high = 0, len(self.utilisation) - 1
        over = self._over(folder, query, threshold)
        assert not over(low)
        assert over(high)
        while high - low > 1:  # a load that only grows: what is over the threshold stays over it
            middle = (low + high) // 2
            low, high = (low, middle) if over(middle) else (middle, high)
        return high

    def _over(self, folder: Path, query: str, threshold: float) -> Callable[[int], bool]:
        def over(column: int) -> bool:
            checks = [Check(f"({query}) > bool {threshold}", column * SCRAPE_S, 1.0)]
            return judge(folder, self.samples, checks, interval_s=SCRAPE_S).returncode == 0

        return over


@pytest.fixture(scope="module", params=["fill", "places"])
def played(request: pytest.FixtureRequest) -> tuple[str, History]:
    """A load that grows until the server is far behind: one of long answers, which fills the pool first, and one of
    short ones on few places, which leaves it almost empty."""
    if request.param == "fill":
        simulation = Simulation(pool_tokens=16384, running_max=256)
        load = ramp(9, 240, prompt_tokens=300, answer_tokens=200)
    else:
        simulation = Simulation(pool_tokens=65536, running_max=8)
        load = ramp(6, 240, prompt_tokens=300, answer_tokens=100)
    history = History()
    for scrape in simulation.play(load, scrape_every_s=SCRAPE_S, until_s=240):
        history.add(scrape)
    return request.param, history


def test_tokens_tell_of_a_load_before_first_tokens_are_late(played: tuple[str, History], tmp_path: Path) -> None:
    """Late: twice as long as on an empty server. The trigger fires many scrapes before, and a processor that has
    something to do all the time says from the beginning on what it says at the end."""
    name, history = played
    trigger = TRIGGERS[name]
    idle = 0.06  # an empty server's: one step for the prompt, 50 ms, in its bucket
    fires = history.first(tmp_path, trigger["query"], float(trigger["threshold"]))
    late = history.first(tmp_path, TTFT_P95, 2 * idle)
    assert late - fires >= 4  # 20 s, which is time to start a server
    assert not history._over(tmp_path, TTFT_P95, idle)(fires)
    told = [round(share, 1) for share in history.utilisation[2:]]
    assert set(told) == {1.0}  # from the tenth second on, at a twentieth of the load


def test_each_trigger_is_needed(played: tuple[str, History], tmp_path: Path) -> None:
    """Where the one tells of the load in time, the other doesn't."""
    name, history = played
    other = TRIGGERS["places" if name == "fill" else "fill"]
    late = history.first(tmp_path, TTFT_P95, 0.12)
    assert not history._over(tmp_path, other["query"], float(other["threshold"]))(late)


def test_without_an_engine_a_trigger_has_no_value(tmp_path: Path, series: dict[str, list[Labels]]) -> None:
    """Not 0, on which servers would be stopped, nor infinity: KEDA then leaves things as they are."""
    samples = {full_name(name, labels): [0.0, 0.0] for name, known in series.items() for labels in known}
    checks = [Check(trigger["query"], SCRAPE_S, None) for trigger in TRIGGERS.values()]
    done = judge(tmp_path, samples, checks, interval_s=SCRAPE_S)
    assert done.returncode == 0, done.stdout + done.stderr
