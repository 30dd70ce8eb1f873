"""What the cases of kind A share: requests as bytes with whatever fields, the framings of a stream, and its text."""

from __future__ import annotations

from tests.support.serving import Answer, Client, joined, until

CHAT = "/v1/chat/completions"
FRAMINGS = ("text/event-stream", "application/x-ndjson", "text/plain")


def post(headers: str, body: bytes = b"", path: str = CHAT) -> bytes:
    """A POST with these lines for fields, right or wrong."""
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode() + body


def accept(framing: str) -> list[tuple[str, str]]:
    """The header that asks for it."""
    return [("Accept", framing)]


def text_of(framing: str, answer: Answer) -> str:
    """The text that a chat stream in one of the framings carries."""
    if framing == "text/plain":
        return bytes(answer.body).decode()
    return joined(answer.chunks() if framing == "text/event-stream" else answer.lines())


def wait_let_go(client: Client) -> None:
    """Send a byte at a time until the server has none of it any more."""

    def refused() -> bool:
        try:
            client.send(b".")
        except OSError:
            return True
        return False

    until(refused, "the server hears no more of it", deadline_s=10)
