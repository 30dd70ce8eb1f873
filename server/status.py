"""What `/status` shows: streams, engine and KV pool at this moment. The playground and `python -m server top` read it.

Whoever may read `/metrics` may read it. So it holds no prompt, no text and no whole stream id, with which its reader
could attach.
"""

from __future__ import annotations

from itertools import islice

import msgspec
from msgspec.structs import asdict, replace

from server.api.answers import BlocksNow, ConnectionsNow, EngineNow, ServerNow, StreamNow, StreamsNow, TokensNow
from server.metrics import Live, Metrics
from server.outlet import sender
from server.stream import Stream
from server.table import StreamTable

# A screen holds fewer, and ten thousand would make an answer of two megabytes. The rest is only counted.
STREAMS_SHOWN_MAX = 256
ID_CHARS = 8  # enough to find it in the log


def server_now(table: StreamTable, metrics: Metrics, live: Live, model: str, *, names_keys: bool = True) -> ServerNow:
    """The state of everything. The streams that have run longest come first."""
    gauges, hello, now = live.gauges, table.engine.hello, table.clock()
    blocks = gauges.blocks_used + gauges.blocks_cached + gauges.blocks_free
    return ServerNow(
        model=model,
        token_sender=sender(),
        engine=EngineNow(
            up=hello is not None,
            restarts=metrics.engine_restarts,
            preemptions=gauges.preemptions,
            waiting=gauges.waiting,
            running=gauges.running,
            parked=gauges.parked,
            running_max=hello.running_max if hello else 0,
        ),
        streams=StreamsNow(**live.streams),
        tokens=TokensNow(
            waiting=gauges.waiting_tokens,
            running=gauges.running_tokens,
            capacity=live.token_capacity,
            generated=metrics.generated_tokens,
        ),
        kv_blocks=BlocksNow(
            used=gauges.blocks_used,
            cached=gauges.blocks_cached,
            free=gauges.blocks_free,
            tokens_each=live.token_capacity // blocks if blocks else 0,
        ),
        connections=ConnectionsNow(**live.connections),
        shown=[stream_now(stream, now, names_key=names_keys) for stream in islice(table.live, STREAMS_SHOWN_MAX)],
    )


def together(mine: ServerNow, others: list[bytes]) -> ServerNow:
    """The state of a server of several processes. `others` say nothing of the engines, which are common to all."""
    shown = list(mine.shown)
    streams, connections = asdict(mine.streams), asdict(mine.connections)
    waiting, generated = mine.tokens.waiting, mine.tokens.generated
    for text in others:
        other = msgspec.json.decode(text, type=ServerNow)
        shown += other.shown
        streams = {state: count + getattr(other.streams, state) for state, count in streams.items()}
        connections = {name: count + getattr(other.connections, name) for name, count in connections.items()}
        waiting, generated = waiting + other.tokens.waiting, generated + other.tokens.generated
    return replace(
        mine,
        streams=StreamsNow(**streams),
        connections=ConnectionsNow(**connections),
        tokens=replace(mine.tokens, waiting=waiting, generated=generated),
        shown=sorted(shown, key=lambda stream: -stream.age_s)[:STREAMS_SHOWN_MAX],
    )


def stream_now(stream: Stream, now: float, *, names_key: bool = True) -> StreamNow:
    """One stream that has not ended; `now` by its table's clock."""
    return StreamNow(
        stream=stream.id[:ID_CHARS],
        request_id=stream.request_id,
        api=stream.grammar.api,
        key=stream.key if names_key else "",
        state=stream.state,
        readers=len(stream.readers),
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=stream.completion_tokens,
        age_s=round(now - stream.created, 3),
        ttft_s=round(stream.first_token_at - stream.created, 3) if stream.first_token_at else None,
    )
