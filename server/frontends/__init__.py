"""Several server processes on one port (`--frontends N`), over the same engines.

    supervisor ── forks, restarts, drains ──> frontend 0 … N-1, each with a place
    engines    <── one connection from each frontend; the supervisor starts them and they end with it
    frontends  <── one Unix socket each, by which they ask one another

A stream lives in the process that began it, its owner: its log, its readers, its credit. Its id ends with its owner's
place, so any process can tell whom to ask. A request for a stream of another process is sent to the owner whole
(`wire.Ask`); the owner answers it as if it had come from a client of its own, and the bytes of a streamed answer come
back in pieces, as many as the asking client takes (`relay.py`). There is one way through the program for each kind of
request, and one log of each stream. What clients may have is counted in memory that all processes share
(`server.gateway.ledger`).

A process that dies takes its streams with it. Those who read them see a cut, or on a WebSocket an error, and are told
404 when they come back; everything else goes on, and the process is started again.
"""
