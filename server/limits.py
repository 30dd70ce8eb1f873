"""How many streams, how long and how large, whoever asks; server/gateway/limits has what each client may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds on streams; the flags of the same names set them."""

    credit_window: int = 64
    resume_ttl_s: float = 30.0
    log_bytes_per_stream: int = 1024 * 1024
    log_bytes: int = 256 * 1024 * 1024
    streams_max: int = 10_000  # that have not ended
    queue_max: int = 1024  # streams that wait for a place in the batch
    queue_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    engine_restart_wait_s: float = 30.0
