"""The least that a Python server can do: asyncio protocols on uvloop, a call for each token, ready bytes.

No queue, no task, no framing: the step loop calls `transport.write` of each stream with the same bytes object. It is
the limit for a server in Python, as rawc.c is for any. Argument: the port. Environment: STEP in milliseconds.
"""

import asyncio
import base64
import hashlib
import sys

import uvloop
from tokens import SSE_BEFORE, SSE_BEHIND, SSE_DONE, STEP_S, asked, token

SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
TEXT_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def chunk(data: bytes) -> bytes:
    """Of HTTP/1.1's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


ENDS = {"sse": chunk(SSE_DONE) + b"0\r\n\r\n", "chunked": b"0\r\n\r\n", "ws": b"\x88\x02\x03\xe8"}
streams: list["Peer"] = []
wake = asyncio.Event()


class Peer(asyncio.Protocol):
    """A connection and its stream."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Keep it."""
        self.transport = transport
        self.buffer = b""
        self.mode = ""
        self.left = self.owed = 0
        self.paused = False

    def connection_lost(self, error: Exception | None) -> None:
        """Its stream is over."""
        self.left = 0

    def pause_writing(self) -> None:
        """What a blocked stream is owed is a count."""
        self.paused = True

    def resume_writing(self) -> None:
        """Give it."""
        self.paused = False
        while self.owed and not self.paused:
            self.owed -= 1
            self.transport.write(self.frame)
        if not self.owed and not self.left:
            self.transport.write(ENDS[self.mode])

    def data_received(self, data: bytes) -> None:
        """A request, an upgrade or a frame."""
        self.buffer += data
        if self.mode == "ws":
            self.take_frame()
            return
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        fields = {
            name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        if head.startswith(b"GET /ws"):
            accept = base64.b64encode(hashlib.sha1(fields[b"sec-websocket-key"] + GUID).digest())
            self.transport.write(UPGRADE + accept + b"\r\n\r\n")
            self.mode, self.buffer = "ws", rest
        elif len(rest) >= int(fields[b"content-length"]):
            self.buffer = b""
            self.mode = "sse" if head.startswith(b"POST /sse") else "chunked"
            self.transport.write(SSE_HEAD if self.mode == "sse" else TEXT_HEAD)
            self.begin(rest)

    def take_frame(self) -> None:
        """One masked frame under 64 KiB."""
        buffer = self.buffer
        if len(buffer) < 4:
            return
        length, at = buffer[1] & 127, 2
        if length == 126:
            length, at = int.from_bytes(buffer[2:4]), 4
        if len(buffer) < at + 4 + length:
            return
        if buffer[0] & 15 == 8:
            self.transport.close()
            return
        mask = buffer[at : at + 4]
        self.buffer = buffer[at + 4 + length :]
        self.begin(bytes(byte ^ mask[i & 3] for i, byte in enumerate(buffer[at + 4 : at + 4 + length])))

    def begin(self, body: bytes) -> None:
        """Start a stream."""
        self.left, size = asked(body)
        text = token(size).encode()
        if self.mode == "ws":
            length = bytes((len(text),)) if len(text) < 126 else b"\x7e" + len(text).to_bytes(2)
            self.frame = b"\x81" + length + text
        else:
            self.frame = chunk(SSE_BEFORE + text + SSE_BEHIND if self.mode == "sse" else text)
        streams.append(self)
        wake.set()

    def step(self) -> None:
        """One token more."""
        self.left -= 1
        if self.paused:
            self.owed += 1
            return
        self.transport.write(self.frame)
        if not self.left:
            self.transport.write(ENDS[self.mode])


async def main() -> None:
    """The step loop."""
    loop = asyncio.get_running_loop()
    await loop.create_server(Peer, "127.0.0.1", int(sys.argv[1]), backlog=4096)
    due = loop.time()
    while True:
        if not streams:
            wake.clear()
            await wake.wait()
            due = loop.time()
        ended = False
        for peer in streams:
            if peer.left:
                peer.step()
            ended = ended or not peer.left
        if ended:
            streams[:] = [peer for peer in streams if peer.left]
        due += STEP_S
        wait = due - loop.time()
        if wait <= 0:
            due, wait = loop.time(), 0
        await asyncio.sleep(wait)


uvloop.run(main())
