"""server.app: who may ask what, decided by a request's head alone; and the fields that every answer carries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import unquote

import pytest

from protocols.http1 import Http1, Request
from server import playground
from server.access_log import AccessLog
from server.api.generation import Generation
from server.app import REQUEST_ID_CHARS_MAX, App, Policy, new_request_id
from server.elsewhere import Alone
from server.gateway.access import Gateway
from server.gateway.key_file import read_keys
from server.gateway.keys import Keys
from server.http import Call, Response
from server.limits import Limits
from server.metrics import Metrics
from server.routes import MetricsAccess

KEY = "s3cret"
KEYS_FILE = """
[keys.alice]
sha256 = "1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"
"""

# What answers without a key. A route that comes to this list was opened on purpose.
PAGE = tuple(file.path for file in playground.files(needs_key=True, status_access="loopback", resume_ttl_s=30))
OPEN = ("/health", "/ready", "/metrics", "/status", *PAGE)


class Unused:
    """A generation that no test here begins."""

    model = None
    elsewhere = Alone()
    table = SimpleNamespace(limits=Limits())


def call(line: str, *fields: str, client: str = "127.0.0.1") -> Call:
    """The call of a request's head."""
    head = "\r\n".join([f"{line} HTTP/1.1", *(("Host: localhost",) if "Host:" not in str(fields) else ()), *fields])
    request = Http1(max_header=4096).receive(head.encode("latin-1") + b"\r\n\r\n")[0]
    assert isinstance(request, Request)
    path, _, query = request.path.partition("?")
    return Call(request, path, query, client, "req-given", 0.0)


def app(policy: Policy | None = None, *, keys: Keys | None = None) -> App:
    log = AccessLog("text", clock=lambda: 0.0)
    generation = cast(Generation, Unused())
    return App(generation, Metrics(), Gateway(keys or Keys(None)), policy or Policy(), log, engine_up=lambda: True)


@pytest.fixture
def keys(tmp_path: Any) -> Keys:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS_FILE)
    return Keys(read_keys(str(path)))


def status(answer: Response | None) -> int:
    """0: not refused."""
    if answer is None:
        return 0
    error = json.loads(answer.body)["error"] if answer.body else {}
    assert not answer.body or error["message"]
    return answer.status


def field(answer: Response, name: str) -> str | None:
    return {key.decode().lower(): value.decode() for key, value in answer.headers}.get(name)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GET /health", 0),
        ("HEAD /ready", 0),
        ("GET /v1/models/x", 0),
        ("GET /v1/models/", 404),
        ("GET /v1/streams/a/b", 404),
        ("GET /v1", 404),
        ("GET /HEALTH", 404),
        ("POST /health", 405),
        ("GET /v1/completions", 405),
        ("HEAD /v1/generate", 405),
        ("HEAD /v1/streams/x", 0),
        ("PUT /v1/streams/x", 405),
    ],
)
def test_routes(line: str, expected: int) -> None:
    assert status(app().refuse(call(line))) == expected


def test_a_405_names_what_is_allowed() -> None:
    answer = app().refuse(call("PUT /v1/streams/x"))
    assert answer is not None
    assert field(answer, "allow") == "GET, DELETE, OPTIONS"


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:1", True),
        ("127.1.2.3", True),
        ("[::1]:80", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.0.1", False),
    ],
)
def test_hosts_that_a_page_could_rebind_are_refused(host: str, allowed: bool) -> None:
    asked = call("GET /health", f"Host: {host}")
    assert status(app().refuse(asked)) == (0 if allowed else 403)
    assert status(app(Policy(loopback_hosts_only=False)).refuse(asked)) == 0


