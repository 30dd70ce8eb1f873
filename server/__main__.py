"""`python -m server`: start an engine, listen, serve, drain."""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # Until the loop takes the signals over: Ctrl-C ends us as SIGTERM does, not with a traceback of some import.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import asyncio
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from engine.tokenizer import Tokenizer
from engine.wire import Gauges
from server import config as configuration
from server import garbage
from server import outcome as outcomes
from server.access_log import AccessLog
from server.api.generation import Generation, Model
from server.api.response_store import ResponseStore
from server.app import App, Policy, new_request_id
from server.chat import ChatTemplate
from server.config import Config
from server.connection import Connection
from server.echo import EchoProgram
from server.elsewhere import Alone
from server.engines import EngineFailed, EngineLink, Vocabulary, threads_each
from server.frontends.desk import Desk
from server.frontends.frontend import Frontend, share_of
from server.frontends.mesh import Mesh
from server.frontends.owner import Guest
from server.frontends.supervisor import Supervisor
from server.gateway import key_file
from server.gateway.access import Gateway
from server.gateway.balancer import Balancer, Link
from server.gateway.key_file import KeysError, read_keys
from server.gateway.keys import Keys
from server.gateway.ledger import LedgerFull
from server.gateway.limits import SETTLE_S
from server.host import Host
from server.http import Program
from server.listening import accept_rest, listen, say_ready, turn_away
from server.metrics import PROTOCOLS, STATES, Live, Metrics
from server.outcome import Outcome
from server.places import take_place
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

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop, frontend: Frontend | None = None) -> None:
        """`frontend`: this is one of several processes."""
        self._config = config if frontend is None else share_of(config, frontend.count)
        self._frontend = frontend
        self._mesh = None if frontend is None else Mesh(frontend.folder, frontend.index, frontend.count)
        self._loop = loop
        self._log = AccessLog(config.log_format, clock=time.monotonic)
        self._metrics = Metrics()
        self._engines: Balancer | None = None
        self._table: StreamTable | None = None
        self._app: App | None = None
        self._desk: Desk | None = None
        self._host: Host | None = None
        self._certificates: Certificates | None = None
        self._keys = Keys(None)
        self._gateway: Gateway | None = None
        self._tracer: Tracer | None = None
        self._stop = asyncio.Event()
        self._let_go = asyncio.Event()  # by the supervisor; see Frontend.leave
        self._hurried = False  # a second signal came

    async def run(self) -> int:
        """Serve until a signal comes; the exit code."""
        config, frontend = self._config, self._frontend
        if frontend is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._on_signal)
        if config.api_keys:
            self._keys = Keys(read_keys(config.api_keys))
        if config.tls_cert and config.tls_key:
            self._certificates = Certificates(Path(config.tls_cert), Path(config.tls_key))
        if frontend is None:
            self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
            listener = listen(config)  # before the model is loaded: a port in use is known at once
        else:
            take_place(frontend.index)
            frontend.watch(self._loop, self._on_signal, self._on_hangup, self._let_go.set)
            listener = frontend.listener or listen(config, port=frontend.port, shared=True)
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
        if self._mesh is not None and self._desk is not None:
            await self._mesh.listen(self._desk)
        listener.listen(BACKLOG)
        servers = [await self._serve(host, listener)]
        servers += [await self._serve(host, listener.dup()) for _ in range(LISTENING_DESCRIPTORS - 1)]
        garbage.settle()
        if frontend is None:
            say_ready(self._log, config, listener)
        else:
            frontend.ready()
        await self._stop.wait()
        await self._drain(host)
        await self._farewell(host)
        await self._stop_listening(host, listener, servers)
        await self._farewell(host)  # of those who came last
        if self._engines is not None:
            await self._engines.close()
        if self._tracer is not None:
            await self._tracer.exporter.close(TRACES_FAREWELL_S)
        return 1 if self._hurried else 0

    async def _serve(self, host: Host, listener: socket.socket) -> asyncio.Server:
        return await self._loop.create_server(
            lambda: Connection(host), sock=listener, backlog=BACKLOG, **self._tls_options(host)
        )

    def _tls_options(self, host: Host) -> dict[str, Any]:
        """For the loop."""
        if self._certificates is None:
            return {}
        return {
            "ssl": self._certificates.context,
            "ssl_handshake_timeout": host.deadlines.header_s,
            "ssl_shutdown_timeout": TLS_GOODBYE_S,
        }

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
                threads=threads_each(config.engines),
            )

        urls = config.engine_urls if self._frontend is None else self._frontend.engine_urls
        return [link(url) for url in urls or [None] * config.engines]

    def _assemble(self, model: Model, engines: Balancer) -> App:
        config, frontend = self._config, self._frontend
        gateway = self._gateway = Gateway(
            self._keys,
            config.rates,
            model=model.name,
            book=frontend.ledger if frontend else None,
            token_secret=frontend.token_secret if frontend else b"",
        )
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
        generation = Generation(table, model, ResponseStore(config.responses), self._tracer, self._mesh or Alone())
        self._app = App(
            generation,
            self._metrics,
            gateway,
            policy,
            self._log,
            engine_up=lambda: engines.hello is not None,
            refresh_gauges=self._refresh_gauges,
        )
        if frontend is not None:
            self._desk = Desk(self._app, generation, self._metrics, self._own_live)
            self._settle()
        return self._app

    async def _refresh_gauges(self) -> None:
        """An engine tells a process how it is whenever that one's sequences went on: others must ask."""
        if self._engines is None or self._frontend is None:
            return
        await self._engines.refresh()
        if not self._config.engine_urls:
            self._metrics.engine_restarts = self._frontend.ledger.engine_restarts

    def _settle(self) -> None:
        """Tell the other processes, again and again, what the streams here have made of their keys' tokens."""
        if self._gateway is not None:
            self._gateway.limiter.settle()
        self._loop.call_later(SETTLE_S, self._settle)

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

    def _own_live(self) -> Live:
        """Without what all processes have in common: the engines."""
        assert self._table is not None
        return replace(self._live(), gauges=self._table.count_homeless(Gauges()), token_capacity=0, sequence_capacity=0)

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
        except (TlsError, KeysError, LedgerFull) as error:
            self._log.event(what, result="kept the old ones", message=str(error))

    def _reload_keys(self) -> None:
        """Streams go on, also those of a key that is gone; it starts no others."""
        assert self._config.api_keys is not None
        keys = read_keys(self._config.api_keys)
        if self._frontend is not None:
            self._frontend.ledger.reserve(key.name for key in keys)
        self._keys.replace(keys)
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

    async def _farewell(self, host: Host) -> None:
        """Close the connections that there are, each behind its last answer. Those that come meanwhile are served."""
        leaving = set(host.connections)
        for connection in leaving:
            connection.drain()
        deadline = self._loop.time() + FAREWELL_S
        while (leaving & host.connections or self._guests) and self._loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_LOOK_S)
        for connection in leaving & host.connections:
            connection.abort()

    async def _stop_listening(self, host: Host, listener: socket.socket, servers: list[asyncio.Server]) -> None:
        """Whoever has connected is still accepted."""
        if self._frontend is not None and self._frontend.listener is not None:
            self._frontend.leave()  # the socket is everybody's
            await self._let_go.wait()
        else:
            turn_away(listener)
            await asyncio.sleep(DRAIN_LOOK_S)  # handshakes that are half done
        rest = listener.dup()
        for server in servers:  # the loop would take what is shut down for a fault
            server.close()

        def serve(sock: socket.socket) -> Awaitable[object]:
            return self._loop.connect_accepted_socket(lambda: Connection(host), sock, **self._tls_options(host))

        await accept_rest(rest, serve, FAREWELL_S)

    def _end_streams(self) -> None:
        if self._table is not None:
            for stream in list(self._table.live):
                stream.finish(Outcome(outcomes.ERROR, "the server is stopping", retriable=True))

    def _has_work(self, host: Host) -> bool:
        if self._table is not None and any(True for _ in self._table.live):
            return True
        return bool(self._guests) or any(connection.busy for connection in host.connections)

    @property
    def _guests(self) -> set[Guest]:
        """Calls of other processes' clients."""
        return self._mesh.guests if self._mesh is not None else set()


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


async def _serve(config: Config, frontend: Frontend | None = None) -> int:
    return await Server(config, asyncio.get_running_loop(), frontend).run()


def _frontend(config: Config, frontend: Frontend) -> int:
    return _reported(lambda: uvloop.run(_serve(config, frontend)))


def _reported(serve: Callable[[], int]) -> int:
    """The exit code of `serve`; what kept it from serving is said."""
    try:
        return serve()
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
    config = configuration.parse(argv)
    if config.frontends > 1:
        return _reported(lambda: Supervisor(config, _frontend).serve())
    return _reported(lambda: uvloop.run(_serve(config)))


if __name__ == "__main__":
    sys.exit(main())
