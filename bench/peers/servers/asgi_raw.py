"""A bare ASGI application, without a framework: under uvicorn, hypercorn and granian."""

from tokens import SSE_BEFORE, SSE_BEHIND, SSE_DONE, Source, asked

source = Source()
SSE_FIELDS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
TEXT_FIELDS = [(b"content-type", b"text/plain; charset=utf-8")]


async def app(scope, receive, send):
    """POST /sse and /chunked, and a WebSocket on /ws."""
    if scope["type"] == "http":
        await _http(scope, receive, send)
    elif scope["type"] == "websocket":
        await _websocket(receive, send)
    else:
        await _lifespan(receive, send)


async def _http(scope, receive, send):
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    count, size = asked(body)
    sse = scope["path"] == "/sse"
    await send({"type": "http.response.start", "status": 200, "headers": SSE_FIELDS if sse else TEXT_FIELDS})
    stream = source.open(count, size)
    get = stream.queue.get
    try:
        if sse:
            for _ in range(count):
                body = SSE_BEFORE + await get() + SSE_BEHIND
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": SSE_DONE, "more_body": True})
        else:
            for _ in range(count):
                await send({"type": "http.response.body", "body": await get(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        stream.dead = True


async def _websocket(receive, send):
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})
    message = await receive()
    if message["type"] != "websocket.receive":
        return
    count, size = asked(message.get("text") or message["bytes"])
    stream = source.open(count, size, as_bytes=False)
    get = stream.queue.get
    try:
        for _ in range(count):
            await send({"type": "websocket.send", "text": await get()})
        await send({"type": "websocket.close", "code": 1000})
    finally:
        stream.dead = True


async def _lifespan(receive, send):
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
