"""`python -m bench peers`: our server's streaming path beside other servers', as CPU time for each token.

    python3 -m venv peers && peers/bin/pip install uvicorn httptools uvloop fastapi sse-starlette hypercorn granian \\
        aiohttp websockets h11 wsproto            # any of them; and `npm install` in bench/peers for Node's WebSockets
    python -m bench peers --python peers/bin/python

Each contender streams tokens of five bytes to the same load client (sload.c) over Server-Sent Events, chunked text and
WebSocket, 512 and (without --quick) 2,000 streams at once, a token for each every 20 ms and (without --quick) as fast
as it can. The server has one core and the client another. Contenders come by turns in each round, and the ratio is to
the C writer (rawc.c) of the same round, which makes one send(2) for each token and is the limit. Figures are medians
with the least and the most.

Ours is measured whole, as its users have it: tokens come from an engine process over the wire, are detokenised, logged,
framed and written, and every answer has its line in the access log. The CPU time is the server process's; the engine's
is shown apart. The others make their tokens themselves, ready bytes from a task and a queue for each stream
(servers/tokens.py), and have no engine, log, credit or resume.

CPU µs  of the server process for each token, while all streams are under way; with a star where they never all were,
        and it is over the whole run
TTFT    at 20 ms a token some of it is waiting for the engine's next step
gap     between tokens of one stream at the client. A median under the pace is of a server that was behind and caught
        up: it writes several tokens at once meanwhile, which is cheaper than keeping pace
"""

from bench.peers.race import main

__all__ = ["main"]
