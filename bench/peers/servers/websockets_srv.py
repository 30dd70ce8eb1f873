"""The asyncio server of `websockets` on uvloop; WebSocket only. Argument: the port."""

import asyncio
import sys

import uvloop
from tokens import Source, asked
from websockets.asyncio.server import ServerConnection, serve

source = Source()


async def handle(socket: ServerConnection) -> None:
    """A message for each token."""
    count, size = asked(await socket.recv())
    stream = source.open(count, size, as_bytes=False)
    get, send = stream.queue.get, socket.send
    try:
        for _ in range(count):
            await send(await get())
    finally:
        stream.dead = True


async def main() -> None:
    """Serve until killed."""
    async with serve(handle, "127.0.0.1", int(sys.argv[1]), backlog=4096):
        await asyncio.Event().wait()


uvloop.run(main())
