"""The token source that every Python peer shares, and the frames they all send.

One asyncio task makes, every STEP ms, one token for every stream into that stream's own unbounded asyncio.Queue, as the
output loop of vLLM's AsyncLLM does. With STEP=0 it is one token for each stream in a turn of the loop. Environment:
STEP in milliseconds.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator

STEP_S = float(os.environ.get("STEP", "0")) / 1000
CREATED = int(time.time())

# One chunk of a chat completion, split around the token's text.
SSE_BEFORE = (
    f'data: {{"id":"cmpl-1","object":"chat.completion.chunk","created":{CREATED},"model":"m",'
    '"choices":[{"index":0,"delta":{"content":"'
).encode()
SSE_BEHIND = b'"},"finish_reason":null}]}\n\n'
SSE_DONE = b"data: [DONE]\n\n"


def token(size: int) -> str:
    """So many bytes."""
    return " tokn" if size == 5 else " " + "k" * (size - 1)


def asked(body: bytes | str) -> tuple[int, int]:
    """The number of tokens and the size of each that a request wants."""
    fields = json.loads(body)
    return fields["max_tokens"], fields.get("size", 5)


class Stream:
    """Tokens wait in `queue`."""

    __slots__ = ("dead", "left", "queue", "token")

    def __init__(self, count: int, token: str | bytes) -> None:
        self.queue: asyncio.Queue[str | bytes] = asyncio.Queue()
        self.left = count
        self.token = token
        self.dead = False


class Source:
    """Makes the tokens of all streams."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._wake: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, count: int, size: int, *, as_bytes: bool = True) -> Stream:
        """A stream of so many tokens."""
        text = token(size)
        stream = Stream(count, text.encode() if as_bytes else text)
        self._streams.append(stream)
        if self._wake is None:
            self._wake = asyncio.Event()
            self._task = asyncio.get_running_loop().create_task(self._run(self._wake))
        self._wake.set()
        return stream

    async def generate(self, count: int, size: int) -> AsyncIterator[str | bytes]:
        """A stream as an asynchronous generator, as AsyncLLM.generate() is."""
        stream = self.open(count, size, as_bytes=False)
        queue = stream.queue
        try:
            for _ in range(count):
                # vLLM's fast path: what waits is taken without an await
                yield queue.get_nowait() if queue.qsize() else await queue.get()
        finally:
            stream.dead = True

    async def _run(self, wake: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._streams:
                wake.clear()
                await wake.wait()
                due = loop.time()
            if self._step():
                self._streams = [stream for stream in self._streams if stream.left > 0 and not stream.dead]
            due += STEP_S
            wait = due - loop.time()
            if wait <= 0:
                due, wait = loop.time(), 0
            await asyncio.sleep(wait)

    def _step(self) -> bool:
        """One token for each; whether any stream ended."""
        ended = False
        for stream in self._streams:
            if stream.left <= 0 or stream.dead:
                ended = True
                continue
            stream.left -= 1
            stream.queue.put_nowait(stream.token)
            if stream.left == 0:
                ended = True
        return ended
