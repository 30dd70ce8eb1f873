"""Metrics: the text parses, the series never change, and the sums agree."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.wire import Gauges
from server.metrics import (
    APIS,
    ITL_BUCKETS_S,
    OUTCOMES,
    PROTOCOLS,
    REQUEST_BUCKETS_S,
    RESUME_RESULTS,
    STATES,
    TTFT_BUCKETS_S,
    Histogram,
    Live,
    Metrics,
    summed,
)
from server.outcome import REFUSED, Outcome
from tests.support.serving import Server
from tests.support.tables import Client, Rig
from tests.support.tools import tool

# DESIGN section 5, with `_total` where the format puts it.
CONTRACT = {
    "sluice_requests_started",
    "sluice_requests",
    "sluice_ttft_seconds",
    "sluice_itl_seconds",
    "sluice_request_seconds",
    "sluice_queue_seconds",
    "sluice_streams",
    "sluice_queue_tokens",
    "sluice_running_tokens",
    "sluice_token_capacity",
    "sluice_kv_blocks",
    "sluice_connections",
    "sluice_prompt_tokens",
    "sluice_generated_tokens",
    "sluice_cached_tokens",
    "sluice_tokens_discarded",
    "sluice_preemptions",
    "sluice_resumes",
    "sluice_engine_restarts",
    # Beyond it: places in the batch may run out before the pool does.
    "sluice_sequences",
    "sluice_sequence_capacity",
}

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def live(**gauges: int) -> Live:
    return Live(dict.fromkeys(STATES, 1), dict.fromkeys(PROTOCOLS, 2), Gauges(**gauges), 4096, 64)


def scrape(metrics: Metrics) -> Series:
    text = metrics.render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def metrics_with_live() -> Metrics:
    metrics = Metrics()
    metrics.live = live
    return metrics


def test_the_text_parses_and_holds_every_family_of_the_contract() -> None:
    families = list(text_string_to_metric_families(metrics_with_live().render().decode()))
    names = [family.name for family in families]
    assert set(names) == CONTRACT
    assert len(set(names)) == len(names)
    assert all(family.documentation for family in families)


def test_labels_come_from_closed_sets() -> None:
    labels: dict[str, set[str]] = {}
    for _, pairs in scrape(metrics_with_live()):
        for name, label in pairs:
            labels.setdefault(name, set()).add(label)
    labels.pop("le")
    assert labels == {
        "api": set(APIS),
        "outcome": set(OUTCOMES),
        "state": {*STATES, "used", "cached", "free", "waiting"},
        "protocol": set(PROTOCOLS),
        "result": set(RESUME_RESULTS),
    }


def test_the_series_are_the_same_from_the_first_scrape_on() -> None:
    """G03."""
    metrics = metrics_with_live()
    before = scrape(metrics).keys()
    rng = random.Random(1)
    for _ in range(500):
        metrics.unbegun(rng.choice(APIS), rng.choice(OUTCOMES))
        metrics.ttft.observe(rng.expovariate(1))
        metrics.resumes[rng.choice(RESUME_RESULTS)] += 1
        metrics.ended[rng.choice(APIS), rng.choice(OUTCOMES)] += 1
    assert scrape(metrics).keys() == before


def test_a_label_outside_the_set_is_a_mistake_at_once() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.unbegun("a path of a client's", REFUSED)
    assert sum(metrics.ended.values()) == 0


def test_a_refusal_counts_as_started_and_as_ended() -> None:
    metrics = Metrics()
    metrics.unbegun("chat", REFUSED)
    series = scrape(metrics)
    assert value(series, "sluice_requests_started_total", api="chat") == 1
    assert value(series, "sluice_requests_total", api="chat", outcome="refused") == 1


def test_streams_are_counted_where_they_end() -> None:
    rig = Rig()
    for _ in range(3):
        client = rig.open()
        rig.admit(client.stream, cached=2)
        rig.play(client.stream, "abcd")
        rig.end(client.stream)
    rig.open().stream.finish(Outcome("cancelled"))
    series = scrape(rig.metrics)
    assert value(series, "sluice_requests_started_total", api="chat") == 4
    assert value(series, "sluice_requests_total", api="chat", outcome="stop") == 3
    assert value(series, "sluice_requests_total", api="chat", outcome="cancelled") == 1
    assert value(series, "sluice_prompt_tokens_total") == 12
    assert value(series, "sluice_cached_tokens_total") == 6
    assert value(series, "sluice_generated_tokens_total") == 12
    assert value(series, "sluice_ttft_seconds_count") == 3
    assert value(series, "sluice_itl_seconds_count") == 9
    assert value(series, "sluice_queue_seconds_count") == 3
    assert value(series, "sluice_request_seconds_count") == 4


@pytest.mark.parametrize("leaves", [False, True])
def test_how_long_a_reader_stood_still_is_no_latency_of_ours(leaves: bool) -> None:
    rig = Rig(credit_window=4)
    client = rig.open()
    rig.admit(client.stream)
    rig.play(client.stream, "ab")
    client.stall()
    rig.run_dry(client.stream)
    if leaves:
        client.leave()
    rig.clock.advance(20)
    if leaves:
        Client(client.stream, client.reader.cursor)
    else:
        client.go_on()
    rig.clock.advance(0.5)  # this is
    rig.play(client.stream, "c")
    series = scrape(rig.metrics)
    assert value(series, "sluice_itl_seconds_sum") == pytest.approx(0.5)
    assert value(series, "sluice_itl_seconds_count") == len(client.stream.choices[0].generated) - 1


def test_gauges_are_read_at_the_scrape() -> None:
    metrics = Metrics()
    gauges = {"blocks_used": 5, "blocks_cached": 6, "blocks_free": 7, "waiting_tokens": 8, "running_tokens": 9}
    metrics.live = lambda: live(preemptions=4, waiting=1, running=2, parked=3, **gauges)
    series = scrape(metrics)
    assert [value(series, "sluice_kv_blocks", state=s) for s in ("used", "cached", "free")] == [5, 6, 7]
    assert value(series, "sluice_queue_tokens") == 8
    assert value(series, "sluice_running_tokens") == 9
    assert value(series, "sluice_token_capacity") == 4096
    assert [value(series, "sluice_sequences", state=s) for s in ("waiting", "running", "parked")] == [1, 2, 3]
    assert value(series, "sluice_sequence_capacity") == 64
    assert value(series, "sluice_preemptions_total") == 4
    assert value(series, "sluice_connections", protocol="websocket") == 2
    metrics.live = lambda: live()
    assert value(scrape(metrics), "sluice_kv_blocks", state="used") == 0


def test_histograms_are_cumulative_and_a_bound_belongs_to_its_bucket() -> None:
    metrics = Metrics()
    metrics.ttft = Histogram(TTFT_BUCKETS_S)
    for seconds in (0.005, 0.0051, 0.3, 61.0):
        metrics.ttft.observe(seconds)
    series = scrape(metrics)
    buckets = [value(series, "sluice_ttft_seconds_bucket", le=str(bound)) for bound in TTFT_BUCKETS_S]
    assert buckets == sorted(buckets)
    assert value(series, "sluice_ttft_seconds_bucket", le="0.005") == 1
    assert value(series, "sluice_ttft_seconds_bucket", le="0.01") == 2
    assert value(series, "sluice_ttft_seconds_bucket", le="60.0") == 3
    assert value(series, "sluice_ttft_seconds_bucket", le="+Inf") == value(series, "sluice_ttft_seconds_count") == 4
    assert value(series, "sluice_ttft_seconds_sum") == pytest.approx(61.3101)


@pytest.mark.parametrize(
    ("bounds", "least_s", "most_s", "factor"),
    [(TTFT_BUCKETS_S, 0.04, 5.0, 1.7), (ITL_BUCKETS_S, 0.01, 0.2, 1.5), (REQUEST_BUCKETS_S, 1.0, 120.0, 1.7)],
    ids=["TTFT", "ITL", "request"],
)
def test_bounds_lie_close_where_goals_are_set(
    bounds: tuple[float, ...], least_s: float, most_s: float, factor: float
) -> None:
    """A quantile is read off within a bucket: half of its width is the error."""
    assert {least_s, most_s} <= set(bounds)
    assert list(bounds) == sorted(set(bounds))
    assert all(high / low <= factor for low, high in pairwise(bounds) if least_s <= low < most_s)
    assert all(high / low <= 4 for low, high in pairwise(bounds))


def test_what_waits_for_an_engine_to_come_back_is_in_the_queue() -> None:
    rig = Rig()
    client = rig.open(n=2)
    rig.admit(client.stream)
    rig.play(client.stream, "abcd")
    told = Gauges(waiting=1, waiting_tokens=5, running=2)
    assert rig.table.count_homeless(told) is told  # the engine knows of all
    rig.lose_engine()
    assert rig.table.count_homeless(told) == Gauges(waiting=3, waiting_tokens=5 + 2 * 3 + 4, running=2)
    rig.regain_engine()
    assert rig.table.count_homeless(told) is told


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def test_a_running_server_exports_every_metric_of_the_contract(server: Server) -> None:
    answer = server.ask("GET", "/metrics")
    assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    assert {family.name for family in text_string_to_metric_families(answer.body.decode())} == CONTRACT


def test_promtool_finds_nothing_to_say(server: Server) -> None:
    """Names, units, types and help, as Prometheus' own linter wants them."""
    body = server.ask("GET", "/metrics").body
    done = subprocess.run(
        [tool("promtool", "prometheus"), "check", "metrics"], input=body, capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    broken = body.replace(b"# TYPE sluice_ttft_seconds", b"# TYPE sluice_ttft_msecs")
    done = subprocess.run(
        [tool("promtool", "prometheus"), "check", "metrics"], input=broken, capture_output=True, timeout=30, check=False
    )
    assert done.returncode != 0  # it does look


def test_several_processes_are_summed_series_by_series_and_engines_told_once() -> None:
    first, second = Metrics(), Metrics()
    for metrics, count in ((first, 2), (second, 5)):
        for _ in range(count):
            metrics.unbegun("chat", "refused")
        metrics.ttft.observe(0.3)
        metrics.engine_restarts = 3
    text = summed(first.render(), [second.render(), second.render()]).decode()
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in first.render().decode().splitlines() if line.startswith("#")
    ]
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['sluice_requests_total{api="chat",outcome="refused"}']) == 12
    assert float(values["sluice_ttft_seconds_count"]) == 3
    assert float(values["sluice_ttft_seconds_sum"]) == pytest.approx(0.9)
    assert float(values["sluice_engine_restarts_total"]) == 3
    assert summed(first.render(), []) == first.render()