class TestKeys:
    @pytest.mark.parametrize("path", ["/v1/models", "/v1/generate?prompt=x", "/v1/ws", "/v1/streams/x", "/nothing"])
    def test_all_but_the_probes_need_one(self, keys: Keys, path: str) -> None:
        program = app(keys=keys)
        for wrong in ((), ("Authorization: Bearer nope",), (f"Authorization: Basic {KEY}",), ("X-Api-Key: nope",)):
            answer = program.refuse(call(f"GET {path}", *wrong))
            assert answer is not None and status(answer) == 401
            assert field(answer, "www-authenticate") == "Bearer"
        expected = 404 if path == "/nothing" else 0
        for right in (f"Authorization: Bearer {KEY}", f"authorization: bearer  {KEY}", f"X-Api-Key: {KEY}"):
            asked = call(f"GET {path}", right)
            assert status(program.refuse(asked)) == expected
            assert asked.key == "alice"

    @pytest.mark.parametrize("path", OPEN)
    def test_probes_are_open(self, keys: Keys, path: str) -> None:
        assert status(app(keys=keys).refuse(call(f"GET {path}"))) == 0

    def test_whatever_is_not_on_the_list_of_the_open_needs_one(self, keys: Keys) -> None:
        """Every route and every method: a new route is closed until somebody opens it here too."""
        program = app(keys=keys)
        answered = set()
        for route in program.routes:
            path = route.path.replace("*", "name")
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY"):
                answer = program.refuse(call(f"{method} {path}"))
                if answer is None:
                    answered.add((method, path))
                elif method == "OPTIONS":
                    assert answer.status == 204 and not answer.body
                else:
                    assert answer.status == (405 if path in OPEN else 401), (method, path)
        assert answered == {(m, p) for m in ("GET", "HEAD") for p in OPEN}

    @pytest.mark.parametrize(
        "path",
        [
            "//health",
            "/health/",
            "/health/../v1/models",
            "/./health",
            "/health;x",
            "/health%2f",
            "/health%00",
            "/HEALTH",
            "/v1/../health",
            "/ready/v1/models",
            "/metrics/",
            "/%2e%2e/health",
            "/v1/models/../../health",
            "//",
            "/playground",
            "/playground/",
            "/playground/0000000000000000/main.js",
            f"{PAGE[1]}/",
            f"{PAGE[1]}/../../../v1/models",
        ],
    )
    def test_nothing_that_looks_like_an_open_route_is_one(self, keys: Keys, path: str) -> None:
        asked = call(f"GET {path}")
        asked.path = unquote(asked.path)
        answer = app(keys=keys).refuse(asked)
        assert answer is not None and answer.status in (400, 401)

    def test_a_page_without_headers_brings_a_token(self, keys: Keys) -> None:
        program = app(keys=keys)
        token = program._gateway.tokens.issue("alice")[0]
        for path in ("/v1/generate", "/v1/streams/x", "/v1/ws"):
            asked = call(f"GET {path}?after=1&token={token}&x=%20")
            assert status(program.refuse(asked)) == 0
            assert (asked.key, asked.query) == ("alice", "after=1&x=%20")
            assert status(program.refuse(call(f"GET {path}?token={token[:-2]}"))) == 401
        for line in ("GET /v1/models", "POST /v1/access-tokens", "DELETE /v1/streams/x", "POST /v1/completions"):
            assert status(program.refuse(call(f"{line}?token={token}"))) == 401
        keys.replace([])
        assert status(program.refuse(call(f"GET /v1/ws?token={token}"))) == 401

    def test_a_token_lets_no_foreign_page_in(self, keys: Keys) -> None:
        program = app(Policy(cors_origins=("https://app.example",)), keys=keys)
        token = program._gateway.tokens.issue("alice")[0]
        for origin, expected in (("https://app.example", 0), ("https://evil.example", 403)):
            asked = call(f"GET /v1/generate?prompt=x&token={token}", f"Origin: {origin}")
            assert status(program.refuse(asked)) == expected

    def test_limits_are_looked_at_before_the_body(self, keys: Keys) -> None:
        keys.replace([replace(keys.get("alice"), requests_per_minute=1)])  # type: ignore[type-var]
        program = app(keys=keys)
        program._gateway.limiter.start("alice", 1)
        for path in ("POST /v1/completions", "GET /v1/ws", "GET /v1/generate"):
            answer = program.refuse(call(path, f"X-Api-Key: {KEY}"))
            assert answer is not None and status(answer) == 429
            assert field(answer, "retry-after") == "60"
            assert field(answer, "x-ratelimit-remaining-requests") == "0"
        assert status(program.refuse(call("GET /v1/generate", f"X-Api-Key: {KEY}", "Last-Event-ID: x:1"))) == 0
        assert status(program.refuse(call("GET /v1/streams/x", f"X-Api-Key: {KEY}"))) == 0

    def test_a_preflight_has_none(self, keys: Keys) -> None:
        answer = app(keys=keys).refuse(call("OPTIONS /v1/models"))
        assert answer is not None and answer.status == 204


