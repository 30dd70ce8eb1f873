"""The API as a program: which route answers, who may ask, and how whatever goes wrong is said.

A request's head alone decides about everything that needs no body (route, key, origin, drain), so that a client is
refused before it sends one.
"""

from __future__ import annotations

import ipaddress
import os
import re
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server.access_log import CLIENT_LEFT, AccessLog
from server.api import anthropic_errors, errors, homes, websocket
from server.api.errors import ApiError
from server.api.generation import Generation
from server.gateway.access import Gateway
from server.gateway.access_tokens import split_token
from server.http import Call, Headers, Response, Streaming, Upgrade, WebSocketChannel
from server.metrics import Metrics
from server.outcome import CANCELLED, REFUSED
from server.routes import MetricsAccess, Route, Routes, State
from server.table import Busy

REQUEST_ID_CHARS_MAX = 128
# Browsers may keep a preflight's answer so long.
PREFLIGHT_MAX_AGE_S = 600
EXPOSED = b"X-Stream-Id, X-Request-Id, X-Stream-From, Retry-After, Request-Id, " + b", ".join(
    b"x-ratelimit-%b-%b" % (what, of) for of in (b"requests", b"tokens") for what in (b"limit", b"remaining", b"reset")
)

_request_id = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{REQUEST_ID_CHARS_MAX}}}")
_loopback_host = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_lone_surrogate = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Policy:
    """What the command line says about who may ask."""

    cors_origins: tuple[str, ...] = ()
    loopback_hosts_only: bool = True  # refuse other Host names: a web page could rebind its own to this address
    metrics_access: MetricsAccess = "loopback"


async def _nothing() -> None:
    pass


