"""What `/metrics` shows. Plain integers are counted on the hot path; prometheus-client renders them at the scrape.

prometheus-client's own counters take a lock and a microsecond for each observation, which is more than a token's
framing costs, so only its exposition is used. Labels come from closed sets, so the series are always the same, from
the first scrape on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from engine.wire import Gauges
from server.outcome import REFUSED, SEVERITY

APIS = ("chat", "completions", "responses", "messages", "generate", "websocket")
OUTCOMES = (*SEVERITY, REFUSED)
STATES = ("queued", "running", "parked", "detached")
PROTOCOLS = ("http1", "http2", "websocket")
RESUME_RESULTS = ("resumed", "finished", "unknown", "gone")

# Bounds lie close together where people set goals, so that a quantile read off them is off by a fifth at most there: a
# first token within some tenths of a second to some seconds, the next within 10 to 200 ms. Outside, a cache hit's few
# milliseconds and a long queue; a fast GPU's fraction of a millisecond and a stall; a request up to many minutes.
TTFT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0,
    7.5, 10.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
ITL_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15,
    0.2, 0.3, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
    1800.0,
)  # fmt: skip
# Told by the process that answers alone: every process of a server knows the same number.
COMMON = b"sluice_engine_restarts_total"


class Histogram:
    """Counts of observations in seconds, by bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count an observation, made so many times."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As Prometheus wants it: cumulative buckets."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


@dataclass(frozen=True, slots=True)
class Live:
    """What is true at the moment of the scrape."""

    streams: dict[str, int]  # by state
    connections: dict[str, int]  # by protocol
    gauges: Gauges
    token_capacity: int
    sequence_capacity: int


class Metrics:
    """All counts of one server process. `live` is called at each scrape."""

    def __init__(self) -> None:
        self.live: Callable[[], Live] | None = None
        self.started = dict.fromkeys(APIS, 0)
        self.ended = {(api, outcome): 0 for api in APIS for outcome in OUTCOMES}
        self.resumes = dict.fromkeys(RESUME_RESULTS, 0)
        self.prompt_tokens = self.generated_tokens = self.cached_tokens = self.discarded_tokens = 0
        self.engine_restarts = 0
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.itl = Histogram(ITL_BUCKETS_S)
        self.request = Histogram(REQUEST_BUCKETS_S)
        self.queue = Histogram(TTFT_BUCKETS_S)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def unbegun(self, api: str, outcome: str) -> None:
        """A request that began no stream: it counts as started and as ended, so that the sums agree."""
        self.started[api] += 1
        self.ended[api, outcome] += 1

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return exposition.generate_latest(self._registry)

    def render_with(self, live: Live) -> bytes:
        """The same, with this in place of what is true at the moment."""
        registry = CollectorRegistry()
        registry.register(_Families(self, live))
        return exposition.generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Every family, for the registry."""
        return self.families(None if self.live is None else self.live())

    def families(self, live: Live | None) -> Iterator[Metric]:
        """Every family there is."""
        discarded = self.discarded_tokens + (live.gauges.discarded if live else 0)
        yield _counter("sluice_requests_started", "Generation requests.", ["api"], self.started.items())
        yield _counter("sluice_requests", "Generation requests by outcome.", ["api", "outcome"], self.ended.items())
        yield self.ttft.family("sluice_ttft_seconds", "From a request's arrival to its first token.")
        yield self.itl.family("sluice_itl_seconds", "Between two tokens of a stream; not while it was parked.")
        yield self.request.family("sluice_request_seconds", "From a request's arrival to its end.")
        yield self.queue.family("sluice_queue_seconds", "From a request's arrival to its place in the batch.")
        yield _counter("sluice_resumes", "Readers that came back to a stream.", ["result"], self.resumes.items())
        for name, text, value in (
            ("sluice_prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("sluice_generated_tokens", "Tokens that streams were given.", self.generated_tokens),
            ("sluice_cached_tokens", "Prompt tokens found in the prefix cache.", self.cached_tokens),
            ("sluice_tokens_discarded", "Tokens computed past a stop string, a cancel or an end.", discarded),
            ("sluice_engine_restarts", "Engine processes that were started anew.", self.engine_restarts),
        ):
            yield CounterMetricFamily(name, text, value=value)
        if live is not None:
            yield from _live_families(live)


class _Families:
    """Families of one moment."""

    def __init__(self, metrics: Metrics, live: Live) -> None:
        self._metrics = metrics
        self._live = live

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families(self._live)


def summed(mine: bytes, others: Iterable[bytes]) -> bytes:
    """One exposition of several processes of a server, whose series are the same; `others` say nothing of the engines,
    which are common to all."""
    more: dict[bytes, float] = {}
    for text in others:
        for line in text.splitlines():
            if not line.startswith(b"#"):
                series, _, value = line.rpartition(b" ")
                more[series] = more.get(series, 0.0) + float(value)
    if not more:
        return mine
    lines = mine.splitlines()
    for index, line in enumerate(lines):
        series, _, value = line.rpartition(b" ")
        if not line.startswith(b"#") and series != COMMON:
            lines[index] = b"%b %b" % (series, repr(float(value) + more.get(series, 0.0)).encode())
    return b"\n".join([*lines, b""])


def _live_families(live: Live) -> Iterator[Metric]:
    gauges = live.gauges
    yield CounterMetricFamily("sluice_preemptions", "Sequences that gave their blocks back.", value=gauges.preemptions)
    yield _gauge("sluice_streams", "Streams that have not ended.", "state", live.streams)
    yield _gauge("sluice_connections", "Open connections.", "protocol", live.connections)
    blocks = {"used": gauges.blocks_used, "cached": gauges.blocks_cached, "free": gauges.blocks_free}
    yield _gauge("sluice_kv_blocks", "Blocks of the KV pool.", "state", blocks)
    sequences = {"waiting": gauges.waiting, "running": gauges.running, "parked": gauges.parked}
    yield _gauge("sluice_sequences", "Sequences that have not ended: of n choices, each.", "state", sequences)
    for name, text, value in (
        ("sluice_queue_tokens", "Tokens that waiting sequences must still compute.", gauges.waiting_tokens),
        ("sluice_running_tokens", "Room in the KV pool of sequences that are not parked.", gauges.running_tokens),
        ("sluice_token_capacity", "Tokens that the KV pool holds.", live.token_capacity),
        ("sluice_sequence_capacity", "Places in the batch.", live.sequence_capacity),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _counter(
    name: str, text: str, labels: list[str], values: Iterable[tuple[str | tuple[str, ...], int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values:
        family.add_metric([key] if isinstance(key, str) else list(key), value)
    return family


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
