"""The command line: every flag with its default, its unit and its check."""

from __future__ import annotations

import argparse
import ipaddress
import math
import re
import sys
from dataclasses import dataclass
from typing import TypeVar

from engine.version import VERSION
from server.api.response_store import StoreLimits
from server.gateway.forwarded import TrustedProxies
from server.gateway.limits import Rates
from server.host import Deadlines
from server.limits import Limits
from server.places import FRONTENDS_MAX
from server.routes import MetricsAccess
from server.tools.formats import SYNTAXES

Number = TypeVar("Number", int, float)
KIB, MIB = 1024, 1024 * 1024

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "gguf")

# As a browser writes it in Origin (RFC 6454 6.1): lower case, and no default port could ever be matched.
_origin = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_engine_url = re.compile(r"unix:.+|tcp://.+:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Config:
    """What the command line says, checked."""

    served_model_name: str | None
    tool_parser: str
    host: str
    port: int
    uds: str | None
    engine_argv: tuple[str, ...]  # what the engine that we start is told
    engine_urls: tuple[str, ...]
    engines: int  # that we start
    frontends: int  # processes that serve
    engine_token_file: str | None
    conformance_echo: bool
    limits: Limits
    responses: StoreLimits
    deadlines: Deadlines
    send_buffer: int
    abort_on_half_close: bool
    max_body: int
    max_header: int
    max_ws_message: int
    max_connections: int | None
    metrics_access: MetricsAccess
    api_keys: str | None
    rates: Rates
    trusted_proxies: TrustedProxies
    insecure: bool
    cors_origins: tuple[str, ...]
    tls_cert: str | None
    tls_key: str | None
    drain_timeout_s: float
    log_format: str

    @property
    def loopback_only(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or is_loopback(self.host)


def parse(argv: list[str] | None = None) -> Config:
    """Exits with code 2 and a sentence when the command line can't be."""
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.api_keys and not options.insecure and not options.uds and not is_loopback(options.host):
        parser.error(f"--host {options.host} is no loopback address: give --api-keys FILE, or --insecure to allow it")
    if options.conformance_echo and not options.uds and not is_loopback(options.host):
        parser.error("--conformance-echo is for loopback addresses only")
    if options.engine_url and options.engines > 1:
        parser.error("--engines starts engines, and --engine-url attaches to some that run: give one of them")
    for url in options.engine_url:
        if not _engine_url.fullmatch(url):
            parser.error(f"--engine-url {url}: an engine's address is unix:/path or tcp://host:port")
    if any(url.startswith("tcp://") for url in options.engine_url) and not options.engine_token_file:
        parser.error("--engine-url tcp://… needs --engine-token-file")
    for origin in options.cors_origin:
        if not _origin.fullmatch(origin):
            parser.error(f"--cors-origin {origin}: an origin is https://host or http://host:port without a path, or *")
    if bool(options.tls_cert) != bool(options.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    if options.frontends > 1 and sys.platform != "linux":
        parser.error("--frontends needs Linux, which spreads connections over the processes that listen on a port")
    if options.frontends > FRONTENDS_MAX:
        parser.error(f"--frontends: at most {FRONTENDS_MAX}")
    window = options.credit_window
    if window < 2:
        parser.error("--credit-window must be at least 2: it is granted in halves")
    return _config(options)


def is_loopback(host: str) -> bool:
    """Whether an address to bind is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _config(options: argparse.Namespace) -> Config:
    echo = options.conformance_echo
    return Config(
        served_model_name=options.served_model_name,
        tool_parser=options.tool_parser,
        host=options.host,
        port=options.port,
        uds=options.uds,
        engine_argv=_engine_argv(options),
        engine_urls=tuple(options.engine_url),
        engines=options.engines,
        frontends=options.frontends,
        engine_token_file=options.engine_token_file,
        conformance_echo=echo,
        limits=Limits(
            credit_window=options.credit_window,
            resume_ttl_s=options.resume_ttl,
            log_bytes_per_stream=options.log_bytes_per_stream,
            log_bytes=options.log_bytes,
            streams_max=options.max_streams,
            queue_max=options.max_queue,
            queue_timeout_s=options.queue_timeout,
            request_timeout_s=options.request_timeout,
            engine_restart_wait_s=options.engine_restart_wait,
        ),
        responses=StoreLimits(ttl_s=options.response_ttl, bytes_max=options.response_bytes),
        deadlines=Deadlines(
            header_s=options.header_timeout,
            body_s=options.body_timeout,
            idle_s=options.idle_timeout,
            keepalive_s=options.keepalive_interval,
            write_stall_s=options.write_stall_timeout,
        ),
        send_buffer=options.send_buffer,
        abort_on_half_close=options.on_half_close == "abort",
        max_body=options.max_body,
        max_header=options.max_header,
        max_ws_message=options.max_ws_message or (16 * MIB if echo else MIB),
        max_connections=options.max_connections,
        metrics_access=options.metrics_access,
        api_keys=options.api_keys,
        rates=Rates(options.rate_limit_requests, options.rate_limit_tokens),
        trusted_proxies=options.forwarded_allow_ips,
        insecure=options.insecure,
        cors_origins=tuple(options.cors_origin),
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        drain_timeout_s=options.drain_timeout,
        log_format=options.log_format,
    )


def _engine_argv(options: argparse.Namespace) -> tuple[str, ...]:
    """The flags that the engine understands, as they were given."""
    argv: list[str] = []
    for name in (
        "engine",
        "model",
        "device",
        "dtype",
        "kv_cache_dtype",
        "synthetic_step_ms",
        "synthetic_script",
        "kv_blocks",
        "block_size",
        "max_batch_tokens",
        "max_running",
    ):
        value = getattr(options, name)
        if value is not None:
            argv += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(argv)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Names defaults where there is one to name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m server",
        usage="python -m server [options]   (--help lists them)",
        description="Serve a language model: tokens over SSE, chunked HTTP and WebSocket, the moment they exist.",
        epilog="`python -m server keys add NAME` makes a key for --api-keys; `python -m server top` shows the streams"
        " of a running server. With the extra `otel` OTEL_EXPORTER_OTLP_ENDPOINT says where traces go.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sluice {VERSION}")
    _add_model(parser.add_argument_group("model and engine"))
    _add_listening(parser.add_argument_group("listening"))
    _add_streams(parser.add_argument_group("streams"))
    _add_limits(parser.add_argument_group("deadlines (seconds) and limits"))
    _add_access(parser.add_argument_group("access"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default="smollm2-135m-instruct",
        help="a known name, a Hugging Face name, a directory with config and safetensors, or a .gguf file",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what /v1/models lists; the model's name if not given"
    )
    group.add_argument(
        "--tool-parser",
        default="auto",
        choices=("auto", *SYNTAXES),
        help="the format in which the model writes tool calls; auto: by its chat template",
    )
    group.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where the model runs")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="type of the weights; int8 and gguf, which keeps them as a .gguf file holds them, on a CPU",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=("auto", "fp8"),
        help="type of the KV cache: the weights' or, with --device cuda, fp8 (e4m3)",
    )
    group.add_argument(
        "--engine",
        default="local",
        choices=("local", "synthetic"),
        help="synthetic: no model, deterministic tokens, for conformance and benchmarks",
    )
    group.add_argument("--synthetic-step-ms", type=_seconds, default=0.0, help="pace of the synthetic engine")
    group.add_argument("--synthetic-script", metavar="FILE", help="JSON: exact tokens and faults to play")
    group.add_argument(
        "--engine-url",
        action="append",
        default=[],
        metavar="URL",
        help="attach to a running engine (unix:/path or tcp://host:port) instead of starting one; may repeat",
    )
    group.add_argument("--engines", type=_positive, default=1, metavar="N", help="engines to start")
    group.add_argument("--engine-token-file", metavar="FILE", help="the secret shared with an engine over TCP")
    group.add_argument("--engine-restart-wait", type=_seconds, default=30.0, help="streams wait so long for an engine")
    group.add_argument(
        "--kv-blocks", type=_positive, help="blocks of the paged KV pool; by the free memory if not given"
    )
    group.add_argument("--block-size", type=_positive, default=16, help="tokens of a block")
    group.add_argument("--max-batch-tokens", type=_positive, help="token budget of an engine step")
    group.add_argument("--max-running", type=_positive, help="sequences in an engine step")
    group.add_argument(
        "--conformance-echo", action="store_true", help="in place of the API, echo every request and WebSocket message"
    )


def _add_listening(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to bind")
    group.add_argument("--port", type=_port, default=8000, help="0 picks a free one; the ready line names it")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM: speak TLS with this chain; SIGHUP reads it again")
    group.add_argument("--tls-key", metavar="FILE", help="PEM: the certificate's private key, not encrypted")
    group.add_argument(
        "--frontends", type=_positive, default=1, metavar="N", help="server processes on the one port; on Linux"
    )
    group.add_argument("--log-format", default="text", choices=("text", "json"), help="access log on stderr")
    group.add_argument("--drain-timeout", type=_seconds, default=30.0, help="what SIGTERM gives running streams")


def _add_streams(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--credit-window", type=_positive, default=64, help="tokens made ahead of the furthest reader")
    group.add_argument(
        "--resume-ttl", type=_seconds, default=30.0, help="how long a stream waits for its reader; 0: not"
    )
    group.add_argument("--log-bytes-per-stream", type=_positive, default=MIB, help="events kept of a stream")
    group.add_argument("--log-bytes", type=_positive, default=256 * MIB, help="events kept of all streams")
    group.add_argument("--response-ttl", type=_seconds, default=3600.0, help="how long an ended response is stored")
    group.add_argument("--response-bytes", type=_positive, default=64 * MIB, help="stored responses, all together")
    group.add_argument("--send-buffer", type=_positive, default=16 * KIB, help="SO_SNDBUF of a connection")
    group.add_argument(
        "--on-half-close",
        default="abort",
        choices=("finish", "abort"),
        help="a client that closed its sending side while it waits for an answer in one piece",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--header-timeout", default=10.0, help="for a request's head", type=_seconds_above_0)
    group.add_argument(
        "--body-timeout", default=30.0, help="between two pieces of a request's body", type=_seconds_above_0
    )
    group.add_argument("--idle-timeout", default=75.0, help="for a connection without a request", type=_seconds_above_0)
    group.add_argument(
        "--request-timeout", default=None, help="for a whole generation; none if not given", type=_seconds_above_0
    )
    group.add_argument(
        "--queue-timeout", default=60.0, help="for a generation's place in the batch", type=_seconds_above_0
    )
    group.add_argument(
        "--keepalive-interval", default=15.0, help="between pings on a quiet stream", type=_seconds_above_0
    )
    group.add_argument(
        "--write-stall-timeout", default=120.0, help="without one byte drained by the client", type=_seconds_above_0
    )
    group.add_argument("--max-body", type=_positive, default=8 * MIB, help="bytes of a request's body")
    group.add_argument("--max-header", type=_positive, default=64 * KIB, help="bytes of a request's head")
    group.add_argument(
        "--max-ws-message", type=_positive, help="bytes of a WebSocket message; 1 MiB, 16 MiB when echoing"
    )
    group.add_argument("--max-connections", type=_positive, help="by the limit on open files if not given")
    group.add_argument("--max-streams", type=_positive, default=10_000, help="streams that have not ended")
    group.add_argument("--max-queue", type=_positive, default=1024, help="sequences waiting beyond the batch")


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-keys", metavar="FILE", help="TOML file of hashed keys; without it only loopback is bound")
    group.add_argument("--rate-limit-requests", type=_positive, metavar="N", help="generations of a key in a minute")
    group.add_argument(
        "--rate-limit-tokens", type=_positive, metavar="N", help="tokens of a key in a minute, prompts and answers"
    )
    group.add_argument(
        "--forwarded-allow-ips",
        type=TrustedProxies,
        default="127.0.0.1",
        metavar="LIST",
        help="proxies whose X-Forwarded-For says who asks: addresses and networks, with commas; *: all",
    )
    group.add_argument("--insecure", action="store_true", help="bind other addresses without keys all the same")
    group.add_argument(
        "--metrics-access", default="loopback", choices=("open", "key", "loopback"), help="for /metrics, /status"
    )
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="may repeat; WebSockets too"
    )


def number(text: str, kind: type[Number], otherwise: Number) -> Number:
    """What the text says; `otherwise` if that is no number."""
    try:
        return kind(text)
    except ValueError:
        return otherwise


def _seconds(text: str) -> float:
    value = number(text, float, -1.0)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def _seconds_above_0(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _positive(text: str) -> int:
    value = number(text, int, 0)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def _port(text: str) -> int:
    value = number(text, int, -1)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return value
