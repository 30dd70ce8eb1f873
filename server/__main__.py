"""`python -m server`: start an engine, listen, serve, drain."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until the loop takes the signals over: Ctrl-C ends us as SIGTERM does, not with a traceback of some import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from engine.tokenizer import Tokenizer
from server import config as configuration
from server import outcome as outcomes
from server.access_log import AccessLog
from server.api.generation import Generation, Model
from server.api.response_store import ResponseStore
from server.app import App, Policy, new_request_id
from server.chat import ChatTemplate
from server.config import Config
from server.connection import Connection
from server.echo import EchoProgram
from server.engines import EngineFailed, EngineLink, Vocabulary
from server.gateway import key_file
from server.gateway.access import Gateway
from server.gateway.balancer import Balancer, Link
from server.gateway.key_file import KeysError, read_keys
from server.gateway.keys import Keys
from server.host import Host
from server.http import Program
from server.metrics import PROTOCOLS, STATES, Live, Metrics
from server.outcome import Outcome
from server.table import StreamTable
from server.tls import Certificates, TlsError
from server.tools.formats import SYNTAXES, syntax_of
from server.tracing import Tracer, open_exporter

BACKLOG = 4096  # connections that wait for the loop: two thousand clients may come in one instant
# The loop takes one connection of each listening descriptor in a turn. When each turn writes to hundreds of streams, a
# crowd of new clients would wait for seconds, so the one socket has several descriptors.
LISTENING_DESCRIPTORS = 16
# Descriptors that are not connections: standard streams, the engine, the loop's own.
RESERVED_FILES = 64
# After the last stream's end: time for its last bytes to leave, and for WebSockets to say goodbye.
FAREWELL_S = 2.0
# A client's answer to our goodbye in TLS; nothing is lost without it.
TLS_GOODBYE_S = 2.0
DRAIN_LOOK_S = 0.02
# For the last traces to reach their collector, if it is there.
TRACES_FAREWELL_S = 3.0
EXIT_S = 0.05  # from a second signal to the end: some turns of the loop, in which the last answers are written


class Server:
    """All parts of a running server, and its end."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        self._config = config
        self._loop = loop
        self._log = AccessLog(config.log_format, clock=time.monotonic)
        self._metrics = Metrics()
        self._engines: Balancer | None = None
        self._table: StreamTable | None = None
        self._app: App | None = None
        self._host: Host | None = None
        self._certificates: Certificates | None = None
        self._keys = Keys(None)
        self._gateway: Gateway | None = None
        self._tracer: Tracer | None = None
        self._stop = asyncio.Event()
        self._hurried = False  # a second signal came

    async def run(self) -> int:
        """Serve until a signal comes; the exit code."""
        config = self._config
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        if config.api_keys:
            self._keys = Keys(read_keys(config.api_keys))
        if config.tls_cert and config.tls_key:
            self._certificates = Certificates(Path(config.tls_cert), Path(config.tls_key))
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        listener = _listen(config)  # before the model is loaded: a port in use is known at once
        program = await self._start_program()
        if program is None:
            return 0
        host = self._host = Host(
            program=program,
            deadlines=config.deadlines,
            loop=self._loop,
            max_header=config.max_header,
            max_body=config.max_body,
            max_ws_message=config.max_ws_message,
            abort_on_half_close=config.abort_on_half_close,
            connections_max=config.max_connections or _raise_file_limit() - RESERVED_FILES,
            new_request_id=new_request_id,
            connections=set(),
            trusted=config.trusted_proxies,
        )
        listener.listen(BACKLOG)
        servers = [await self._serve(host, listener)]
        servers += [await self._serve(host, listener.dup()) for _ in range(LISTENING_DESCRIPTORS - 1)]
        gc.collect()
        gc.freeze()  # what is here stays: the collector need not look at it again and again
        print(f"sluice ready on {_address(config, listener)}", flush=True)
        await self._stop.wait()
        await self._drain(host)
        for server in servers:
            server.close()
        if self._engines is not None:
            await self._engines.close()
        if self._tracer is not None:
            await self._tracer.exporter.close(TRACES_FAREWELL_S)
        if config.uds:
            os.unlink(config.uds)
        return 1 if self._hurried else 0

    async def _serve(self, host: Host, listener: socket.socket) -> asyncio.Server:
        if self._certificates is None:
            return await self._loop.create_server(lambda: Connection(host), sock=listener, backlog=BACKLOG)
        return await self._loop.create_server(
            lambda: Connection(host),
            sock=listener,
            backlog=BACKLOG,
            ssl=self._certificates.context,
            ssl_handshake_timeout=host.deadlines.header_s,
            ssl_shutdown_timeout=TLS_GOODBYE_S,
        )

    async def _start_program(self) -> Program | None:
        """What is served, with its engine; None when a signal came first."""
        config = self._config
        if config.conformance_echo:
            return EchoProgram()
        engines = self._engines = Balancer(self._links())
        starting = self._loop.create_task(engines.start())
        stopping = self._loop.create_task(self._stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await engines.close()
            return None
        hello = starting.result()
        tokenizer = Tokenizer(hello.tokenizer)
        spec = hello.tokenizer
        template = ChatTemplate(spec.chat_template, spec.bos_token, spec.eos_token)
        syntax = SYNTAXES.get(config.tool_parser) or syntax_of(spec.chat_template, takes_tools=template.takes_tools)
        model = Model(
            name=config.served_model_name or hello.model,
            hello=hello,
            tokenizer=tokenizer,
            template=template,
            created=int(time.time()),
            syntax=syntax,
        )
        return self._assemble(model, engines)

    def _links(self) -> list[Link]:
        config, vocabulary = self._config, Vocabulary()

        def link(url: str | None) -> EngineLink:
            return EngineLink(
                config.engine_argv,
                url,
                _read_secret(config),
                self._log,
                vocabulary=vocabulary,
                on_restart=self._count_restart,
                threads=max(1, (os.cpu_count() or 1) // config.engines) if config.engines > 1 else None,
            )

        return [link(url) for url in config.engine_urls or [None] * config.engines]

    def _assemble(self, model: Model, engines: Balancer) -> App:
        config = self._config
        gateway = self._gateway = Gateway(self._keys, config.rates, model=model.name)
        table = self._table = StreamTable(
            engines,
            model.tokenizer,
            gateway.limiter,
            self._metrics,
            config.limits,
            clock=time.monotonic,  # the loop's own counts whole milliseconds
            call_later=lambda seconds, call: self._loop.call_later(seconds, call).cancel,
            log_access=self._log.stream,
            log_fault=self._log.fault,
        )
        engines.listen(table)
        self._metrics.live = self._live
        exporter = open_exporter(os.environ, lambda sentence: self._log.event("traces", message=sentence))
        self._tracer = Tracer(exporter, model.name, clock=time.monotonic) if exporter else None
        policy = Policy(
            cors_origins=config.cors_origins,
            loopback_hosts_only=not self._keys.required and not config.insecure and config.uds is None,
            metrics_access=config.metrics_access,
        )
        self._app = App(
            Generation(table, model, ResponseStore(config.responses), self._tracer),
            self._metrics,
            gateway,
            policy,
            self._log,
            engine_up=lambda: engines.hello is not None,
        )
        return self._app

    def _live(self) -> Live:
        assert self._table is not None
        assert self._host is not None
        streams = dict.fromkeys(STATES, 0)
        for stream in self._table.live:
            streams[stream.state] += 1
        connections = dict.fromkeys(PROTOCOLS, 0)
        for connection in self._host.connections:
            connections[connection.protocol] += 1
        assert self._engines is not None
        hello = self._engines.hello
        gauges = self._table.count_homeless(self._engines.gauges)
        return Live(streams, connections, gauges, hello.pool_tokens if hello else 0, hello.running_max if hello else 0)

    def _on_hangup(self) -> None:
        """Read again what may have changed on disk. With nothing to read it is heard all the same: the signal's
        default would end every stream."""
        if self._certificates is not None:
            self._reload("certificates", self._certificates.reload)
        if self._config.api_keys:
            self._reload("keys", self._reload_keys)

    def _reload(self, what: str, reload: Callable[[], None]) -> None:
        try:
            reload()
            self._log.event(what, result="reloaded")
        except (TlsError, KeysError) as error:
            self._log.event(what, result="kept the old ones", message=str(error))

    def _reload_keys(self) -> None:
        """Streams go on, also those of a key that is gone; it starts no others."""
        assert self._config.api_keys is not None
        self._keys.replace(read_keys(self._config.api_keys))
        if self._gateway is not None:
            self._gateway.limiter.refresh()

    def _count_restart(self) -> None:
        self._metrics.engine_restarts += 1

    # The end

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._exit_now()
        self._stop.set()

    def _exit_now(self) -> None:
        """Whoever asks twice wants it now: in this turn every stream gets its outcome and its line in the log, and what
        the sockets take of the last frames; answers in one piece follow in the next. The engine sees our socket
        close."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)  # whoever asks a third time is not even heard
        self._hurried = True
        self._loop.call_later(EXIT_S, os._exit, 1)
        self._end_streams()

    async def _drain(self, host: Host) -> None:
        """Let streams run to the deadline, then end them in-band; refuse new ones meanwhile."""
        self._log.event("drain", connections=len(host.connections))
        host.draining = True
        if self._app is not None:
            self._app.draining = True
        for connection in list(host.connections):
            connection.drain()
        deadline = self._loop.time() + self._config.drain_timeout_s
        while self._has_work(host) and self._loop.time() < deadline:  # noqa: ASYNC110 (a few looks, once in a life)
            await asyncio.sleep(DRAIN_LOOK_S)
        self._end_streams()
        for connection in list(host.connections):
            connection.drain()
        deadline = self._loop.time() + FAREWELL_S
        while host.connections and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        for connection in list(host.connections):
            connection.abort()

    def _end_streams(self) -> None:
        if self._table is not None:
            for stream in list(self._table.live):
                stream.finish(Outcome(outcomes.ERROR, "the server is stopping", retriable=True))

    def _has_work(self, host: Host) -> bool:
        if self._table is not None and any(True for _ in self._table.live):
            return True
        return any(connection.busy for connection in host.connections)


def _listen(config: Config) -> socket.socket:
    """A bound socket whose connections get the send buffer. Raises OSError."""
    if config.uds:
        path = Path(config.uds)
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise OSError(f"another server answers on {path}")
            path.unlink()  # left by a server that was killed
        listener = socket.socket(socket.AF_UNIX)
        address: Any = str(path)
    else:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            raise OSError(f"can't listen on {config.host}: {error.strerror}") from None
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise OSError(f"can't listen on {where}: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer)
    listener.setblocking(False)
    return listener


def _address(config: Config, listener: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _raise_file_limit() -> int:
    """Raise the soft limit on open files to the hard one; what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _read_secret(config: Config) -> bytes:
    if config.engine_token_file is None:
        return b""
    secret = Path(config.engine_token_file).read_bytes().strip()
    if not secret:
        raise OSError(f"{config.engine_token_file} holds no token")
    return secret


async def _main(config: Config) -> int:
    try:
        return await Server(config, asyncio.get_running_loop()).run()
    except EngineFailed as error:
        print(f"server: {error}", file=sys.stderr)
        return error.code
    except (KeysError, TlsError) as error:
        print(f"server: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"server: {error}", file=sys.stderr)
        return 1


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 after a drain, 2 for bad usage, 1 otherwise."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["keys"]:
        return key_file.main(argv[1:])
    if argv[:1] == ["top"]:
        from server import top  # a server has no use for it

        return top.main(argv[1:])
    return uvloop.run(_main(configuration.parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
