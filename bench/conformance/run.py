"""Run the conformance suite against other servers, and write the table of their scores.

    python bench/conformance/run.py --python PYTHON [--peers DIR] [--only NAME …] [--out FILE] [--reports DIR]

DIR (bench/peers/servers) holds the peers: `asgi_raw.py` and `fastapi_app.py` (ASGI applications), `hypercorn_srv.py`,
`aiohttp_srv.py` and `node_srv.js`, which all answer POST /sse and /chunked with as many tokens as the body's
`max_tokens` says, and open /ws. PYTHON is an interpreter that has the servers installed; node needs `ws` beside DIR.
Sluice runs on its synthetic engine, with the same pace. Imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SERVERS = REPOSITORY / "bench" / "peers" / "servers"
PROFILES = ("http1", "http2", "sse", "websocket", "streaming")
OVER_HTTP2 = ("http1", "sse", "websocket", "streaming")  # those that --http2 has cases for
STEP_MS = "3"  # a token every so often, as the suite's own run has it
START_S = 30.0
# A case of a peer that never answers costs so long; a run has over a thousand cases.
TIMEOUT_S = "10"
RUN_S_MAX = 3600
ABSENT = "not offered"
FAILURES_SHOWN = 12  # rules in the table of a server's failures, most frequent first

JSON_TOKENS = '{"max_tokens": 1, "size": 5}'
PEER_FLAGS = ["--path", "/chunked", "--body", JSON_TOKENS, "--sse-path", "/sse", "--sse-body", '{"size": 5}']
PEER_FLAGS += ["--ws-path", "/ws", "--ws-message", JSON_TOKENS]
CHAT = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
OUR_FLAGS = ["--path", "/v1/chat/completions", "--body", CHAT, "--ws-message", '{"type": "x"}']
FASTAPI_JSON = '{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "size": 5}'
FASTAPI_FLAGS = ["--path", "/chunked", "--body", FASTAPI_JSON, "--sse-path", "/sse", "--sse-body", FASTAPI_JSON]
FASTAPI_FLAGS += ["--ws-path", "/ws", "--ws-message", FASTAPI_JSON]


@dataclass(frozen=True)
class Peer:
    """A server: how it is started ({python}, {bin}, {port}), and how the suite asks it."""

    command: list[str]
    packages: tuple[str, ...]  # whose versions are shown
    flags: list[str] = field(default_factory=lambda: PEER_FLAGS)


UVICORN = ["{python}", "-m", "uvicorn", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "critical"]
GRANIAN = ["{bin}/granian", "--interface", "asgi", "--host", "127.0.0.1", "--port", "{port}", "--log-level", "critical"]
SLUICE = [sys.executable, "-m", "server", "--engine", "synthetic", "--synthetic-step-ms", STEP_MS, "--port", "{port}"]
# The application has no handler for errors of a WebSocket before its first message, and one ends a node process.
NODE_SURVIVES = "data:text/javascript,process.on('uncaughtException', () => undefined)"
PEERS = {
    "sluice": Peer([*SLUICE, "--on-half-close", "finish"], (), OUR_FLAGS),
    "fastapi": Peer(
        [*UVICORN, "--http", "httptools", "fastapi_app:app"],
        ("fastapi", "uvicorn", "httptools", "websockets"),
        FASTAPI_FLAGS,
    ),
    "uvicorn-httptools": Peer(
        [*UVICORN, "--http", "httptools", "asgi_raw:app"], ("uvicorn", "httptools", "websockets")
    ),
    "uvicorn-h11": Peer([*UVICORN, "--http", "h11", "--ws", "wsproto", "asgi_raw:app"], ("uvicorn", "h11", "wsproto")),
    "hypercorn": Peer(["{python}", "hypercorn_srv.py", "{port}"], ("hypercorn", "h11", "h2", "wsproto")),
    "granian": Peer([*GRANIAN, "--workers", "1", "asgi_raw:app"], ("granian",)),
    "aiohttp": Peer(["{python}", "aiohttp_srv.py", "{port}"], ("aiohttp",)),
    "node": Peer(["node", "--import", NODE_SURVIVES, "node_srv.js", "{port}"], ("node", "ws")),
}  # fmt: skip


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(peer: Peer, folder: Path, python: str, port: int) -> subprocess.Popen[bytes]:
    """The server's process, listening. Raises RuntimeError when it doesn't."""
    names = {"python": python, "bin": str(Path(python).parent), "port": str(port)}
    ours = peer is PEERS["sluice"]
    environment = {**os.environ, "STEP": STEP_MS, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [part.format(**names) for part in peer.command],
        cwd=REPOSITORY if ours else folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"it did not listen within {START_S:g} s: {' '.join(peer.command)}")


def judge(peer: Peer, folder: Path, python: str, profiles: tuple[str, ...], *flags: str) -> dict[str, Any]:
    """The suite's report on one server."""
    port = free_port()
    process = start(peer, folder, python, port)
    try:
        with tempfile.TemporaryDirectory(prefix="conformance-") as name:
            report = Path(name) / "report.json"
            command = [sys.executable, "-m", "pytest", "tests/conformance", "-q", "-p", "no:cacheprovider"]
            command += ["--base-url", f"http://127.0.0.1:{port}", "--report", str(report), "--timeout-s", TIMEOUT_S]
            command += [flag for profile in profiles for flag in ("--profile", profile)]
            done = subprocess.run(
                [*command, *flags, *peer.flags],
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=RUN_S_MAX,
                check=False,
            )
            if not report.exists():
                raise RuntimeError(f"no report:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            return dict(json.loads(report.read_text()))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def versions(peer: Peer, folder: Path, python: str) -> str:
    """What was measured, in words."""
    found: list[str] = []
    for package in peer.packages:
        if package == "node":
            answer = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout.strip()
        elif package == "ws":
            answer = json.loads((folder.parent / "node_modules" / "ws" / "package.json").read_text())["version"]
        else:
            code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
            answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
        found.append(f"{package} {answer.removeprefix('v')}")
    if not found:
        source = (REPOSITORY / "engine" / "version.py").read_text()
        version = re.search(r'VERSION = "(.+)"', source)
        found = [f"sluice {version[1] if version else ''}"]
    return ", ".join(found)


def cell(score: dict[str, int] | None) -> str:
    """`passed / judged`, and how many of the failures are MUSTs."""
    if score is None or not score["passed"] + score["failed"]:
        return ABSENT
    judged = score["passed"] + score["failed"]
    must = f", {score['failed_must']} must" if score["failed"] else ""
    return f"{score['passed']} / {judged}{must}"


def rows(reports: dict[str, dict[str, Any]], profiles: tuple[str, ...]) -> list[str]:
    """A line of cells for each server."""
    lines = []
    for name, report in reports.items():
        cells = [cell((report["scores"].get(profile) or {}).get("server")) for profile in profiles]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def speaks_http2(report: dict[str, Any]) -> bool:
    """Whether the http2 profile could be judged."""
    return cell((report["scores"].get("http2") or {}).get("server")) != ABSENT


def table(reports: dict[str, dict[str, Any]], over_http2: dict[str, dict[str, Any]], shown: dict[str, str]) -> str:
    """The whole of RESULTS.md."""
    cases = max(len(report["cases"]) for report in reports.values())
    lines = [
        "# Conformance of streaming servers",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {platform.system()} {platform.machine()};"
        f" {cases} cases of `tests/conformance` for each server, over the profiles that all of them can have.",
        "Cases passed of those judged; “must” counts the failures that break a MUST of a standard, the others are"
        " SHOULDs and faults that users reported. What a server does not offer isn't judged.",
        "",
        "| server | " + " | ".join(PROFILES) + " |",
        "|---" * (len(PROFILES) + 1) + "|",
        *rows(reports, PROFILES),
        "",
        "The same profiles over HTTP/2 (`--http2`, in cleartext by prior knowledge), where it is spoken; `http1` has"
        " HTTP's semantics then, the rest of it is about HTTP/1.1 only:",
        "",
        "| server | " + " | ".join(OVER_HTTP2) + " |",
        "|---" * (len(OVER_HTTP2) + 1) + "|",
        *rows(over_http2, OVER_HTTP2),
        "",
        "Versions: " + "; ".join(f"{name}: {versions}" for name, versions in shown.items()) + ".",
        "",
        "Reproduce with (an interpreter that has the peers installed is yours to give):",
        "",
        "```sh",
        "python bench/conformance/run.py --python PYTHON",
        "```",
        "",
        "The peers are small applications on each server, which stream JSON chunks; what is judged is the server under"
        " them, and for `sse` and `streaming` the application's headers, too (aiohttp's fails on HTTP/1.0 by itself).",
        "The suite is Sluice's own, and Sluice was built along its rules: the other rows are findings, no contest."
        " In `http2` an error that is told by another code than the RFC names fails its case."
        " Sluice ran with `--on-half-close finish`. Repeated runs differ by up to four cases on a server: a close with"
        " unread bytes resets the connection, and what arrives of the answer before it is chance.",
        "",
        "## What fails where",
    ]  # fmt: skip
    for name, report in {**reports, **{f"{name} over HTTP/2": report for name, report in over_http2.items()}}.items():
        failed: dict[tuple[str, str, str], int] = {}
        for case in report["cases"]:
            if case["outcome"] == "failed":
                key = (case["level"], case["rule"], case["source"])
                failed[key] = failed.get(key, 0) + 1
        if not failed:
            continue
        ranked = sorted(failed.items(), key=lambda item: (item[0][0] != "must", -item[1]))
        lines += ["", f"### {name}", ""]
        lines += [f"- {level}, {n} cases: {text} [{source}]" for (level, text, source), n in ranked[:FAILURES_SHOWN]]
        if len(ranked) > FAILURES_SHOWN:
            lines.append(f"- and {len(ranked) - FAILURES_SHOWN} more rules")
    return "\n".join(lines) + "\n"


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Run the conformance suite against other servers.")
    parser.add_argument("--peers", type=Path, default=SERVERS, help="folder of the peers' applications")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the peers installed")
    parser.add_argument("--only", action="append", choices=list(PEERS), help="may repeat")
    parser.add_argument("--reports", type=Path, help="keep each server's report in this folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "RESULTS.md")
    options = parser.parse_args()
    reports: dict[str, dict[str, Any]] = {}
    over_http2: dict[str, dict[str, Any]] = {}
    shown: dict[str, str] = {}
    for name in options.only or PEERS:
        begun = time.monotonic()
        peer, folder = PEERS[name], options.peers.resolve()
        reports[name] = judge(peer, folder, options.python, PROFILES)
        if speaks_http2(reports[name]):
            over_http2[name] = judge(peer, folder, options.python, OVER_HTTP2, "--http2")
        shown[name] = versions(peer, folder, options.python)
        for kind, found in (("", reports), ("-http2", over_http2)):
            if name not in found:
                continue
            if options.reports:
                options.reports.mkdir(parents=True, exist_ok=True)
                file = options.reports / f"{name}{kind}.json"
                file.write_text(json.dumps(found[name], indent=1), encoding="utf-8")
            scores = {profile: cell(score.get("server")) for profile, score in found[name]["scores"].items()}
            print(f"{name}{kind} ({time.monotonic() - begun:.0f} s): {scores}", flush=True)
    options.out.write_text(table(reports, over_http2, shown), encoding="utf-8")
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