class App:
    """The Program that a server serves."""

    def __init__(
        self,
        generation: Generation,
        metrics: Metrics,
        gateway: Gateway,
        policy: Policy,
        access_log: AccessLog,
        *,
        engine_up: Callable[[], bool],
        refresh_gauges: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """`refresh_gauges` has the engines say how they are; not given where they say it all the time."""
        self._generation = generation
        self._metrics = metrics
        self._gateway = gateway
        self._policy = policy
        self._access_log = access_log
        self.draining = False
        self._exact: dict[str, Route] = {}
        self._by_pattern: dict[str, Route] = {}
        state = State(engine_up, lambda: self.draining, refresh_gauges)
        self.routes = Routes(generation, metrics, gateway, policy.metrics_access, state).table
        for route in self.routes:
            known = self._by_pattern if "/*" in route.path else self._exact
            known[route.path] = route

    # The Program's side

    def refuse(self, call: Call) -> Response | None:
        """See Program. Also names the request and finds out who asks."""
        given = call.header(b"x-request-id")
        if given and _request_id.fullmatch(given):
            call.request_id = given
        try:
            return self._refuse(call)
        except ApiError as error:
            return self._error(call, error)

    async def answer(self, call: Call) -> Response | Streaming:
        """See Program."""
        try:
            route, name = self._find(call)
            elsewhere = self._generation.elsewhere
            if (known := await homes.answer_elsewhere(elsewhere, call, route, name)) is not None:
                return known
            if call.guest and route.generates and not self._comes_back(call):
                self._check_begin(call, route)
            method = "GET" if call.request.method == "HEAD" else call.request.method
            answer = await route.handlers[method](call, name)
        except ApiError as error:
            return self._error(call, error)
        except Exception:
            self._access_log.fault(call.request_id, traceback.format_exc())
            return self._error(call, ApiError(500, "the server failed; its log has this request's id"))
        return self._with_headers(call, answer)

    def upgrade(self, call: Call) -> Response | Upgrade:
        """See Program."""
        route, _ = self._find(call)
        if not route.websocket:
            return self._error(call, ApiError(404, "this route does not speak WebSocket"))

        def open_session(socket: WebSocketChannel) -> websocket.ApiSession:
            return websocket.ApiSession(self._generation, self._metrics, call, socket, unbegun)

        def unbegun(outcome: str, status: int) -> None:
            self._metrics.unbegun(call.api, outcome)
            self._access_log.unbegun(call, outcome, status)

        return open_session

    def malformed(self, call: Call | None, status: int, message: str) -> Response:
        """See Program."""
        error = ApiError(status, message)
        if call is None:
            response = errors.render(error)
            headers = (*response.headers, (b"X-Request-Id", new_request_id().encode()))
            return Response(response.status, response.body, headers=headers)
        return self._error(call, error)

    def sent(self, call: Call, status: int) -> None:
        """See Program. Streams write their own line when they end."""
        if not call.began and not call.forwarded:
            self._access_log.request(call, status)

    def left(self, call: Call) -> None:
        """See Program. Likewise for streams."""
        if not call.began and not call.forwarded:
            self._count_unbegun(call, CANCELLED)
            self._access_log.request(call, CLIENT_LEFT)

    # Who may ask

    def _refuse(self, call: Call) -> Response | None:
        request = call.request
        if "\0" in call.path:
            raise ApiError(400, "the path holds a NUL character")
        if not call.path.isascii() and _lone_surrogate.search(call.path):
            raise ApiError(400, "the path is not valid UTF-8")
        if self._policy.loopback_hosts_only and (host := request.host) and not _loopback_host.fullmatch(host):
            message = f"the Host {host!r} is not a loopback name; a server for others needs --api-keys"
            raise ApiError(403, message, code="host_not_allowed")
        if request.method == "OPTIONS":
            return self._preflight(call)
        known = self._lookup(call.path)
        call.api = known[0].generates if known else ""
        token, call.query = split_token(call.query)
        by_token = known is not None and known[0].by_token and request.method in ("GET", "HEAD")
        if not (known and known[0].open):
            self._gateway.authenticate(call, token=token if by_token else "")
        if known is None:
            raise ApiError(404, f"there is no route {call.path[:200]!r}", code="unknown_route")
        route = known[0]
        if request.method not in route.handlers and not (request.method == "HEAD" and "GET" in route.handlers):
            allow = ", ".join([*route.handlers, "OPTIONS"])
            message = f"{request.method} is not allowed here; {allow} are"
            raise ApiError(405, message, code="method_not_allowed", headers=((b"Allow", allow.encode()),))
        self._check_route(call, route, by_token=bool(token))
        return None

    def _check_route(self, call: Call, route: Route, *, by_token: bool) -> None:
        request = call.request
        if request.method == "HEAD" and route.generates:
            headers = ((b"Allow", b"GET, OPTIONS"),)
            raise ApiError(405, "HEAD would start a generation that nobody sees", headers=headers)
        if not route.open and (route.websocket or by_token or not self._gateway.keys.required):
            self._check_origin(call)
        if request.method == "POST":
            kind = call.header(b"content-type").partition(";")[0].strip().lower()
            # A charset is no part of the type: JSON is UTF-8, and whatever one says has no effect (RFC 8259 8.1, 11).
            if kind and kind != "application/json" and not kind.endswith("+json"):
                raise ApiError(415, f"the body must be application/json, not {kind[:100]!r}", code="unsupported_media")
            coding = call.header(b"content-encoding").strip().lower()
            if coding not in ("", "identity"):
                raise ApiError(
                    415, f"the body must not be encoded, but it is {coding[:100]!r}", code="unsupported_media"
                )
        if route.path in ("/metrics", "/status"):
            self._check_metrics_access(call)
        here = homes.home_of(self._generation.elsewhere, call, route, "") is None
        if route.generates and here and not self._comes_back(call):
            self._check_begin(call, route)

    def _check_begin(self, call: Call, route: Route) -> None:
        """Whether a generation may start."""
        if self.draining:
            raise errors.busy(503, "the server is going to stop", 5)
        self._check_limits(call, prompt_tokens=1 if route.websocket else 0)

    def _check_limits(self, call: Call, prompt_tokens: int) -> None:
        """Refuse here what would be refused anyway, before its body is read and its prompt becomes tokens."""
        try:
            self._gateway.limiter.check(call.key, prompt_tokens)
        except Busy as busy:
            raise errors.from_busy(busy) from None

    def _comes_back(self, call: Call) -> bool:
        """Whether a request that may start a generation is for one that was begun: such are served to the end."""
        if call.header(b"last-event-id"):
            return True
        name = call.header(b"idempotency-key")
        return bool(name) and self._generation.table.recall(call.key, name) is not None

    def _check_origin(self, call: Call) -> None:
        """A browser reaches loopback from any page, and without keys any page could make this server compute: a foreign
        one must be named to be let in. Where a browser sends no Origin (an image, a link), Fetch Metadata says whose
        page asks."""
        origin = call.header(b"origin")
        if origin:
            foreign = not self._is_listed(origin) and not _same_origin(origin, call.request.host)
        else:
            foreign = call.header(b"sec-fetch-site") == "cross-site"
        if foreign:
            message = f"the origin {origin[:200]!r} is not allowed; --cors-origin names those that are"
            raise ApiError(403, message, code="origin_not_allowed")

    def _check_metrics_access(self, call: Call) -> None:
        access = self._policy.metrics_access
        if access == "loopback" and not _is_loopback(call.client):
            raise ApiError(403, "metrics are for this machine only; see --metrics-access")
        if access == "key":
            self._gateway.authenticate(call)

    def _preflight(self, call: Call) -> Response:
        """OPTIONS, on any path and without a key: what a browser asks before the request itself."""
        known = self._lookup(call.path)
        allow = ", ".join([*known[0].handlers, "OPTIONS"]) if known else "GET, POST, DELETE, OPTIONS"
        headers: Headers = ((b"Allow", allow.encode()), *self._common(call))
        if self._is_listed(call.header(b"origin")) and call.header(b"access-control-request-method"):
            asked = call.header(b"access-control-request-headers") or "authorization, content-type"
            headers += (
                (b"Access-Control-Allow-Methods", allow.encode()),
                (b"Access-Control-Allow-Headers", asked[:1024].encode("latin-1")),
                (b"Access-Control-Max-Age", b"%d" % PREFLIGHT_MAX_AGE_S),
            )
        return Response(204, headers=headers)

    # Answers

    def _error(self, call: Call, error: ApiError) -> Response:
        self._count_unbegun(call, REFUSED)
        if anthropic_errors.expected_by(call):
            response = anthropic_errors.render(error, call.request_id)
        else:
            response = errors.render(error)
        return Response(response.status, response.body, headers=(*response.headers, *self._common(call)))

    def _count_unbegun(self, call: Call, outcome: str) -> None:
        """Count a request for a generation that began none, and came back to none."""
        if call.api and not call.stream_id and not call.counted:
            call.counted = True
            self._metrics.unbegun(call.api, outcome)

    def _with_headers(self, call: Call, answer: Response | Streaming) -> Response | Streaming:
        headers = (*answer.headers, *self._common(call))
        if isinstance(answer, Response):
            return Response(answer.status, answer.body, answer.content_type, headers)
        return Streaming(answer.stream, answer.framing, answer.cursor, headers, answer.status)

    def _common(self, call: Call) -> Headers:
        name = call.request_id.encode()
        anthropic: Headers = ((b"Request-Id", name),) if anthropic_errors.expected_by(call) else ()
        return (
            (b"X-Request-Id", name),
            *anthropic,
            (b"X-Content-Type-Options", b"nosniff"),
            *self._cors(call),
            *(self._gateway.limiter.headers(call.key) if call.api else ()),
        )

    def _cors(self, call: Call) -> Headers:
        if not self._policy.cors_origins:
            return ()
        origin = call.header(b"origin")
        if not self._is_listed(origin):
            return ((b"Vary", b"Origin"),)
        return (
            (b"Access-Control-Allow-Origin", origin.encode("latin-1") or b"*"),
            (b"Access-Control-Expose-Headers", EXPOSED),
            (b"Vary", b"Origin"),
        )

    def _is_listed(self, origin: str) -> bool:
        return origin in self._policy.cors_origins or "*" in self._policy.cors_origins

    def _lookup(self, path: str) -> tuple[Route, str] | None:
        route = self._exact.get(path)
        if route is not None:
            return route, ""
        head, _, last = path.rpartition("/")
        base, _, middle = head.rpartition("/")
        for pattern, name in ((f"{head}/*", last), (f"{base}/*/{last}", middle)):
            route = self._by_pattern.get(pattern)
            if route is not None and name:
                return route, name
        return None

    def _find(self, call: Call) -> tuple[Route, str]:
        known = self._lookup(call.path)
        assert known is not None, "refuse() has let only known routes pass"
        return known


def new_request_id() -> str:
    """For requests that bring none of their own."""
    return "req-" + os.urandom(12).hex()


def _is_loopback(client: str) -> bool:
    try:
        return not client or ipaddress.ip_address(client).is_loopback  # "": a Unix socket
    except ValueError:
        return False


def _same_origin(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()
