"""aiohttp.web on uvloop. Argument: the port."""

import asyncio
import sys

import uvloop
from aiohttp import WSMsgType, web
from tokens import SSE_BEFORE, SSE_BEHIND, SSE_DONE, Source, asked

source = Source()
SSE_FIELDS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
TEXT_FIELDS = {"Content-Type": "text/plain; charset=utf-8"}


async def http(request: web.Request) -> web.StreamResponse:
    """POST /sse and /chunked."""
    count, size = asked(await request.read())
    sse = request.path == "/sse"
    response = web.StreamResponse(headers=SSE_FIELDS if sse else TEXT_FIELDS)
    response.enable_chunked_encoding()
    await response.prepare(request)
    stream = source.open(count, size)
    get, write = stream.queue.get, response.write
    try:
        if sse:
            for _ in range(count):
                await write(SSE_BEFORE + await get() + SSE_BEHIND)
            await write(SSE_DONE)
        else:
            for _ in range(count):
                await write(await get())
        await response.write_eof()
    finally:
        stream.dead = True
    return response


async def websocket(request: web.Request) -> web.WebSocketResponse:
    """A message for each token, then close."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    message = await socket.receive()
    if message.type is not WSMsgType.TEXT:
        return socket
    count, size = asked(message.data)
    stream = source.open(count, size, as_bytes=False)
    get, send = stream.queue.get, socket.send_str
    try:
        for _ in range(count):
            await send(await get())
        await socket.close()
    finally:
        stream.dead = True
    return socket


async def main() -> None:
    """Serve until killed."""
    app = web.Application()
    app.router.add_post("/sse", http)
    app.router.add_post("/chunked", http)
    app.router.add_get("/ws", websocket)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1]), backlog=4096).start()
    await asyncio.Event().wait()


uvloop.run(main())
