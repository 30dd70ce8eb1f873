"""`python -m bench transports`: what each way to stream costs, on one engine and one prompt, through our server.

Short polling, long polling, chunked NDJSON, chunked text, SSE over HTTP/1.1 and HTTP/2, WebSocket without and with
deflate, each with 1, 64, 512 (and without --quick 2,000) streams that begin at once, on connections that are open
already. The synthetic engine has a process of its own and makes a token for each stream every 20 ms (80 ms at 2,000
streams, 400 at 10,000, so that no more tokens are due than at 512). Every figure is of one fresh server, whose
transports come by turns in each round:

TTFT      from the request to the first token at the client; with many streams the requests' own handling is in it
ITL       between two tokens of a stream at the client; 0 for those that come together
bytes     on the wire for each token, from and to the server, heads and requests included, TCP and IP not
requests  for an answer: HTTP requests, or the upgrade and a message of a WebSocket
CPU       µs of the server process for each token, from the moment when every stream has begun to the first one's end;
          with a star where that moment never comes and it is over the whole answer
memory    KiB of the server process for each stream at that moment, its connection included, the kernel's buffers not

Behind the tables the servers of both SSE rows are sampled, at 512 streams: what a token's CPU time goes to over HTTP/2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import asdict
from typing import Any

from bench import arguments, plots, processes
from bench.load import Figures, play
from bench.machine import describe, markdown, spread
from bench.profiling import compared
from bench.readers import H2_STREAMS, TRANSPORTS

STEP_MS = 20.0
STREAMS_AT_STEP = 500  # with more of them a step takes longer, in proportion
MANY = 2000
H2 = "SSE, HTTP/2"
PROFILED_TOKENS = 200  # for some hundred samples
# The test that shows it: in a real browser; and coming back behind a cut, without a token lost or twice. Where no test
# of this repository does, the cell is empty.
SHOWN = {
    "short polling": (
        "tests/playground/test_page.py::test_the_race",
        "in a browser: tests/playground/test_failures.py::test_lanes_that_can_come_back_to_their_stream_do",
    ),
    "long polling": ("", "tests/test_resume.py::TestPolling::test_the_whole_of_it"),
    "chunked NDJSON": (
        "tests/playground/test_page.py::test_the_race",
        "tests/test_resume.py::TestFinishedStream::test_ndjson_from_every_position",
    ),
    "chunked text": ("", "tests/test_resume.py::TestFinishedStream::test_plain_text_from_every_byte"),
    "SSE, HTTP/1.1": (
        "tests/clients/test_browser.py::test_event_source",
        "by the browser itself: tests/clients/test_browser.py::test_event_source_behind_cuts",
    ),
    "SSE, HTTP/2": (
        "tests/http2/test_chromium.py::test_twenty_event_sources_at_once_over_one_connection",
        "tests/http2/test_streams.py::test_a_reset_detaches_and_the_stream_can_be_resumed",
    ),
    "WebSocket": (
        "over HTTP/2: tests/http2/test_chromium.py::test_a_websocket_goes_through_http2",
        "tests/test_resume.py::TestRunningStream::test_over_websocket",
    ),
    "WebSocket, deflate": ("", ""),
}

Results = dict[str, dict[int, list[Figures]]]


def main(argv: list[str]) -> int:
    """The exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.plots:
        plots.check()
    counts = options.streams or ([1, 64, 512] if options.quick else [1, 64, 512, MANY])
    each = H2_STREAMS if set(options.transports) == {H2} else 1  # on a connection
    arguments.allow_open_files(parser, -(-max(counts) // each), "--streams")
    rounds = options.rounds or (2 if options.quick else 5)
    tokens = options.tokens or (40 if options.quick else 150)
    before = os.getloadavg()[0]
    results = measure(options.transports, counts, rounds, tokens)
    print(describe())
    print(f"load before and behind: {before:.1f}, {os.getloadavg()[0]:.1f} (this run's own is in the second)")
    print(f"{rounds} rounds of {tokens} tokens a stream; median (least to most)\n")
    print(tables(results))
    busiest = max(figures.client_busy for each in results.values() for found in each.values() for figures in found)
    print(f"\nThe client was busy for {busiest:.0%} of its core at the most.\n")
    print(markdown(["transport", "in a browser", "comes back behind a cut"], [[n, *SHOWN[n]] for n in results]))
    print("These are tests of this repository; where a cell is empty none shows it.")
    if H2 in results and not options.no_profile:
        print(f"\n{compared(H2, 'SSE, HTTP/1.1', tokens=options.tokens or PROFILED_TOKENS)}")
    run = kept(results, before, tokens)
    if options.json:
        arguments.keep(options.json, run)
    if options.compare:
        print(f"\n{moved(options.compare, results)}")
    if options.plots:
        print("\n" + "\n".join(map(str, plots.draw(run, options.plots))))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench transports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 40 tokens, up to 512 streams")
    parser.add_argument(
        "--streams", type=arguments.whole(1, arguments.STREAMS_MAX), nargs="+", metavar="N",
        help=f"that begin at once (default: 1 64 512 {MANY}; with --quick 1 64 512)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=arguments.whole(1, arguments.ROUNDS_MAX), metavar="N", help="(default: 5; with --quick 2)"
    )
    parser.add_argument(
        "--tokens", type=arguments.whole(2, arguments.TOKENS_MAX), metavar="N",
        help="of each stream, from 2 for a gap (default: 150; with --quick 40)",
    )  # fmt: skip
    parser.add_argument(
        "--transports", type=arguments.one_of(TRANSPORTS, "transport"), nargs="+", metavar="NAME",
        default=list(TRANSPORTS), help=f"of {arguments.quoted(TRANSPORTS)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--no-profile", action="store_true", help="leave out where a token's time goes over HTTP/2")
    arguments.add_kept(parser, _medians, moved="what moved")
    return parser


def measure(names: list[str], counts: list[int], rounds: int, tokens: int) -> Results:
    """Each transport with each number of streams, in each round."""
    results: Results = {name: {count: [] for count in counts} for name in names}
    for number in range(rounds):
        for count in counts:
            with processes.engine(STEP_MS * max(1, count // STREAMS_AT_STEP)) as engine:
                for name in names:
                    _progress(f"round {number + 1} of {rounds}, {count} streams: {name}")
                    with processes.server(engine) as server:
                        results[name][count].append(play(TRANSPORTS[name], server, count, tokens))
    _progress("")
    return results


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


COST_HEAD = ["transport", "streams", "bytes from, to", "requests", "CPU µs", "KiB"]
LATENCIES = {
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
}
MOVED = {"cpu_us": "CPU µs", "itl_p99_ms": "ITL p99 ms", "bytes_from": "bytes from", "memory_kib": "KiB"}


def tables(results: Results) -> str:
    """What each transport costs, and what its clients see: a row for each number of streams."""
    rows = [(name, count, found) for name, each in results.items() for count, found in each.items()]
    latency_head = ["transport", "streams", *LATENCIES.values()]
    cost = markdown(COST_HEAD, [_cost(*row) for row in rows])
    return cost + "\n\n" + markdown(latency_head, [_latency(*row) for row in rows])


def _cost(name: str, count: int, found: list[Figures]) -> list[str]:
    def median(field: str) -> float:
        return float(statistics.median(getattr(each, field) for each in found))

    star = "" if all(each.steady for each in found) else " *"
    return [
        name,
        f"{count:,}",
        f"{median('bytes_from'):.0f}, {median('bytes_to'):.0f}",
        f"{median('requests'):.0f}",
        spread([each.cpu_us for each in found], 1) + star,
        spread([each.memory_kib for each in found], 1),
    ]


def _latency(name: str, count: int, found: list[Figures]) -> list[str]:
    return [name, f"{count:,}", *(spread([getattr(each, field) for each in found], 1) for field in LATENCIES)]


def kept(results: Results, load: float, tokens: int) -> dict[str, Any]:
    """What --json keeps."""
    figures = {n: {str(c): [asdict(f) for f in found] for c, found in each.items()} for n, each in results.items()}
    return {"machine": describe(), "load": load, "tokens": tokens, "figures": figures}


def moved(old: dict[str, Any], results: Results) -> str:
    """Medians then and now of what both runs have. Absolute times are comparable on one machine only."""
    medians = _medians(old)
    rows = []
    for name, each in results.items():
        for count, found in each.items():
            if before := medians.get((name, str(count))):
                rows.append([name, f"{count:,}", *(_then_and_now(before[field], found, field) for field in MOVED)])
    since = f"Since {old['machine']}, load {old['load']:.1f}:"
    if not rows:
        return f"{since} nothing to compare, the runs have no transport with the same number of streams in common."
    return f"{since}\n\n" + markdown(["transport", "streams", *MOVED.values()], rows)


def _medians(old: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Of a run that was kept, by transport and number of streams."""
    return {
        (name, count): {field: statistics.median(float(run[field]) for run in runs) for field in MOVED}
        for name, each in old["figures"].items()
        for count, runs in each.items()
    }


def _then_and_now(then: float, found: list[Figures], field: str) -> str:
    now = statistics.median(getattr(each, field) for each in found)
    return f"{then:.1f} → {now:.1f}" + (f" (× {now / then:.2f})" if then > 0 else "")
