"""Who takes part, what each needs to run, and how its server is started."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import processes

FOLDER = Path(__file__).parent
SERVERS = FOLDER / "servers"
LISTEN_S_MAX = 30.0
MODES = ("sse", "chunked", "ws")
OURS, BASELINE = "sluice", "C writer"


@dataclass(frozen=True)
class Peer:
    """A server that takes POST /sse and /chunked and a WebSocket on /ws, with {"max_tokens", "size"} as its request."""

    command: tuple[str, ...]  # with {python}, {port}, {step} and {rawc}
    needs: tuple[str, ...] = ()  # Python packages, or a program as "$name"
    modes: tuple[str, ...] = MODES
    sse: str = "/sse"  # its path


@dataclass(frozen=True)
class Target:
    """A server that runs."""

    port: int
    pid: int
    engine_pid: int = 0  # ours only


def _uvicorn(app: str, *flags: str) -> tuple[str, ...]:
    common = ("--host", "127.0.0.1", "--port", "{port}", "--log-level", "warning", "--no-access-log")
    return ("{python}", "-m", "uvicorn", *common, "--backlog", "4096", "--loop", "uvloop", *flags, app)


def _granian(app: str) -> tuple[str, ...]:
    common = ("--interface", "asgi", "--host", "127.0.0.1", "--port", "{port}", "--workers", "1", "--loop", "uvloop")
    return ("{python}", "-m", "granian", *common, "--backlog", "4096", "--log-level", "warning", "--no-access-log", app)


_UVICORN = ("uvicorn", "uvloop", "httptools", "websockets")
_FASTAPI = (*_UVICORN, "fastapi", "sse-starlette")
PEERS = {
    BASELINE: Peer(("{rawc}", "{port}", "{step}")),
    "uvloop writer": Peer(("{python}", "uvloop_writer.py", "{port}"), ("uvloop",)),
    "node": Peer(("node", "node_srv.js", "{port}"), ("$node",)),
    "granian": Peer(_granian("asgi_raw:app"), ("granian", "uvloop")),
    "aiohttp": Peer(("{python}", "aiohttp_srv.py", "{port}"), ("aiohttp", "uvloop")),
    "uvicorn, httptools": Peer(_uvicorn("asgi_raw:app", "--http", "httptools"), _UVICORN),
    "uvicorn, h11, wsproto": Peer(
        _uvicorn("asgi_raw:app", "--http", "h11", "--ws", "wsproto"), ("uvicorn", "uvloop", "h11", "wsproto")
    ),
    "hypercorn": Peer(("{python}", "hypercorn_srv.py", "{port}"), ("hypercorn", "uvloop")),
    "websockets": Peer(("{python}", "websockets_srv.py", "{port}"), ("websockets", "uvloop"), modes=("ws",)),
    "FastAPI": Peer(_uvicorn("fastapi_app:app", "--http", "httptools"), _FASTAPI),
    "FastAPI, sse-starlette": Peer(
        _uvicorn("fastapi_app:app", "--http", "httptools"), _FASTAPI, modes=("sse",), sse="/sse_starlette"
    ),
}


def build(folder: Path) -> None:
    """Compile the C writer and the load client into a folder. Raises SystemExit with what the compiler says."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SystemExit("the load client is written in C, and there is no cc here (Debian: apt-get install gcc)")
    for name in ("sload", "rawc"):
        command = [compiler, "-O2", "-Wall", "-o", str(folder / name), str(FOLDER / f"{name}.c")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}.c does not compile:\n{done.stderr}")


def versions(python: str) -> dict[str, str]:
    """What of the peers' needs is installed for that interpreter and on this machine, with versions. Raises SystemExit
    where it is none."""
    packages = sorted({need for peer in PEERS.values() for need in peer.needs if not need.startswith("$")})
    look = (
        "import importlib.metadata as m, json, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run([python, "-c", look, *packages], capture_output=True, text=True, timeout=LISTEN_S_MAX)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise SystemExit(f"{python} is no Python that can be asked for its packages") from None
    if shutil.which("node"):
        found["$node"] = subprocess.run(["node", "--version"], capture_output=True, text=True).stdout.strip()
    if (package := FOLDER / "node_modules" / "ws" / "package.json").exists():
        found["$ws"] = json.loads(package.read_text())["version"]
    return found


def missing(name: str, mode: str, found: dict[str, str]) -> list[str]:
    """What a contender lacks here."""
    if name == OURS:
        return []
    needs = [*PEERS[name].needs, *(["$ws"] if (name, mode) == ("node", "ws") else [])]
    return [need.lstrip("$") for need in needs if need not in found]


@contextmanager
def running(name: str, step_ms: float, tokens: int, python: str, binaries: Path) -> Iterator[Target]:
    """A contender's server. Ours makes answers of `tokens` tokens whatever it is asked."""
    if name == OURS:
        item = {"repeat": " tokn", "times": tokens}
        with (
            processes.engine(step_ms, {"scripts": [{"match": "", "tokens": [item]}]}) as engine,
            processes.server(engine) as ours,
        ):
            yield Target(ours.port, ours.pid, ours.engine_pid)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = {"python": python, "port": port, "step": f"{step_ms:g}", "rawc": binaries / "rawc"}
    command = [*processes.on_core(processes.SERVER_CORE), *(word.format(**words) for word in PEERS[name].command)]
    env = {**os.environ, "STEP": f"{step_ms:g}", "PYTHONPATH": str(SERVERS), "PYTHONDONTWRITEBYTECODE": "1"}
    with processes.started(name, command, SERVERS, env) as process:
        end = time.monotonic() + LISTEN_S_MAX
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"{name} does not listen: {' '.join(command)}") from None
                time.sleep(0.05)
        yield Target(port, process.pid)
