"""The socket that clients connect to."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from server.access_log import AccessLog
from server.config import Config
from server.outlet import sender

SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# A program for the kernel's packet filter (linux/filter.h): drop what has SYN in its flags, byte 13 of a TCP header.
_NO_SYN = struct.pack(
    "=" + "HBBI" * 4,
    *(0x30, 0, 0, 13),  # load that byte
    *(0x45, 0, 1, 0x02),  # SYN: go on; else leave one out
    *(0x06, 0, 0, 0),  # keep nothing of the packet
    *(0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)

# A jumbo frame's, so only loopback's are larger (64 KiB). There one of them would fill the send buffer, and a receiver
# that has one acknowledges it 40 ms later: 1.9 MB/s, behind a proxy of the same machine too.
SEGMENT_BYTES_MAX = 8960

# Of an accept that may succeed later: no file or memory for it now, or the client was gone.
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EINTR})
RETRY_S = 0.02


def listen(config: Config, *, port: int | None = None, shared: bool = False) -> socket.socket:
    """A bound socket whose connections get the send buffer. `port`: in place of the configured one; `shared`: others
    of this user may bind it as well, and connections are spread over those who listen. Raises OSError."""
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
                config.host, config.port if port is None else port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
        except socket.gaierror as error:
            raise OSError(f"can't listen on {config.host}: {error.strerror}") from None
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # where it isn't known before there is a connection
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES_MAX)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError as error:
        where = config.uds or f"{config.host}:{config.port}"
        raise OSError(f"can't listen on {where}: {error.strerror}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.send_buffer)
    listener.setblocking(False)
    return listener


def turn_away(listener: socket.socket) -> None:
    """Let nobody connect any more, so that none comes between the last accept and the close, who would be reset. What
    has connected can still be accepted. On a port, a client sends its SYN again in a second, and is then refused, or
    finds another server; nothing happens where there is no such filter (Linux has it). A Unix socket's path goes, and
    who has looked it up is refused, also one that waits for a place: for all who have the socket."""
    if listener.family == socket.AF_UNIX:
        Path(listener.getsockname()).unlink(missing_ok=True)
        with suppress(OSError):  # where only what is connected can be shut down
            listener.shutdown(socket.SHUT_RD)
    elif sys.platform == "linux":
        program = ctypes.create_string_buffer(_NO_SYN)
        with suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(program)))


async def accept_rest(
    listener: socket.socket, serve: Callable[[socket.socket], Awaitable[object]], wait_s: float
) -> None:
    """Let `serve` take whoever has connected, to the last, and close. Waits for those that it takes (a TLS handshake is
    part of that), and where there is no place for one, so long at most."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    taken = set()
    with listener:
        while loop.time() < deadline:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno not in _PASSING:  # nobody is left: EAGAIN, or EINVAL of what is shut down
                    break
                await asyncio.sleep(RETRY_S)
            else:
                sock.setblocking(False)
                taken.add(asyncio.ensure_future(serve(sock)))
                await asyncio.sleep(0)
    if taken:
        _, late = await asyncio.wait(taken, timeout=max(0.0, deadline - loop.time()))
        for task in late:
            task.cancel()
        await asyncio.gather(*taken, return_exceptions=True)  # a handshake may have failed


def say_ready(log: AccessLog, config: Config, listener: socket.socket) -> None:
    """To the log how tokens are sent, and on stdout the line that whoever started us waits for."""
    log.event("start", token_sender=sender())
    print(f"sluice ready on {_address(config, listener)}", flush=True)


def _address(config: Config, listener: socket.socket) -> str:
    if config.uds:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"
