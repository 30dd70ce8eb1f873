"""A black-box conformance suite for servers that stream tokens: HTTP/1.1, HTTP/2, SSE, WebSocket, the APIs of
OpenAI and Anthropic, streaming.

    pytest tests/conformance --base-url http://HOST:PORT [--http2] [--profile sse] [--api-key KEY] [--report FILE]

runs it against any server; with --http2 every profile speaks HTTP/2 (by prior knowledge, or for https by ALPN).
Without --base-url it starts the server of this repository on its synthetic engine, where every case must pass and
nothing may be missing, over each HTTP version and with TLS; profiles about bytes are then run against its echo too. The
folder needs the standard library, pytest and h11 only (for HTTP/2 h2, and with `openai` and `anthropic` the SDK cases
run too), and may be copied.

Each folder is a profile; each case carries its rule (see kit/conformance_kit/rules.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "kit"))  # found wherever the folder lies; the profiles' names stay out of the path

from conformance_kit.report import ABSENT, FAILED, PASSED, Result, Score, shortened  # noqa: E402
from conformance_kit.rules import NOT_OFFERED, PROFILES  # noqa: E402
from conformance_kit.target import Settings, Target  # noqa: E402

score_key = pytest.StashKey[Score]()
# With both of our own servers, what is said of bytes is said of the one that answers every path, too.
ECHO_PROFILES = frozenset({"http1", "websocket", "http2"})
# Our own servers over each version: HTTP/1.1, HTTP/2 in cleartext, and HTTP/2 by TLS.
HTTP1, *HTTP2 = ("", "-h2c", "-h2")
# What is long, and about the application rather than the version, is run on one of HTTP/2's ports only.
ONCE = frozenset({("openai", "-h2c"), ("anthropic", "-h2c"), ("streaming", "-h2c")})
# What a case asks for that one of the two can't give: an echo has no routes and no policy.
ONLY = {"api": "service", "echo": "echo"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of a server that streams tokens")
    group.addoption("--base-url", help="the server: http://HOST:PORT (default: start ours)")
    group.addoption("--http2", action="store_true", help="speak HTTP/2: by prior knowledge, or for https by ALPN")
    group.addoption("--ca", metavar="FILE", help="PEM file of the certificates to trust (default: the system's)")
    group.addoption("--profile", action="append", choices=PROFILES, help="only this one; may repeat")
    group.addoption("--api-key", help="sent as a bearer token with every request")
    group.addoption("--model", help="default: the first that /v1/models lists")
    group.addoption("--report", metavar="FILE", help="write the results there as JSON")
    group.addoption("--path", default="/", help="path of the http1 profile's requests (default /)")
    group.addoption("--body", help="JSON body of those requests, which are POSTs then (default: GET)")
    group.addoption("--sse-path", help="where a POST starts an event stream (default: a streamed chat completion)")
    group.addoption("--sse-body", help="its JSON body, to which max_tokens is added (default {})")
    group.addoption("--ws-path", help="where a WebSocket is opened (default /v1/ws)")
    group.addoption("--ws-message", help="a text message that the server answers without an error")
    group.addoption("--timeout-s", type=float, help="seconds that an answer may take (default 30)")
    group.addoption("--ws-echo", action="store_true", help="the WebSocket sends every message back")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rule(text, source, level): what a case checks, and where that is written")
    config.addinivalue_line("markers", "synthetic: needs our synthetic engine, so it can't run against another server")
    config.addinivalue_line("markers", "http1_only: about what HTTP/2 hasn't or does otherwise")
    config.stash[score_key] = Score()
    if config.getoption("numprocesses", default=None) and (settings_of(config) or _option(config, "--report")):
        raise pytest.UsageError("the score of a server is kept by one process: leave -n out")


def _option(config: pytest.Config, name: str) -> Any:
    """None where this file was found too late for its options to be parsed: then they weren't given."""
    return config.getoption(name, default=None)


def settings_of(config: pytest.Config) -> Settings | None:
    """What the command line says; None when our own server is meant."""
    url = _option(config, "--base-url")
    if url is None:
        return None
    names = (
        "api_key",
        "model",
        "path",
        "body",
        "sse_path",
        "sse_body",
        "ws_path",
        "ws_message",
        "ws_echo",
        "timeout_s",
        "http2",
        "ca",
    )
    given = {name: _option(config, "--" + name.replace("_", "-")) for name in names}
    return Settings(base_url=url, **{name: value for name, value in given.items() if value is not None})


