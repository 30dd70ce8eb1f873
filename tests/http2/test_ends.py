"""How HTTP/2's streams and connections end: deadlines, pings, errors in plain text, drain; certificates that change."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conformance_kit.http2_wire import GET, POST, Closed, Wire, data, frame, settings, window_update
from hpack import Encoder

from protocols.http2_guard import ACK, END_HEADERS, END_STREAM, PREFACE, Code, Kind
from tests.support.http2 import Peer, dial, make_certificate
from tests.support.probes import words
from tests.support.serving import Server, until

PLAIN = [("accept", "text/plain")]


def test_a_quiet_stream_gets_pings() -> None:
    scripts = [{"match": "", "tokens": ["a", {"pause_ms": 1200}, "b"]}]
    with Server("--keepalive-interval", "0.2", scripts=scripts) as server, Peer(server.port) as peer:
        stream = peer.ask("/v1/generate?prompt=x")
        body = peer.answer(stream)[1]
        assert 2 <= body.count(b": ping\n") <= 6
        assert body.replace(b": ping\n", b"").count(b"\n\n") == body.count(b"data: ")


def test_plain_text_that_errs_ends_by_a_reset() -> None:
    """Towards text/plain an orderly end would say that the text is whole."""
    scripts = [{"match": "", "tokens": ["a", "b", {"error": "broken"}]}]
    with Server(scripts=scripts) as server, Peer(server.port) as peer:
        stream = peer.ask("/v1/generate?prompt=x", fields=PLAIN)
        peer.wait(lambda: stream in peer.resets)
        assert peer.resets[stream] == Code.INTERNAL_ERROR
        assert bytes(peer.bodies[stream]) == b"ab"
        events = peer.answer(peer.ask("/v1/generate?prompt=x"))[1]
        assert b"broken" in events and events.endswith(b"data: [DONE]\n\n")


def test_a_window_that_stays_closed_detaches_its_stream_alone() -> None:
    with (
        Server("--write-stall-timeout", "1", "--synthetic-step-ms", "2", "--drain-timeout", "1") as server,
        Peer(server.port, window=500) as peer,
    ):
        stalled = peer.ask("/v1/generate?prompt=a&max_tokens=3000")
        peer.stalled.add(stalled)
        other = peer.ask("/v1/generate?prompt=b&max_tokens=1500", fields=PLAIN)
        peer.wait(lambda: stalled in peer.resets)
        assert peer.resets[stalled] == Code.CANCEL
        assert words(peer.answer(other)[1].decode()) == 1500
        server.wait_metric('sluice_streams{state="detached"}', 1)


def test_a_connection_without_streams_is_closed_and_pings_do_not_keep_it() -> None:
    with Server("--idle-timeout", "1") as server, Wire(dial(server.port, None)) as wire:
        wire.socket.settimeout(0.05)
        pings = 0
        while wire.goaway is None and pings < 400:
            wire.send(frame(Kind.PING, 0, 0, bytes(8)))
            pings += 1
            with contextlib.suppress(TimeoutError):
                while wire.goaway is None:
                    wire.read()
        assert wire.goaway is not None and wire.goaway.code == Code.NO_ERROR
        assert 5 < pings < 400


@pytest.mark.parametrize("begun", ["preface", "settings", "headers"])
def test_a_head_that_does_not_come_to_its_end(begun: str) -> None:
    with Server("--header-timeout", "0.5") as server:
        sent = {"preface": PREFACE[:20], "settings": PREFACE + settings()[:5], "headers": PREFACE + settings()}[begun]
        with Wire(dial(server.port, None), opening=sent) as wire:
            if begun == "headers":
                wire.send(frame(Kind.HEADERS, END_STREAM, 1, b"\x82"))
            if begun == "preface":
                assert wire.socket.recv(1) == b""  # it may have been anything
            else:
                wire.connection_error(Code.ENHANCE_YOUR_CALM)


def test_a_body_that_does_not_come_in_time() -> None:
    with Server("--body-timeout", "0.5") as server, Wire(dial(server.port, None)) as wire:
        wire.send(wire.headers(1, [*POST[:3], (":path", "/v1/completions")], end=False), data(1, b"{"))
        assert wire.answer(1)[0][":status"] == "408"
        wire.stream_error(1, Code.NO_ERROR)


def test_bodies_above_the_limit_are_refused_on_their_stream() -> None:
    with Server("--max-body", "1000") as server, Wire(dial(server.port, None)) as wire:
        path = [*POST[:3], (":path", "/v1/completions")]
        wire.send(wire.headers(1, [*path, ("content-length", "1001")], end=False))
        assert wire.answer(1)[0][":status"] == "413"
        wire.send(wire.headers(3, path, end=False), data(3, bytes(600)), data(3, bytes(600)))
        assert wire.answer(3)[0][":status"] == "413"
        wire.alive()


def test_drain_finishes_streams_and_refuses_new_ones() -> None:
    """GOAWAY tells the client to go elsewhere; what comes all the same is answered as on HTTP/1.1."""
    path = "/v1/generate?prompt=a&max_tokens=200"
    with Server("--synthetic-step-ms", "5") as server, Wire(dial(server.port, None)) as wire:
        wire.send(wire.headers(1, [*GET[:3], (":path", path), *PLAIN]))
        wire.wait(lambda seen: seen.kind == Kind.HEADERS)
        server.terminate()
        text = b""
        while (seen := wire.read()).kind != Kind.GOAWAY:
            text += seen.payload if seen.kind == Kind.DATA else b""
        assert seen.payload == b"\x7f\xff\xff\xff" + bytes(4)
        wire.send(wire.headers(3, [*GET[:3], (":path", path)]), wire.headers(5, [*GET[:3], (":path", "/health")]))
        bodies = {1: text, 3: b"", 5: b""}
        with contextlib.suppress(Closed):
            while True:
                seen = wire.read()
                if seen.kind == Kind.DATA:
                    bodies[seen.stream] += seen.payload
        assert words(bodies[1].decode()) == 200
        assert b"going to stop" in bodies[3]
        assert bodies[5] == b'{"status":"ok"}'
        assert wire.goaway is not None and wire.goaway.payload == b"\0\0\0\x05" + bytes(4)
        assert server.wait() == 0


def test_drain_closes_a_quiet_connection_at_once() -> None:
    with Server("--drain-timeout", "20") as server, Wire(dial(server.port, None)) as wire:
        begun = time.monotonic()
        server.terminate()
        wire.connection_error(Code.NO_ERROR)
        assert server.wait() == 0
        assert time.monotonic() - begun < 10


def test_connections_are_counted_by_protocol() -> None:
    with Server() as server, Wire(dial(server.port, None)) as wire:
        wire.alive()
        assert server.metrics()['sluice_connections{protocol="http2"}'] == 1


class TestTls:
    def test_a_renewed_certificate_is_for_new_connections(self, tmp_path: Path) -> None:
        first, key = make_certificate(tmp_path)
        with Server("--synthetic-step-ms", "5", "--tls-cert", str(first), "--tls-key", str(key)) as server:
            assert server.ready_line.startswith("sluice ready on https://")
            with Peer(server.port, first) as peer:
                stream = peer.ask("/v1/generate?prompt=a&max_tokens=400", fields=PLAIN)
                peer.wait(lambda: peer.bodies[stream])
                old = first.read_bytes()
                second, second_key = make_certificate(tmp_path, "renewed")
                key.write_bytes(second_key.read_bytes())
                server.process.send_signal(signal.SIGHUP)
                until(lambda: "kept the old ones" in server.log, "the pair that doesn't match is refused")
                first.write_bytes(second.read_bytes())
                server.process.send_signal(signal.SIGHUP)
                until(lambda: "result=reloaded" in server.log, "the renewed pair is read")
                dial(server.port, second).close()
                (tmp_path / "old.pem").write_bytes(old)
                with pytest.raises(ssl.SSLCertVerificationError):
                    dial(server.port, tmp_path / "old.pem")
                assert words(peer.answer(stream)[1].decode()) == 400

    def test_old_versions_are_refused(self, tmp_path: Path) -> None:
        certificate, key = make_certificate(tmp_path)
        with Server("--conformance-echo", "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
            with dial(server.port, certificate) as tls:
                assert isinstance(tls, ssl.SSLSocket) and tls.version() == "TLSv1.3"
            done = _openssl(server.port, "-tls1_2")
            assert "Protocol  : TLSv1.2" in done and "ECDHE-ECDSA-AES" in done
            assert "Cipher    : 0000" in _openssl(server.port, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0")

    def test_a_client_without_alpn_gets_http1(self, tmp_path: Path) -> None:
        certificate, key = make_certificate(tmp_path)
        with (
            Server("--conformance-echo", "--tls-cert", str(certificate), "--tls-key", str(key)) as server,
            dial(server.port, certificate, alpn="http/1.1") as tls,
        ):
            tls.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert tls.recv(15) == b"HTTP/1.1 200 OK"

    def test_a_client_that_is_no_tls(self, tmp_path: Path) -> None:
        """It gets no answer; others are served, and the log stays clean (`Server` looks)."""
        certificate, key = make_certificate(tmp_path)
        with Server("--conformance-echo", "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
            with dial(server.port, None) as plain:
                plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert not plain.recv(4096).startswith(b"HTTP")
            with Wire(dial(server.port, certificate)) as wire:
                wire.send(settings(flags=ACK))
                wire.alive()

    def test_eof_means_gone(self, tmp_path: Path) -> None:
        certificate, key = make_certificate(tmp_path)
        flags = ("--metrics-access", "open", "--synthetic-step-ms", "5", "--drain-timeout", "1")
        with Server(*flags, "--tls-cert", str(certificate), "--tls-key", str(key)) as server:
            for alpn in ("h2", "http/1.1"):
                if alpn == "h2":
                    peer = Peer(server.port, certificate)
                    stream = peer.ask("/v1/generate?prompt=a&max_tokens=3000")
                    peer.wait(lambda: peer.bodies[stream])  # noqa: B023
                    gone = peer.socket
                else:
                    gone = dial(server.port, certificate, alpn=alpn)
                    gone.sendall(b"GET /v1/generate?prompt=a&max_tokens=3000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    gone.recv(1000)
                assert isinstance(gone, ssl.SSLSocket)
                gone.close()
            with Peer(server.port, certificate) as peer:
                until(lambda: b'state="detached"} 2' in peer.answer(peer.ask("/metrics"))[1], "both are detached")

    @pytest.mark.parametrize("alpn", ["h2", "http/1.1"])
    def test_a_socket_that_is_not_read_parks_and_then_detaches(self, tmp_path: Path, alpn: str) -> None:
        """TLS has buffers of its own; they fill up too."""
        certificate, key = make_certificate(tmp_path)
        flags = ("--metrics-access", "open", "--write-stall-timeout", "4", "--drain-timeout", "0.5")
        path = "/v1/generate?prompt=a&max_tokens=100000"
        with (
            Server(*flags, "--tls-cert", str(certificate), "--tls-key", str(key)) as server,
            dial(server.port, certificate, alpn=alpn, receive_buffer=4096) as unread,
            Peer(server.port, certificate) as peer,
        ):
            if alpn == "h2":
                block = Encoder().encode([*GET[:3], (":path", path)])
                window = settings((4, 2**31 - 1)) + window_update(0, 2**31 - 65_536)
                unread.sendall(PREFACE + window + frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, block))
            else:
                unread.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

            def is_in(state: str) -> bool:
                return f'state="{state}"}} 1'.encode() in peer.answer(peer.ask("/metrics"))[1]

            until(lambda: is_in("parked"), "it is parked")
            until(lambda: is_in("detached"), "it is detached")


def _openssl(port: int, *arguments: str) -> str:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", *arguments]
    done = subprocess.run(command, input="", capture_output=True, text=True, timeout=20, check=False, errors="replace")
    return done.stdout


def test_a_bad_pair_is_told_at_once(tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    _, other = make_certificate(tmp_path, "other")
    command = [sys.executable, "-m", "server", "--port", "0", "--conformance-echo", "--tls-cert", str(certificate)]
    done = subprocess.run([*command, "--tls-key", str(other)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "do not match" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "go together" in done.stderr
