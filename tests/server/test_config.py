"""The command line: its defaults are DESIGN section 4's, and what can't be is refused with exit code 2."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from server import config
from server.api.response_store import StoreLimits
from server.config import KIB, MIB, Config, is_loopback
from server.gateway.limits import Rates
from server.host import Deadlines
from server.limits import Limits


def test_no_argument_serves_the_default_model_on_loopback() -> None:
    parsed = config.parse([])
    assert (parsed.host, parsed.port, parsed.uds) == ("127.0.0.1", 8000, None)
    assert parsed.engine_argv[:4] == ("--engine", "local", "--model", "smollm2-135m-instruct")
    assert parsed.loopback_only


def test_the_defaults_are_the_contracts() -> None:
    parsed = config.parse([])
    assert (parsed.limits.credit_window, parsed.limits.resume_ttl_s) == (64, 30)
    assert (parsed.limits.log_bytes_per_stream, parsed.limits.engine_restart_wait_s) == (MIB, 30)
    assert (parsed.limits.request_timeout_s, parsed.limits.queue_timeout_s) == (None, 60)
    assert parsed.deadlines == Deadlines(header_s=10, body_s=30, idle_s=75, keepalive_s=15, write_stall_s=120)
    assert (parsed.send_buffer, parsed.abort_on_half_close) == (16 * KIB, True)
    assert (parsed.max_body, parsed.max_header, parsed.max_ws_message) == (8 * MIB, 64 * KIB, MIB)
    assert (parsed.metrics_access, parsed.log_format, parsed.drain_timeout_s) == ("loopback", "text", 30)
    assert (parsed.api_keys, parsed.insecure, parsed.cors_origins) == (None, False, ())


def test_the_defaults_of_the_parts_agree_with_the_flags() -> None:
    parsed = config.parse([])
    assert parsed.limits == Limits()
    assert parsed.responses == StoreLimits()
    assert parsed.deadlines == Deadlines()


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--port", "0"], "port", 0),
        (["--uds", "/run/s.sock"], "uds", "/run/s.sock"),
        (["--served-model-name", "m"], "served_model_name", "m"),
        (["--on-half-close", "finish"], "abort_on_half_close", False),
        (["--cors-origin", "https://a", "--cors-origin", "b://c:1"], "cors_origins", ("https://a", "b://c:1")),
        (["--cors-origin", "*"], "cors_origins", ("*",)),
        (["--max-ws-message", "5"], "max_ws_message", 5),
        (["--conformance-echo"], "max_ws_message", 16 * MIB),
        (["--max-connections", "5"], "max_connections", 5),
        (["--metrics-access", "key"], "metrics_access", "key"),
        (["--log-format", "json"], "log_format", "json"),
        (["--drain-timeout", "0"], "drain_timeout_s", 0),
        (["--engine-url", "unix:/run/engine.sock"], "engine_urls", ("unix:/run/engine.sock",)),
        (["--engine-url", "tcp://10.0.0.1:9000", "--engine-token-file", "t"], "engine_urls", ("tcp://10.0.0.1:9000",)),
        (["--engine-url", "tcp://[::1]:9000", "--engine-token-file", "t"], "engine_urls", ("tcp://[::1]:9000",)),
        (["--engine-url", "unix:/a", "--engine-url", "unix:/b"], "engine_urls", ("unix:/a", "unix:/b")),
        (["--engines", "4"], "engines", 4),
        (["--frontends", "4"], "frontends", 4),
        (["--tool-parser", "mistral"], "tool_parser", "mistral"),
        ([], "tool_parser", "auto"),
        (["--host", "0.0.0.0", "--insecure"], "host", "0.0.0.0"),
        (["--rate-limit-requests", "5", "--rate-limit-tokens", "7"], "rates", Rates(5, 7)),
        ([], "rates", Rates()),
        (["--host", "0.0.0.0", "--api-keys", "keys.toml"], "api_keys", "keys.toml"),
    ],
)
def test_each_flag_reaches_its_field(flags: list[str], field: str, value: Any) -> None:
    assert getattr(config.parse(flags), field) == value


@pytest.mark.parametrize(
    ("flags", "part", "field", "value"),
    [
        (["--credit-window", "2"], "limits", "credit_window", 2),
        (["--resume-ttl", "0"], "limits", "resume_ttl_s", 0),
        (["--response-ttl", "0"], "responses", "ttl_s", 0),
        (["--response-bytes", "5"], "responses", "bytes_max", 5),
        (["--log-bytes", "5"], "limits", "log_bytes", 5),
        (["--log-bytes-per-stream", "6"], "limits", "log_bytes_per_stream", 6),
        (["--max-streams", "7"], "limits", "streams_max", 7),
        (["--max-queue", "8"], "limits", "queue_max", 8),
        (["--queue-timeout", "9.5"], "limits", "queue_timeout_s", 9.5),
        (["--request-timeout", "10"], "limits", "request_timeout_s", 10),
        (["--engine-restart-wait", "0"], "limits", "engine_restart_wait_s", 0),
        (["--header-timeout", "1"], "deadlines", "header_s", 1),
        (["--body-timeout", "2"], "deadlines", "body_s", 2),
        (["--idle-timeout", "3"], "deadlines", "idle_s", 3),
        (["--keepalive-interval", "4"], "deadlines", "keepalive_s", 4),
        (["--write-stall-timeout", "5"], "deadlines", "write_stall_s", 5),
    ],
)
def test_each_limit_reaches_its_part(flags: list[str], part: str, field: str, value: float) -> None:
    assert getattr(getattr(config.parse(flags), part), field) == value


def test_the_engine_is_told_what_it_was_given() -> None:
    flags = [
        "--engine", "synthetic", "--synthetic-step-ms", "5", "--synthetic-script", "s.json",
        "--kv-blocks", "10", "--block-size", "8", "--max-batch-tokens", "99", "--max-running", "9",
    ]  # fmt: skip
    argv = config.parse(flags).engine_argv
    told = dict(zip(argv[::2], argv[1::2], strict=True))
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert told.items() >= {**given, "--synthetic-step-ms": "5.0"}.items()
    assert "--kv-blocks" not in config.parse([]).engine_argv


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "give --api-keys FILE, or --insecure"),
        (["--host", "192.168.1.5"], "no loopback address"),
        (["--host", "::"], "no loopback address"),
        (["--host", ""], "no loopback address"),
        (["--host", "example.org"], "no loopback address"),
        (["--host", "0.0.0.0", "--insecure", "--conformance-echo"], "loopback addresses only"),
        (["--host", "0.0.0.0", "--api-keys", "k", "--conformance-echo"], "loopback addresses only"),
        (["--engine-url", "unix:/a", "--engines", "2"], "give one of them"),
        (["--engine-url", "unix:/a", "--engine-url", "tcp://h:1"], "needs --engine-token-file"),
        (["--engines", "0"], "at least 1"),
        (["--frontends", "63"], "at most 62"),
        (["--cors-origin", "example.org"], "--cors-origin example.org: an origin is"),
        (["--cors-origin", "https://example.org/"], "without a path"),
        (["--cors-origin", "https://Example.org"], "an origin is"),
        (["--engine-url", "tcp://h:1"], "needs --engine-token-file"),
        (["--engine-url", "http://h:1"], "unix:/path or tcp://host:port"),
        (["--engine-url", "unix:"], "unix:/path or tcp://host:port"),
        (["--engine-url", "tcp://host", "--engine-token-file", "t"], "unix:/path or tcp://host:port"),
        (["--engine-url", "tcp://host:x", "--engine-token-file", "t"], "unix:/path or tcp://host:port"),
        (["--credit-window", "1"], "granted in halves"),
        (["--credit-window", "0"], "at least 1"),
        (["--port", "65536"], "is no port"),
        (["--port", "-1"], "is no port"),
        (["--idle-timeout", "soon"], "soon is not a number of at least 0"),
        (["--port", "http"], "http is no port"),
        (["--resume-ttl", "-1"], "at least 0"),
        (["--rate-limit-requests", "0"], "at least 1"),
        (["--rate-limit-tokens", "x"], "--rate-limit-tokens"),
        (["--forwarded-allow-ips", "localhost"], "--forwarded-allow-ips"),
        (["--resume-ttl", "nan"], "at least 0"),
        (["--resume-ttl", "inf"], "at least 0"),
        (["--header-timeout", "0"], "more than 0"),
        (["--max-body", "0"], "at least 1"),
        (["--max-body", "1.5"], "1.5 is not a whole number of at least 1"),
        (["--engine", "remote"], "--engine"),
        (["--dtype", "int4"], "--dtype"),
        (["--metrics-access", "all"], "--metrics-access"),
        (["--on-half-close", "ignore"], "--on-half-close"),
        (["--max-strems", "5"], "unrecognized"),
        (["--max-st", "5"], "unrecognized"),
        (["extra"], "unrecognized"),
    ],
)
def test_what_can_not_be_is_refused_with_a_sentence(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        config.parse(flags)
    assert exit_.value.code == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_help_names_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        config.parse(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--credit-window", "--api-keys", "--engine-url", "--drain-timeout"):
        assert flag in text
    assert "(default: 64)" in text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "", "127.0.0.1.example.org"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_a_unix_socket_is_this_machines_whatever_the_host() -> None:
    assert config.parse(["--uds", "/run/s.sock", "--host", "0.0.0.0"]).loopback_only


def test_the_configuration_is_frozen() -> None:
    parsed = config.parse([])
    with pytest.raises(AttributeError):
        parsed.port = 1  # type: ignore[misc]
    assert {field.name for field in fields(Config)} == set(Config.__slots__)