@pytest.mark.parametrize(
    ("access", "client", "fields", "expected"),
    [
        ("loopback", "127.0.0.1", (), 0),
        ("loopback", "::1", (), 0),
        ("loopback", "", (), 0),  # a Unix socket
        ("loopback", "192.0.2.7", (), 403),
        ("loopback", "192.0.2.7", (f"Authorization: Bearer {KEY}",), 403),
        ("key", "192.0.2.7", (), 401),
        ("key", "127.0.0.1", (), 401),
        ("key", "192.0.2.7", (f"Authorization: Bearer {KEY}",), 0),
        ("open", "192.0.2.7", (), 0),
    ],
)
@pytest.mark.parametrize("path", ["/metrics", "/status"])
def test_who_may_read_metrics(
    keys: Keys, path: str, access: MetricsAccess, client: str, fields: tuple[str, ...], expected: int
) -> None:
    program = app(Policy(metrics_access=access), keys=keys)
    assert status(program.refuse(call(f"GET {path}", *fields, client=client))) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("POST /v1/chat/completions", 503),
        ("POST /v1/completions", 503),
        ("GET /v1/generate?prompt=x", 503),
        ("GET /v1/ws", 503),
        ("GET /v1/streams/x", 0),
        ("DELETE /v1/streams/x", 0),
        ("GET /health", 0),
        ("GET /ready", 0),
        ("GET /metrics", 0),
    ],
)
def test_what_a_drain_refuses(line: str, expected: int) -> None:
    program = app()
    program.draining = True
    answer = program.refuse(call(line))
    assert status(answer) == expected
    assert answer is None or field(answer, "retry-after")
    assert status(program.refuse(call(line, "Last-Event-ID: x:1"))) in (0, 404) or "Last-Event-ID" not in line


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("application/json", 0),
        ("Application/JSON; charset=utf-8", 0),
        ("application/vnd.x+json", 0),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 0),
    ],
)
def test_media_types(kind: str, expected: int) -> None:
    assert status(app().refuse(call("POST /v1/completions", f"Content-Type: {kind}"))) == expected


@pytest.mark.parametrize(("coding", "expected"), [("gzip", 415), ("Identity", 0), ("br, gzip", 415)])
def test_codings(coding: str, expected: int) -> None:
    assert status(app().refuse(call("POST /v1/completions", f"Content-Encoding: {coding}"))) == expected


class TestOrigins:
    POLICY = Policy(cors_origins=("https://app.example",))
    UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")

    @pytest.mark.parametrize(
        ("origin", "allowed"),
        [
            ("https://app.example", True),
            ("http://localhost", True),  # the server's own page
            ("https://app.example.evil.example", False),
            ("http://app.example", False),
            ("null", False),
            ("", True),
        ],
    )
    def test_websockets(self, origin: str, allowed: bool) -> None:
        fields = (*self.UPGRADE, *((f"Origin: {origin}",) if origin else ()))
        assert status(app(self.POLICY).refuse(call("GET /v1/ws", *fields))) == (0 if allowed else 403)

    def test_a_star_lets_all_in_on_both(self) -> None:
        program = app(Policy(cors_origins=("*",)))
        assert status(program.refuse(call("GET /v1/ws", *self.UPGRADE, "Origin: https://any.example"))) == 0
        answer = program.refuse(call("GET /nothing", "Origin: https://any.example"))
        assert answer is not None and field(answer, "access-control-allow-origin") == "https://any.example"

    def test_cors_fields_for_an_origin_of_the_list(self) -> None:
        answer = app(self.POLICY).refuse(call("GET /nothing", "Origin: https://app.example"))
        assert answer is not None
        assert field(answer, "access-control-allow-origin") == "https://app.example"
        assert "X-Stream-Id" in (field(answer, "access-control-expose-headers") or "")
        assert field(answer, "vary") == "Origin"

    def test_and_none_for_others(self) -> None:
        answer = app(self.POLICY).refuse(call("GET /nothing", "Origin: https://evil.example"))
        assert answer is not None
        assert field(answer, "access-control-allow-origin") is None
        assert field(answer, "vary") == "Origin"
        answer = app().refuse(call("GET /nothing", "Origin: https://app.example"))
        assert answer is not None and field(answer, "vary") is None

    def test_preflight(self) -> None:
        asked = ("Origin: https://app.example", "Access-Control-Request-Method: POST")
        answer = app(self.POLICY).refuse(call("OPTIONS /v1/completions", *asked))
        assert answer is not None and answer.status == 204
        assert field(answer, "access-control-allow-methods") == "POST, OPTIONS"
        assert field(answer, "access-control-allow-headers") == "authorization, content-type"
        answer = app(self.POLICY).refuse(call("OPTIONS /v1/completions", "Origin: https://evil.example", asked[1]))
        assert answer is not None and field(answer, "access-control-allow-methods") is None


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("abc-123", True),
        ("A.b_c:d/e+f=g@h", True),
        ("x" * REQUEST_ID_CHARS_MAX, True),
        ("x" * (REQUEST_ID_CHARS_MAX + 1), False),
        ("with space", False),
        ("<script>", False),
        ("\xe9", False),
        ("", False),
    ],
)
def test_request_ids(given: str, kept: bool) -> None:
    asked = call("GET /nothing", f"X-Request-Id: {given}")
    answer = app().refuse(asked)
    assert answer is not None
    assert field(answer, "x-request-id") == (given if kept else "req-given")