def profile_of(item: pytest.Item) -> str | None:
    """The folder that a case of this suite lies in."""
    return item.path.parent.name if item.path.is_relative_to(HERE) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = set(_option(config, "--profile") or PROFILES)
    foreign = settings_of(config) is not None
    away: set[pytest.Item] = set()
    for item in items:
        profile = profile_of(item)
        if profile is None:
            continue
        if profile not in chosen or (foreign and item.get_closest_marker("synthetic")):
            away.add(item)
        elif item.get_closest_marker("http1_only") and _over_http2(item):
            away.add(item)
            if _option(config, "--http2"):
                config.stash[score_key].http1_only[profile] += 1
    if away:
        config.hook.pytest_deselected(items=[item for item in items if item in away])
        items[:] = [item for item in items if item not in away]
    for item in items:
        if profile_of(item) is not None and len(list(item.iter_markers("rule"))) != 1:
            raise pytest.UsageError(f"{item.nodeid} must carry exactly one rule")


def _over_http2(item: pytest.Item) -> bool:
    parameters = getattr(item, "callspec", None)
    ours = parameters is not None and str(parameters.params.get("target", "")).endswith(tuple(HTTP2))
    return ours or bool(_option(item.config, "--http2"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    names = ["server"]
    if settings_of(metafunc.config) is None:
        profile = metafunc.definition.path.parent.name
        only = [name for name in ("api", "echo") if ONLY[name] in metafunc.fixturenames]
        names = [
            name + version
            for version in _versions(metafunc, profile)
            if (profile, version) not in ONCE
            for name in only or _ours(profile, version)
        ]
    metafunc.parametrize("target", names, indirect=True)


def _versions(metafunc: pytest.Metafunc, profile: str) -> list[str]:
    """Over which a case is run against our own servers. Those that --http2 leaves out are counted, so they are made."""
    if profile == "http2" or _option(metafunc.config, "--http2"):
        return HTTP2
    return [HTTP1] if metafunc.definition.get_closest_marker("http1_only") else [HTTP1, *HTTP2]


def _ours(profile: str, version: str) -> tuple[str, ...]:
    """Which of our own servers a profile judges over one version."""
    if profile not in ECHO_PROFILES:
        return ("api",)
    return ("api", "echo") if version == HTTP1 or profile == "http1" else ("echo",)


@pytest.fixture(scope="session")
def targets(pytestconfig: pytest.Config) -> Iterator[dict[str, Target]]:
    """Every server that this run speaks to, by name."""
    settings = settings_of(pytestconfig)
    if settings is not None:
        yield {"server": Target(settings)}
        return
    from conformance_kit import ours

    with ours.started() as found:
        yield found


@pytest.fixture
def target(request: pytest.FixtureRequest, targets: dict[str, Target]) -> Iterator[Target]:
    """The server that this case is about. What the case leaves open is closed behind it."""
    found = targets[request.param]
    profile = profile_of(request.node)
    if missing := found.missing(profile or ""):
        pytest.skip(NOT_OFFERED + missing)
    yield found
    found.close_all()


@pytest.fixture
def service(target: Target) -> Target:
    """The server that this case is about, which has routes and says who may use them."""
    return target


@pytest.fixture
def echo(target: Target) -> Target:
    """The server that this case is about, which sends every WebSocket message back."""
    if not target.settings.ws_echo:
        pytest.skip(NOT_OFFERED + "its WebSocket is no echo (--ws-echo)")
    return target


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc, assignment]
    if report.skipped and settings_of(item.config) is None:
        report.outcome = "failed"  # our own server offers everything
    if report.when == "call" or not report.passed:
        _record(item, call, report)
    return report  # type: ignore[return-value]


def _record(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    marker = item.get_closest_marker("rule")
    assert marker is not None
    outcome = PASSED if report.passed else ABSENT if report.skipped else FAILED
    detail = str(call.excinfo.value) if call.excinfo else ""
    parameters = getattr(item, "callspec", None)
    result = Result(
        case=item.nodeid.removeprefix("tests/conformance/"),
        target=parameters.params.get("target", "server") if parameters else "server",
        profile=profile_of(item) or "",
        level=marker.kwargs["level"],
        rule=marker.kwargs["text"],
        source=marker.kwargs["source"],
        outcome=outcome,
        detail=shortened(detail.removeprefix(NOT_OFFERED)),
        seconds=round(report.duration, 3),
    )
    item.config.stash[score_key].add(result)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    score = config.stash[score_key]
    wanted = set(_option(config, "--profile") or ())
    if not score.results and not wanted:
        return
    terminalreporter.section("conformance")
    for line in score.lines():
        terminalreporter.write_line(line)
    path = _option(config, "--report")
    if path is not None:
        score.write(Path(path), _option(config, "--base-url") or "ours", http2=bool(_option(config, "--http2")))
        terminalreporter.write_line(f"report: {path}")