def test_bytes_that_are_no_request_have_an_id_too() -> None:
    answer = app().malformed(None, 400, "no request")
    assert (field(answer, "x-request-id") or "").startswith("req-")
    assert new_request_id() != new_request_id()


async def _fail(_: Call, __: str) -> Response:
    raise ZeroDivisionError("a mistake of ours")


def test_our_own_mistakes_are_a_500_without_a_traceback(
    capsys: pytest.CaptureFixture[str], run: Callable[[Any], Any]
) -> None:
    program = app()
    program._exact["/health"].handlers["GET"] = _fail
    answer = run(program.answer(call("GET /health")))
    assert status(answer) == 500
    assert b"ZeroDivision" not in answer.body
    assert field(answer, "x-request-id") == "req-given"
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.fixture
def run() -> Callable[[Any], Any]:
    """Runs a coroutine that waits for nothing."""

    def runs(work: Any) -> Any:
        with pytest.raises(StopIteration) as stop:
            work.send(None)
        return stop.value.value

    return runs


def test_refusals_are_counted_once() -> None:
    metrics = Metrics()
    log = AccessLog("text", clock=lambda: 0.0)
    program = App(cast(Generation, Unused()), metrics, Gateway(Keys(None)), Policy(), log, engine_up=lambda: True)
    asked = call("POST /v1/completions", "Content-Type: text/html")
    program.refuse(asked)
    program.malformed(asked, 413, "and more")
    assert metrics.started["completions"] == metrics.ended["completions", "refused"] == 1
    assert sum(metrics.started.values()) == 1


@pytest.mark.parametrize("line", ["POST /v1/completions", "GET /v1/models"])
def test_a_client_that_left_before_its_answer_has_its_line_and_counts_once(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    metrics = Metrics()
    log = AccessLog("text", clock=lambda: 0.0)
    program = App(cast(Generation, Unused()), metrics, Gateway(Keys(None)), Policy(), log, engine_up=lambda: True)
    asked = call(line, "Content-Type: application/json")
    assert program.refuse(asked) is None
    program.left(asked)
    generates = "completions" in line
    assert metrics.started["completions"] == metrics.ended["completions", "cancelled"] == generates
    assert sum(metrics.started.values()) == generates
    (written,) = capsys.readouterr().err.splitlines()
    assert " status=499 " in written
    came_back = call("POST /v1/completions", "Content-Type: application/json")
    program.refuse(came_back)
    came_back.stream_id = "known"
    program.left(came_back)
    came_back.began = True  # the stream writes its line when it ends
    program.left(came_back)
    assert sum(metrics.started.values()) == generates
    assert len(capsys.readouterr().err.splitlines()) == 1
